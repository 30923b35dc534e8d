"""timm's models: their preprocessing, their sizes, their checkpoints from a file, and what is told without them."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from optimize.data.records import ImageData, Split
from optimize.data.targets import Labels
from optimize.models.checkpoint import read_checkpoint
from optimize.models.model_names import resolve_model, with_named_weights
from optimize.models.preprocessing import choose_preprocessing
from optimize.models.weight_matching import load_into
from serve.runtime.card.card import Preprocessing
from serve.runtime.errors import UserError
from tests.narrow import layer

needs_timm = pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="timm is not installed")

NONE = Split((), Labels(torch.zeros(0, dtype=torch.int64)))
PHOTOS = ImageData("photos", "classification", ("a", "b"), NONE, NONE, "none", None)
DIGITS = ImageData("digits", "classification", ("a", "b"), NONE, NONE, "none", (8, 8), preferred_side=64)
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALVES = ((0.5,) * 3, (0.5,) * 3)


def test_without_timm_one_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"^timm:resnet18: timm is not installed; python -m pip install .*\[timm\]'$"):
        resolve_model("timm:resnet18")


# As the model cards on the hub state them: input size over crop_pct, rounded down.
@needs_timm
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("resnet50.a1_in1k", Preprocessing(235, (224, 224), *IMAGENET, "bicubic")),  # 224 / 0.95
        ("resnet50.tv_in1k", Preprocessing(256, (224, 224), *IMAGENET, "bilinear")),  # 224 / 0.875
        ("mobilenetv3_small_100", Preprocessing(256, (224, 224), *IMAGENET, "bicubic")),
        ("vit_tiny_patch16_224", Preprocessing(248, (224, 224), *HALVES, "bicubic")),  # 224 / 0.9
    ],
)
def test_the_preprocessing_is_that_of_the_pretrained_configuration(name, expected):
    source = resolve_model(f"timm:{name}")
    chosen = choose_preprocessing(source, PHOTOS)
    assert (source.name, source.origin) == (name, "timm")
    assert chosen.preprocessing == expected
    assert all(origin.startswith(f"timm's pretrained_cfg of {name}") for origin in chosen.origins.values())


@needs_timm
@pytest.mark.parametrize(
    ("name", "wish", "side"),
    [
        ("resnet18", None, 64),
        ("vit_tiny_patch16_224", None, 64),
        ("vit_tiny_patch16_224", 96, 96),
        ("levit_128s", None, 64),
    ],
)
def test_a_network_is_built_for_the_size_and_the_classes(name, wish, side):
    source = resolve_model(f"timm:{name}")
    preprocessing = choose_preprocessing(source, DIGITS, wish).preprocessing
    assert preprocessing.crop == (side, side)
    model = source.build(7, side).eval()
    with torch.no_grad():
        assert model(torch.zeros(2, *preprocessing.shape)).shape == (2, 7)


@needs_timm
def test_a_side_that_is_no_multiple_of_the_patch_and_a_network_of_one_size_are_refused():
    with pytest.raises(UserError, match=r"100x100.*multiple of 16.*96 or 112"):
        choose_preprocessing(resolve_model("timm:vit_tiny_patch16_224"), PHOTOS, 100)
    fixed = resolve_model("timm:crossvit_tiny_240")
    assert choose_preprocessing(fixed, DIGITS).preprocessing.crop == (240, 240)
    with pytest.raises(UserError, match=r"cannot take images of 224x224 pixels: it is made for 240x240"):
        choose_preprocessing(fixed, PHOTOS, 224)


@needs_timm
def test_a_checkpoint_comes_from_a_file_and_named_weights_are_refused_with_the_remedy(tmp_path):
    source = resolve_model("timm:mobilenetv3_small_050")
    saved, other = source.build(5), source.build(5)
    save_file(saved.state_dict(), tmp_path / "model.safetensors")
    load_into(other, read_checkpoint(tmp_path / "model.safetensors"), tmp_path)
    assert torch.equal(layer(other, "classifier", nn.Linear).weight, layer(saved, "classifier", nn.Linear).weight)
    with pytest.raises(
        UserError, match=r"weights of timm are not downloaded \(huggingface.co/timm/mobilenetv3.*--checkpoint"
    ):
        with_named_weights(source, "DEFAULT")


@needs_timm
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet8", "timm has no model 'resnet8' \\(did you mean resnet"),
        ("resnet50.none", "Invalid pretrained tag .* It has a1_in1k"),
        ("hf-hub:timm/resnet50.a1_in1k", "models are not downloaded from the hub"),
        ("", "timm has no model ''"),
        ("vit_base_patch16_sapiens2", "1024x768 pixels; only square"),
    ],
)
def test_a_wrong_name_is_told_in_one_line(name, message):
    with pytest.raises(UserError, match=message) as caught:
        resolve_model(f"timm:{name}")
    assert "\n" not in str(caught.value)


@needs_timm
def test_the_fingerprint_has_timms_version():
    import timm

    assert resolve_model("timm:resnet18").fingerprint == f"timm/{timm.__version__}/resnet18"
