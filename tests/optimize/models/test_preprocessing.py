"""Which preprocessing reaches the network, who is said to have decided it, and what cannot be."""

from __future__ import annotations

import hashlib
import json
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import optimize as opt
from optimize import cli
from optimize.data.records import ImageData, Split
from optimize.data.targets import Labels
from optimize.models import torchvision as torchvision_file
from optimize.models.checkpoint import Checkpoint
from optimize.models.model_names import resolve_model, with_checkpoint, with_named_weights
from optimize.models.preprocessing import choose_preprocessing
from optimize.models.preprocessing_config import PreprocessingConfig, Wish, parse_preprocessing
from optimize.run.job import Job
from optimize.run.opened_job import open_job
from optimize.run.recipe import load_recipe
from serve.runtime.card.card import Preprocessing
from serve.runtime.errors import UserError
from tests.optimize.runs_fixtures import TINY, Heard, run_recipe, with_stages

NONE = Split((), Labels(torch.zeros(0, dtype=torch.int64)))
PHOTOS = ImageData("photos", "classification", ("a", "b"), NONE, NONE, "none", None)
THUMBNAILS = ImageData("cifar10", "classification", ("a", "b"), NONE, NONE, "none", (32, 32))
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@pytest.fixture
def cached_weights(monkeypatch, tmp_path):
    """torchvision's files lie in the cache, as far as their names tell; none is read."""
    monkeypatch.setattr(torchvision_file, "download", lambda source, weights: tmp_path / "none.pth")
    monkeypatch.setattr("optimize.models.model_names.read_checkpoint", lambda path: Checkpoint({}, "0" * 64))


# What torchvision's own documentation of each entry says of its inference transforms.
@pytest.mark.parametrize(
    ("name", "weights", "expected"),
    [
        ("resnet50", "IMAGENET1K_V1", (256, 224, "bilinear")),
        ("resnet50", "IMAGENET1K_V2", (232, 224, "bilinear")),
        ("efficientnet_b1", "IMAGENET1K_V1", (256, 240, "bicubic")),
        ("efficientnet_b1", "IMAGENET1K_V2", (255, 240, "bilinear")),
        ("vit_b_16", "IMAGENET1K_SWAG_E2E_V1", (384, 384, "bicubic")),
        ("vit_b_16", "IMAGENET1K_SWAG_LINEAR_V1", (224, 224, "bicubic")),
        ("regnet_y_16gf", "IMAGENET1K_SWAG_E2E_V1", (384, 384, "bicubic")),
    ],
)
def test_named_weights_get_their_own_transforms(cached_weights, name, weights, expected):
    source, _ = with_named_weights(resolve_model(name), weights)
    chosen = choose_preprocessing(source, PHOTOS)
    resize, crop, interpolation = expected
    assert chosen.preprocessing == Preprocessing(resize, (crop, crop), *IMAGENET, interpolation)
    assert set(chosen.origins.values()) == {f"torchvision's weights {weights}"}


def test_a_vits_weights_fix_the_size_that_it_is_built_for(cached_weights):
    source, _ = with_named_weights(resolve_model("vit_b_16"), "IMAGENET1K_SWAG_E2E_V1")
    assert choose_preprocessing(source, THUMBNAILS).preprocessing.crop == (384, 384)
    assert source.build(2, 384).image_size == 384
    with pytest.raises(UserError, match=r"SWAG_E2E_V1 cannot take images of 224x224.*384x384"):
        choose_preprocessing(source, PHOTOS, 224)
    assert choose_preprocessing(resolve_model("vit_b_16"), PHOTOS, 96).preprocessing.crop == (96, 96)


def test_a_checkpoint_that_is_torchvisions_own_file_is_known_by_its_hash():
    file = "resnet50-0676ba61.pth"  # IMAGENET1K_V1
    source = with_checkpoint(resolve_model("resnet50"), Checkpoint({}, file[9:17] + "0" * 56))
    chosen = choose_preprocessing(source, PHOTOS)
    assert chosen.preprocessing.resize == 256
    assert (
        chosen.origins["resize"] == "torchvision's weights IMAGENET1K_V1, recognized by the SHA-256 of the checkpoint"
    )
    other = with_checkpoint(resolve_model("resnet50"), Checkpoint({}, hashlib.sha256(b"other").hexdigest()))
    assert choose_preprocessing(other, PHOTOS).preprocessing.resize == 232
    assert choose_preprocessing(other, PHOTOS).origins["mean"] == ("torchvision's default weights, IMAGENET1K_V2")


