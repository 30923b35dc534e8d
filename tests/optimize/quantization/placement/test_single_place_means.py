"""Means: over maps of one place torch's int8 kernel fails, and of powers they have no range of theirs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from optimize.passes.ptq import PTQ, Ptq
from optimize.quantization.placement.single_place_means import flatten_places
from optimize.tracing.trace import note_shapes, trace
from serve.runtime.card.card import Preprocessing
from serve.runtime.device.cpu_integers import TENSORRT
from tests.optimize.workbench import is_meant, noise_context, parent_of


class Mean(nn.Module):
    """As MNASNet and ShuffleNet end: a mean over the map, of a side of 32 / ``stride`` places."""

    def __init__(self, stride: int, axes: tuple[int, int] = (2, 3), keepdim: bool = False) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, stride, stride), nn.Linear(8, 4)
        self.axes, self.keepdim = axes, keepdim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.stem(x).relu().mean(self.axes, keepdim=self.keepdim).flatten(1))


class Rows(nn.Module):
    """A mean over channels and rows of a map of one place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.stem(x).mean((1, 2))


@pytest.mark.parametrize("axes", [(2, 3), (-1, -2)])
def test_a_mean_over_one_place_is_flattened(axes: tuple[int, int]) -> None:
    torch.manual_seed(0)
    module = Mean(32, axes).eval()
    written, images = trace(module), torch.randn(3, 3, 32, 32)
    note_shapes(written, images[:2])
    assert flatten_places(written) == 1
    with torch.no_grad():
        torch.testing.assert_close(written(images), module(images))


@pytest.mark.parametrize("other", [Mean(16), Mean(32, keepdim=True), Rows(), nn.Conv2d(3, 4, 32)])
def test_other_means_are_left(other: nn.Module) -> None:
    module = trace(other.eval())
    before = str(module.graph)
    note_shapes(module, torch.randn(2, 3, 32, 32))
    assert flatten_places(module) == 0
    assert str(module.graph) == before


def test_a_network_that_ends_in_a_mean_over_one_place_becomes_int8(tmp_path: Path) -> None:
    context = dataclasses.replace(noise_context(), preprocessing=Preprocessing(32, (32, 32)))
    torch.manual_seed(0)
    product = PTQ.apply(parent_of(Mean(32).eval(), context, tmp_path), Ptq(images=32), context, tmp_path)
    assert any(note.startswith("2 quantized layers") for note in product.notes)


class PooledByPower(nn.Module):
    """A generalised mean, as retrieval networks pool."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.second(torch.relu(self.first(x))))
        return self.head(x.clamp(min=1e-6).pow(3).mean((2, 3)).pow(1 / 3))


def test_a_mean_of_powers_is_not_rounded_to_the_powers_steps(tmp_path: Path) -> None:
    torch.manual_seed(0)
    is_meant(PooledByPower(), tmp_path, TENSORRT, above=30)
