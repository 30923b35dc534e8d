"""A key covers what a factory really builds, whatever its code reads: a file, the environment, a list elsewhere."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from optimize.models.built_network import architecture_of, built_digest
from optimize.models.checkpoint import Checkpoint
from optimize.models.model_names import resolve_model
from optimize.models.source import ModelSource
from optimize.run.session import Session, Step
from optimize.store.objects import Store
from serve.runtime.card.card import Preprocessing
from tests.optimize.workbench import noise_context

CODE = """
import json, os, pathlib, random
import torch
from torch import nn

def settings():
    return json.loads((pathlib.Path(__file__).parent / "arch.json").read_text())

class Scaled(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale
    def forward(self, x):
        return x * self.scale

class Secret(nn.Module):
    def forward(self, x):
        return x * float(os.environ.get("SECRET_SCALE", "1"))

class Dropped(nn.Module):
    def forward(self, x):
        return nn.functional.dropout(x, float(os.environ.get("DROP", "0.5")), self.training)

def net(num_classes):
    read = settings()
    width = read["width"]
    head = nn.Linear(width, num_classes)
    if "bias" in read:
        nn.init.constant_(head.bias, read["bias"])
    return nn.Sequential(
        nn.Conv2d(1, width, 3), nn.BatchNorm2d(width), Scaled(read.get("scale", 1.0)), Secret(), Dropped(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), head,
    )

def of_chance(num_classes):
    module = net(num_classes)
    with torch.no_grad():
        module[0].weight.add_(int.from_bytes(os.urandom(4), "big") / 2**32)
    return module

def drawing(num_classes):
    random.random()
    return net(num_classes)

def lazy(num_classes):
    width = settings()["width"]
    return nn.Sequential(
        nn.LazyConv2d(width, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LazyLinear(num_classes)
    )

def failing(num_classes):
    class Failing(nn.Module):
        def forward(self, x):
            raise RuntimeError("no")
    return Failing()
"""
SHAPE = Preprocessing(resize=16, crop=(16, 16), mean=(0.5,), std=(0.5,))


@pytest.fixture
def net(tmp_path: Path):
    """``net(factory, **settings)``: the source of a factory, beside whose file the settings lie."""
    (tmp_path / "net.py").write_text(CODE)

    def source(factory: str = "net", **settings: float) -> ModelSource:
        (tmp_path / "arch.json").write_text(json.dumps({"width": 4, **settings}))
        return resolve_model(f"{tmp_path / 'net.py'}:{factory}")

    return source


def key(source: ModelSource) -> tuple[str, str]:
    return architecture_of(source, 4, SHAPE)


def test_the_same_network_has_the_same_key(net) -> None:
    torch.manual_seed(1)
    first = key(net())
    torch.manual_seed(2)
    assert key(net()) == first
    assert first[1] == "net"


@pytest.mark.parametrize(
    "settings", [{"width": 5}, {"scale": 2.0}, {"bias": 0.25}], ids=["structure", "attribute", "value"]
)
def test_what_a_factory_reads_from_a_file_is_in_the_key(net, settings: dict[str, float]) -> None:
    plain, other = net(), net(**settings)
    assert key(other) != key(net())
    assert plain.fingerprint == other.fingerprint  # of the code alone


@pytest.mark.parametrize(("variable", "value"), [("SECRET_SCALE", "3"), ("DROP", "0.1")])
def test_what_a_network_reads_when_it_runs_or_trains_is_in_the_key(
    net, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    before = key(net())
    monkeypatch.setenv(variable, value)
    assert key(net()) != before


def test_numbers_that_nothing_can_repeat_are_left_out_and_the_structure_counts(net) -> None:
    assert key(net("of_chance")) == key(net("of_chance"))
    assert key(net("of_chance", width=5)) != key(net("of_chance"))


def test_random_numbers_of_others_go_on_as_if_nothing_had_been_built(net) -> None:
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    expected = random.Random(5).random(), np.random.RandomState(5).rand(), torch.rand(1, generator=torch.manual_seed(5))
    torch.manual_seed(5)
    key(net("drawing"))
    assert (random.random(), np.random.rand(), torch.rand(1)) == expected


def test_lazy_layers_and_networks_that_do_not_run_have_keys_too(net) -> None:
    assert key(net("lazy")) == key(net("lazy"))
    assert key(net("lazy", width=5)) != key(net("lazy"))
    assert key(net("failing")) == key(net("failing"))


def test_a_librarys_network_is_known_by_its_version_and_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    source = resolve_model("resnet18")
    monkeypatch.setattr(ModelSource, "build", lambda *arguments: pytest.fail("it was built"))
    assert architecture_of(source, 10, SHAPE) == (source.fingerprint, "resnet18")


def test_threads_and_their_sums_change_no_key() -> None:
    def build() -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Conv2d(1, 64, 3), torch.nn.Conv2d(64, 64, 3), torch.nn.Flatten(), torch.nn.LazyLinear(4)
        )

    found, before = set(), torch.get_num_threads()
    try:
        for threads in range(1, len(os.sched_getaffinity(0)) + 1):
            torch.set_num_threads(threads)
            found.add(built_digest(build, (1, 16, 16)))
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1


def test_a_run_of_a_changed_file_of_settings_makes_the_network_anew(net, tmp_path: Path) -> None:
    torch.manual_seed(0)
    weights = Checkpoint(resolve_model(net().reference).build(4).state_dict(), "c" * 64)

    def baseline(source: ModelSource) -> Step:
        return Session(Store(tmp_path / "store"), source, noise_context()).baseline(checkpoint=weights)

    first = baseline(net())
    assert not first.cached
    assert baseline(net()).cached
    images = torch.ones(1, *SHAPE.shape)
    before = first.artifact.module()(images)
    scaled = baseline(net(scale=100.0))
    assert not scaled.cached
    assert not torch.allclose(scaled.artifact.module()(images), before)