def test_what_is_asked_for_goes_before_what_is_declared_and_is_named_part_by_part():
    recipe = Wish(PreprocessingConfig(mean=(0.1, 0.2, 0.3), resize=300), "preprocessing.{} in my.yaml")
    words = Wish(PreprocessingConfig(resize=288, crop=(256, 240), interpolation="nearest"))
    chosen = choose_preprocessing(resolve_model("resnet50"), PHOTOS, None, [recipe, words])
    assert chosen.preprocessing == Preprocessing(288, (256, 240), (0.1, 0.2, 0.3), IMAGENET[1], "nearest")
    assert chosen.origins == {
        "resize": "--resize",
        "crop": "--crop",
        "mean": "preprocessing.mean in my.yaml",
        "std": "torchvision's default weights, IMAGENET1K_V2",
        "interpolation": "--interpolation",
    }


def test_the_line_names_every_part_once_those_of_one_origin_together():
    chosen = choose_preprocessing(
        resolve_model("resnet18"), THUMBNAILS, None, [Wish(PreprocessingConfig(mean=(0.5, 0.25, 0)))]
    )
    declared = "torchvision's default weights, IMAGENET1K_V1"
    assert str(chosen) == (
        "resize 32, crop 32x32 (the data's images are 32x32); "
        f"bilinear ({declared}); mean 0.5,0.25,0 (--mean); std 0.229,0.224,0.225 ({declared})"
    )


def test_a_size_is_explained_by_the_data_the_wish_or_the_network():
    def origin(*arguments: object) -> str:
        return choose_preprocessing(*arguments).origins["crop"]  # type: ignore[arg-type]

    digits = ImageData("digits", "classification", ("a", "b"), NONE, NONE, "none", (8, 8), preferred_side=64)
    assert origin(resolve_model("resnet18"), digits) == "digits scaled to 64x64"
    assert origin(resolve_model("resnet18"), THUMBNAILS) == "the data's images are 32x32"
    assert origin(resolve_model("alexnet"), THUMBNAILS) == "the data's images are 32x32, the network needs 63x63"
    assert origin(resolve_model("resnet18"), PHOTOS, 96) == "your image size of 96"


@pytest.mark.parametrize(
    ("declared", "origins"),
    [
        ("", ["the usual, because your model declares none"] * 2),
        ('PREPROCESSING = {"resize": 40, "crop": 32}', ["your PREPROCESSING in net.py"] * 2),
    ],
)
def test_a_users_model_that_declares_no_mean_is_told_that_it_gets_imagenets(tmp_path, declared, origins):
    (tmp_path / "net.py").write_text(f"from torch import nn\n{declared}\nnet = nn.Identity\n")
    chosen = choose_preprocessing(resolve_model(f"{tmp_path}/net.py:net"), PHOTOS)
    assert [chosen.origins[part] for part in ("resize", "crop")] == origins
    assert (chosen.preprocessing.mean, chosen.preprocessing.std) == IMAGENET
    for part in ("mean", "std"):
        assert chosen.origins[part] == "ImageNet's mean and std, because your model declares none"


