"""Networks for segmentation by name: torchvision's and our own, with their auxiliary heads, sizes and tasks."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import optimize as opt
from optimize.data.records import ImageData, Split
from optimize.data.targets import ClassMaps
from optimize.listener import SILENT
from optimize.models.checkpoint import Checkpoint
from optimize.models.model_names import resolve_model, with_named_weights
from optimize.models.networks.unet import unet_source
from optimize.models.weight_matching import load_into
from optimize.run.job import Job
from optimize.run.opened_job import open_job
from serve.runtime.errors import UserError

_INSTALLED = importlib.util.find_spec("segmentation_models_pytorch") is not None
needs_smp = pytest.mark.skipif(not _INSTALLED, reason="segmentation_models_pytorch is not installed")

IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("name", "auxiliary"), [("lraspp_mobilenet_v3_large", ()), ("deeplabv3_mobilenet_v3_large", (0.5,))]
)
def test_torchvisions_networks_give_logits_of_the_input_size_and_their_head_in_training_only(
    name: str, auxiliary: tuple[float, ...]
) -> None:
    source = resolve_model(name)
    assert (source.auxiliary, source.task) == (auxiliary, "segmentation")
    assert source.preprocessing is not None
    assert source.preprocessing.resize == source.preprocessing.crop == (520, 520)  # no pixel is cut off
    module = source.build(5, 64, training=True)
    outputs = module.train()(IMAGES)
    shapes = [output.shape for output in (outputs if isinstance(outputs, tuple) else (outputs,))]
    assert shapes == [(2, 5, 64, 64)] * (1 + len(auxiliary))
    with torch.no_grad():
        assert module.eval()(IMAGES).shape == (2, 5, 64, 64)
    plain = source.build(5, 64)
    assert not any(key.startswith("aux") for key in plain.state_dict())
    load_into(plain, Checkpoint(module.state_dict(), "0" * 64), Path("published.pth"))
    with torch.no_grad():
        assert torch.equal(plain.eval()(IMAGES), module(IMAGES))


def test_unet_small_is_found_without_a_download_for_sides_that_are_multiples_of_eight() -> None:
    source = resolve_model("unet_small")
    module = source.build(11, 96).eval()
    assert 80_000 < sum(parameter.numel() for parameter in module.parameters()) < 150_000
    with torch.no_grad():
        assert module(torch.zeros(1, 3, 72, 40)).shape == (1, 11, 72, 40)
    with pytest.raises(UserError, match=r"100x100 pixels.*multiple of 8.*nearest is 96 or 104"):
        source.check_size(100)
    kinds = {type(layer) for layer in module.modules() if not list(layer.children())}
    assert kinds == {nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.Upsample}
    with pytest.raises(UserError, match="named weights exist only for models of torchvision"):
        with_named_weights(source, "DEFAULT")


@pytest.mark.parametrize(
    ("wrong", "right"), [("unet-smal", "unet_small"), ("lraspp_mobilnet_v3_large", "lraspp_mobilenet_v3_large")]
)
def test_a_wrong_name_is_told_the_nearest_network_of_any_task(wrong: str, right: str) -> None:
    with pytest.raises(UserError, match=f"no torchvision network.*did you mean.*{right}"):
        resolve_model(wrong)


@pytest.mark.parametrize("name", ["resnet18", "unet_small"])
def test_a_network_and_data_of_two_tasks_are_refused_in_one_line(name: str, tmp_path: Path) -> None:
    mask = np.zeros((16, 16), np.uint8)
    split = Split([mask] * 4, ClassMaps([mask] * 4, 2))
    maps = ImageData("maps", "segmentation", ("a", "b"), split, split, "none", (16, 16))
    with pytest.raises(UserError) as error:
        open_job(Job(model=name, data="digits" if name == "unet_small" else maps, store=tmp_path), SILENT)
    own, data, other = {
        "unet_small": ("segmentation", "digits", "classification"),
        "resnet18": ("classification", "maps", "segmentation"),
    }[name]
    assert str(error.value) == (
        f"{name} is a network for {own}, and {data} is for {other}: choose a network or data of one task"
    )


def test_without_segmentation_models_pytorch_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"^smp:unet: segmentation_models_pytorch is not installed; .*\[smp\]'$"):
        resolve_model("smp:unet")


@needs_smp
@pytest.mark.parametrize(
    ("name", "full"), [("unet-mobilenet_v2", "unet-mobilenet_v2"), ("fpn", "fpn-resnet34"), ("unet-tu-resnet10t",) * 2]
)
def test_networks_of_segmentation_models_pytorch_have_an_architecture_and_an_encoder(name: str, full: str) -> None:
    source = resolve_model(f"smp:{name}")
    assert (source.name, source.origin, source.task) == (full, "smp", "segmentation")
    with torch.no_grad():
        assert source.build(5, 64).eval()(IMAGES).shape == (2, 5, 64, 64)


@needs_smp
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("unett-resnet18", r"no architecture 'unett' \(did you mean unet"),
        ("unet-resnet19", r"no encoder 'resnet19' \(did you mean resnet1"),
        ("unet-zzz", r"no encoder 'zzz'; there are .*tu-NAME"),
    ],
)
def test_a_wrong_architecture_or_encoder_is_told_the_nearest(name: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        resolve_model(f"smp:{name}")


def test_a_network_s_own_settings_of_training_hold_where_the_user_gives_none(tmp_path: Path) -> None:
    """Of the baseline that is made, as its card says."""
    own = unet_source().training
    assert own["optimizer"] == "adamw"
    training = opt.Training(epochs=1, max_steps=1, learning_rate=0.003)
    base = opt.load("unet_small", store=tmp_path, training=training)
    assert base.session.context.data.name == "scenes"
    settings = base.artifact.card.lineage[0].config
    assert {name: settings[name] for name in own} == {**own, "epochs": 1, "learning_rate": 0.003}
