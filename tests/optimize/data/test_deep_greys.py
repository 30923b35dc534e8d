"""Greys of more than 8 bits: one white for a data set, stated, on the card, and used in measuring and serving alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from optimize.data.from_python import image_data
from optimize.data.loading import loader
from optimize.listener import Silent
from optimize.models.preprocessing_config import PreprocessingConfig, Wish
from optimize.run.job import Job
from optimize.run.opened_job import open_job
from serve.runtime.card.budget import Budget
from serve.runtime.card.card import Preprocessing, read_card
from serve.runtime.card.json_documents import SEAL, sealed
from serve.runtime.images.headers import read_header
from serve.runtime.images.placement import PlacedImage
from serve.runtime.service.image_loading import load_item
from tests.optimize.workbench import CPU, TINY_NET
from tests.serve.artifacts import torchscript

RAMPS = [np.linspace(0, 4095, 64).astype(np.uint16).reshape(8, 8) // (1 + number) for number in range(4)]


class Heard(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def said(self, message: str) -> None:
        self.lines.append(message)


@pytest.fixture(params=["PNG", "TIFF", "int32", "float32"])
def folder(request, tmp_path):
    """Two classes of pictures with 12 bits, in a container of more."""
    for label in ("dim", "lit"):
        (tmp_path / "set" / label).mkdir(parents=True)
        for number, values in enumerate(RAMPS):
            held = values.astype(request.param) if request.param[0] in "if" else values
            kind = "PNG" if request.param == "PNG" else "TIFF"
            Image.fromarray(held).save(tmp_path / "set" / label / f"{number}.{kind.lower()}")
    return tmp_path / "set"


def opened(folder: Path, **options: Any) -> tuple[Any, str]:
    heard = Heard()
    wish = Wish(PreprocessingConfig(mean=0.5, std=0.5, resize=8, crop=8, **options))
    job = Job(model=f"{TINY_NET}:tiny", data=f"imagefolder:{folder}", store=folder.parent / "store", preprocessing=wish)
    return open_job(job, heard).session.context, "\n".join(heard.lines)


def test_the_white_that_is_stated_reaches_training_measuring_and_serving(folder):
    context, said = opened(folder, pixel_max=4095)
    assert "white 4095 (--pixel-max)" in said
    assert "too dark" not in said
    expected = {tuple(np.rint(values.ravel() / 4095 * 255)) for values in RAMPS}
    for split in (context.data.train, context.data.val):
        batch, _ = next(iter(loader(split, context.preprocessing, batch_size=8, device=CPU)))
        assert {tuple(image.flatten().tolist()) for image in batch} <= expected
        file = split.sources[0]
        assert isinstance(file, Path)
        served = load_item(file.read_bytes(), context.preprocessing, Budget(), read_header(file.read_bytes(), Budget()))
        assert isinstance(served.image, PlacedImage)
        assert torch.equal(served.image.pixels, batch[0])


@pytest.mark.parametrize("folder", ["PNG", "TIFF"], indirect=True)
def test_pictures_that_use_little_of_their_range_are_named_when_nothing_is_stated(folder):
    _, said = opened(folder)
    assert "read with 65535 as white, and 6 images that were checked reach" in said
    assert "--pixel-max 4095" in said


def test_a_white_for_a_data_set_of_8_bits_is_said_to_be_idle(tmp_path):
    for label in "ab":
        (tmp_path / "set" / label).mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / "set" / label / f"{number}.png")
    _, said = opened(tmp_path / "set", pixel_max=4095)
    assert (
        "pixel_max 4095 applies to greys of more than 8 bits, but none of the 2 images that were checked has them"
        in said
    )


@pytest.mark.parametrize("dtype", ["uint16", "int32", "float32"])
def test_pictures_of_a_program_are_scaled_as_files_are(dtype):
    pictures = [Image.fromarray(values.astype(dtype)) for values in RAMPS]
    data = image_data([(picture, label % 2) for label, picture in enumerate(pictures)] * 3)
    done = Preprocessing(8, (8, 8), (0.5,), (0.5,), pixel_max=4095)
    batch, _ = next(iter(loader(data.train, done, batch_size=1, device=CPU)))
    assert np.array_equal(batch[0, 0].numpy(), np.rint(RAMPS[0] / 4095 * 255).astype(np.uint8))
    prepared = image_data([(picture, label % 2) for label, picture in enumerate(pictures)] * 3, preprocessing=done)
    assert np.array_equal(np.asarray(prepared.train.sources[0])[0], batch[0, 0].numpy())


def test_a_card_of_before_which_says_nothing_of_white_opens(tmp_path):
    folder = torchscript(tmp_path / "artifact")
    body = json.loads((folder / "card.json").read_text())
    del body["preprocessing"]["pixel_max"], body[SEAL]
    (folder / "card.json").write_text(json.dumps(sealed(body)))
    assert read_card(folder).preprocessing.pixel_max is None