@pytest.mark.parametrize(
    ("given_parts", "image_size", "message"),
    [
        ({"crop": 300}, None, r"crop 300x300 \(--crop\) is larger than resize 232 \(torchvision's.*black border"),
        ({"resize": 100}, None, r"crop 224x224 \(torchvision.*\) is larger than resize 100 \(--resize\)"),
        ({"crop": 64}, 96, "--crop 64x64 and an image size of 96 are both given"),
        ({}, 64_000, "resize must be a whole number from 1 to 65536"),
        ({"mean": 0.5}, None, r"mean has 1 numbers \(--mean\) and std 3 \(torchvision"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused_with_their_origins(given_parts, image_size, message):
    with pytest.raises(UserError, match=message) as caught:
        choose_preprocessing(resolve_model("resnet50"), PHOTOS, image_size, [Wish(PreprocessingConfig(**given_parts))])
    assert "\n" not in str(caught.value)


def test_a_crop_that_the_network_cannot_take_is_refused():
    with pytest.raises(UserError, match=r"vit_b_16 cannot take images of 100x100"):
        choose_preprocessing(resolve_model("vit_b_16"), PHOTOS, None, [Wish(PreprocessingConfig(crop=100))])


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"resize": "64.5"}, r"^--resize: must be a whole number of pixels.*'64.5'"),
        ({"resize": 0}, r"^--resize: must be a whole number"),
        ({"crop": "64x"}, r"^--crop: must be whole pixels.*'64x'"),
        ({"crop": "64x64x3"}, r"^--crop: must be whole pixels"),
        ({"mean": "0.5,0.5,0.5,0.5,0.5"}, r"^--mean: must be one number per channel"),
        ({"mean": "0.5;0.5;0.5"}, r"^--mean: must be one number per channel"),
        ({"mean": "nan"}, r"^--mean: must be one number per channel"),
        (
            {"mean": "123.675,116.28,103.53"},
            r"^--mean: must be for pixels from 0 to 1; .* by 255 \(.*0\.485,0\.456,0\.406\), std too",
        ),
        ({"std": "0,0,0"}, r"^--std: must be positive"),
        ({"pixel_max": "0"}, r"^--pixel-max: must be one positive number, such as 4095"),
        ({"pixel_max": "4095,4095"}, r"^--pixel-max: must be one positive number"),
        ({"interpolation": "lanczos"}, r"^--interpolation: .*'nearest', 'bilinear' or 'bicubic'.*lanczos"),
        ({"crop": 96, "resize": 64}, r"^preprocessing: crop 96x96 is larger than resize 64"),
        ({"mean": 0.5, "std": "1,1,1"}, r"^preprocessing: mean has 1 numbers and std 3"),
        (
            {"resize": "stretch"},
            r"^--resize: must be a whole number of pixels, such as 256 .*, or letterbox.*'stretch'",
        ),
        ({"resize": "a", "crop": "b"}, r"^--resize: .*; --crop: "),
    ],
)
def test_an_illegal_part_is_named_as_it_was_written(parts, message):
    with pytest.raises(UserError, match=message):
        parse_preprocessing(parts, "--{}")


WORDS = st.one_of(
    st.none(), st.integers(), st.floats(), st.booleans(), st.text(max_size=9), st.lists(st.floats(), max_size=4)
)


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(PreprocessingConfig.model_fields, WORDS)))
def test_whatever_is_written_is_a_usable_config_or_one_line(parts):
    refusal, config = "", PreprocessingConfig()
    try:
        config = parse_preprocessing(parts, "--{}")
    except UserError as error:
        refusal = str(error)
    assert "\n" not in refusal
    given_parts = config.given()
    channels = max((len(given_parts[part]) for part in ("mean", "std") if part in given_parts), default=3)
    rest = {"resize": 1 << 16, "crop": (1, 1), "mean": (0.5,) * channels, "std": (0.5,) * channels}
    Preprocessing(**{**rest, **given_parts})


def test_a_recipe_sets_the_preprocessing_and_names_its_line(tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text("preprocessing: {resize: 40, crop: [32, 24], mean: 0.5, std: 0.25}\nstages: [{pass: fuse}]\n")
    assert load_recipe(path).preprocessing == PreprocessingConfig(resize=40, crop=(32, 24), mean=0.5, std=0.25)
    path.write_text("stages: [{pass: fuse}]\npreprocessing:\n  resize: 40\n  crop: -1\n")
    with pytest.raises(UserError, match=r"my.yaml:4: preprocessing.crop: must be whole pixels.*-1"):
        load_recipe(path)


def test_the_first_line_of_a_run_says_which_preprocessing_and_by_whose_word(tmp_path):
    heard = Heard()
    job = Job(model=TINY, store=tmp_path / "store", preprocessing=Wish(PreprocessingConfig(mean=(0.5, 0.4, 0.3))))
    opened = open_job(job, heard)
    declared = "your PREPROCESSING in tiny_cnn.py"
    assert heard.lines[0].endswith(
        f"preprocessing: resize 32, crop 32x32 ({declared}); "
        f"bilinear (the default, because your model declares none); mean 0.5,0.4,0.3 (--mean); "
        f"std 0.25,0.25,0.25 ({declared})"
    )
    assert opened.session.context.preprocessing.mean == (0.5, 0.4, 0.3)
    assert opened.preprocessing_origins["mean"] == "--mean"


def test_the_report_holds_the_origins_and_a_recipes_preprocessing_is_used(tmp_path):
    recipe = with_stages({"pass": "fuse"}, preprocessing={"crop": 28, "interpolation": "nearest"})
    outcome, _ = run_recipe(tmp_path / "store", recipe)
    data = json.loads((outcome.folder / "report.json").read_text())["data"]
    assert data["preprocessing"]["crop"] == [28, 28]
    assert data["preprocessing_origin"]["crop"] == "preprocessing.crop in recipe.yaml"
    decided = {part for part, value in data["preprocessing"].items() if value is not None}
    assert data["preprocessing_origin"].keys() == decided == {"resize", "crop", "mean", "std", "interpolation"}
    card = json.loads((outcome.folder / "artifacts" / "fuse" / "card.json").read_text())
    assert card["preprocessing"]["crop"] == [28, 28]
    assert card["preprocessing"]["interpolation"] == "nearest"


def test_the_api_sets_the_preprocessing(tmp_path):
    base = opt.load(
        TINY,
        store=tmp_path / "store",
        device="cpu",
        training=opt.Training(epochs=1),
        preprocessing=opt.PreprocessingConfig(std="0.5,0.5,0.25"),
    )
    assert base.artifact.card.preprocessing.std == (0.5, 0.5, 0.25)


def test_the_command_line_refuses_a_part_in_one_line(tmp_path):
    result = CliRunner().invoke(cli.app, ["run", TINY, "--crop", "9x9x9", "--store", str(tmp_path / "store")])
    assert result.exit_code == 2
    assert re.fullmatch(r"error: --crop: must be whole pixels[^\n]*\n", result.stderr)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("resize", ["24x18", [24, 18], "24, 18"])
def test_a_height_and_a_width_to_scale_to_are_the_input_without_a_crop(resize):
    wish = Wish(parse_preprocessing({"resize": resize}, "--{}"))
    chosen = choose_preprocessing(resolve_model("resnet18"), PHOTOS, wishes=[wish])
    assert (chosen.preprocessing.resize, chosen.preprocessing.crop) == ((24, 18), (24, 18))
    assert str(chosen).startswith("resize 24x18, crop 24x18 (--resize)")
    cropped = Wish(parse_preprocessing({"resize": resize, "crop": "20x18"}, "--{}"))
    assert choose_preprocessing(resolve_model("resnet18"), PHOTOS, wishes=[cropped]).preprocessing.crop == (20, 18)


def test_a_letterbox_takes_its_size_from_the_crop_whoever_gives_it(tmp_path):
    wish = Wish(parse_preprocessing({"resize": "letterbox"}, "--{}"))
    chosen = choose_preprocessing(resolve_model("resnet18"), PHOTOS, wishes=[wish])
    assert (chosen.preprocessing.resize, chosen.preprocessing.crop) == ("letterbox", (224, 224))
    assert str(chosen).startswith("resize letterbox (--resize); crop 224x224, bilinear, ")
    assert choose_preprocessing(resolve_model("resnet18"), PHOTOS, 320, [wish]).preprocessing.crop == (320, 320)
    sized = Wish(parse_preprocessing({"resize": "letterbox", "crop": "96x64"}, "--{}"))
    assert choose_preprocessing(resolve_model("resnet18"), PHOTOS, wishes=[sized]).preprocessing.crop == (96, 64)
    (tmp_path / "net.py").write_text(
        "import torch\nPREPROCESSING = {'resize': 'letterbox', 'crop': 64}\n\n"
        "def net():\n    return torch.nn.Flatten()\n"
    )
    declared = resolve_model(f"{tmp_path / 'net.py'}:net")
    assert choose_preprocessing(declared, PHOTOS).preprocessing.resize == "letterbox"
    larger = choose_preprocessing(declared, PHOTOS, 96).preprocessing
    assert (larger.resize, larger.crop) == ("letterbox", (96, 96))


def test_a_crop_that_is_larger_than_what_is_scaled_to_is_refused_for_each_side():
    with pytest.raises(UserError, match=r"crop 20x20 is larger than resize 24x18: .*; resize must be at least 20x20"):
        parse_preprocessing({"resize": "24x18", "crop": 20}, "--{}")
    declared = Wish(parse_preprocessing({"resize": "24x18"}, "--{}"))
    later = Wish(parse_preprocessing({"crop": "20x20"}, "--{}"), "recipe {}")
    with pytest.raises(UserError, match=r"crop 20x20 \(recipe crop\) is larger than resize 24x18 \(--resize\)"):
        choose_preprocessing(resolve_model("resnet18"), PHOTOS, wishes=[declared, later])


def test_an_image_size_keeps_the_proportion_of_what_both_sides_are_scaled_to(tmp_path):
    (tmp_path / "net.py").write_text(
        "import torch\nPREPROCESSING = {'resize': [48, 40], 'crop': [40, 40], 'mean': [0.5] * 4, 'std': [0.2] * 4}\n\n"
        "def net():\n    return torch.nn.Flatten()\n"
    )
    source = resolve_model(f"{tmp_path / 'net.py'}:net")
    chosen = choose_preprocessing(source, PHOTOS, 20).preprocessing
    assert (chosen.resize, chosen.shape) == ((24, 20), (4, 20, 20))
