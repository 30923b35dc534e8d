"""The images that a report shows are chosen by a rule, and their pictures are kept beside the report."""

from __future__ import annotations

import base64
import dataclasses
import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from optimize.context import Context
from optimize.data.records import ImageData, Split
from optimize.data.sources import png
from optimize.data.targets import ClassMaps
from optimize.measure.stored_examples import Examples, stored_examples
from optimize.run.examples import CHOSEN, Answered, keep_examples
from optimize.store.objects import Store
from optimize.tasks.segmentation import SEGMENTATION
from serve.runtime.card.card import Preprocessing
from tests.optimize.workbench import CPU

SIDE, IMAGES = 8, 40
PREPROCESSING = Preprocessing(
    resize=(SIDE, SIDE), crop=(SIDE, SIDE), mean=(0.5,) * 3, std=(0.5,) * 3, interpolation="bilinear"
)
CLASSES = ("ground", "<b>cat</b>", "dog")


@pytest.fixture(scope="module")
def context() -> Context:
    rng = np.random.default_rng(0)
    masks = rng.integers(0, 3, (IMAGES, SIDE, SIDE), np.uint8)
    split = Split([png(np.repeat(80 * mask[..., None], 3, 2)) for mask in masks], ClassMaps(list(masks), 3))
    data = ImageData("squares", "segmentation", CLASSES, split, split, "none", (SIDE, SIDE))
    return Context(data, PREPROCESSING, CPU)


def targets(context: Context) -> torch.Tensor:
    return torch.stack([context.data.val.targets.whole(row) for row in range(IMAGES)])  # type: ignore[attr-defined]


def wrong_in(maps: torch.Tensor, counts: list[int]) -> dict[str, torch.Tensor]:
    """Evidence of answers with so many wrong pixels in each image."""
    best = maps.clone().flatten(1)
    for image, count in zip(best, counts, strict=True):
        image[:count] = (image[:count] + 1) % 3
    return SEGMENTATION.evidence((best.view_as(maps),), maps, 3)


def made(context: Context, before: list[int], now: list[int], store: Store) -> Examples:
    maps = targets(context)
    first, other = (Answered(name, wrong_in(maps, counts), name) for name, counts in (("float", before), ("int8", now)))
    found = stored_examples(keep_examples(first, other, context, range(IMAGES), store), store)
    assert found is not None
    return found


def shown(examples: Examples, group: int) -> list[int]:
    """The images of a group, from 1."""
    return [int(example.caption.split()[1]) for example in examples.groups[group].examples]


def test_the_images_are_spread_from_hard_to_easy_and_then_those_that_lose_most(
    context: Context, tmp_path: Path
) -> None:
    before = [IMAGES - row for row in range(IMAGES)]  # the first image is the hardest
    now = list(before)
    losses = {4: 9, 11: 8, 17: 7, 20: 7, 30: 5, 31: 4, 33: 3}
    for row, loss in losses.items():
        now[row] += loss
    now[7] -= 5
    found = made(context, before, now, Store(tmp_path))
    # Parts of 40 / 6 images; the middles are 3.3, 10, 16.7, 23.3, 30 and 36.7.
    assert shown(found, 0) == [4, 11, 17, 24, 31, 37]
    assert shown(found, 1) == [row + 1 for row in list(losses)[:CHOSEN]]
    assert found.groups[1].rule == (
        "int8 has fewer pixels right than float on 7 of 40 images. These are the 6 largest losses."
    )
    assert found.groups[1].examples[0].caption == "Image 5 of 40: 43.75 % of its pixels right, now 29.69 % (−14.06)"
    assert {label for label, _ in found.legend} == set(CLASSES)


def test_no_image_is_said_to_lose_that_does_not(context: Context, tmp_path: Path) -> None:
    found = made(context, [3] * IMAGES, [2] * IMAGES, Store(tmp_path))
    assert shown(found, 1) == []
    assert found.groups[1].rule == "int8 has fewer pixels right than float on 0 of 40 images."
    assert len(shown(found, 0)) == CHOSEN


def test_a_picture_shows_the_answer_to_its_own_image_though_others_cannot_be_read(
    context: Context, tmp_path: Path
) -> None:
    maps = targets(context)
    kept = [row for row in range(IMAGES) if row not in (0, 5)]
    before, now = (wrong_in(maps[kept], [count] * len(kept)) for count in (0, 1))
    first, other = (Answered(name, each, name) for name, each in (("float", before), ("int8", now)))
    store = Store(tmp_path)
    found = stored_examples(keep_examples(first, other, context, kept, store), store)
    assert found is not None
    for group in range(2):
        for row, example in zip(shown(found, group), found.groups[group].examples, strict=True):
            pictures = [panel.source.partition("base64,")[2] for panel in example.panels]
            target, reference = (
                np.asarray(Image.open(io.BytesIO(base64.b64decode(source)))) for source in pictures[1:3]
            )
            assert np.array_equal(target, maps[row - 1])
            assert np.array_equal(reference, maps[row - 1])


def test_pictures_are_drawn_once_and_anew_if_a_class_has_another_name(context: Context, tmp_path: Path) -> None:
    store, maps = Store(tmp_path), targets(context)
    pairs = [Answered(name, wrong_in(maps, [1] * IMAGES), name) for name in ("float", "int8")]
    key = keep_examples(pairs[0], pairs[1], context, range(IMAGES), store)
    assert keep_examples(pairs[0], pairs[1], context, range(IMAGES), store) == key
    data = dataclasses.replace(context.data, classes=("ground", "cat", "dog"))
    assert keep_examples(pairs[0], pairs[1], dataclasses.replace(context, data=data), range(IMAGES), store) != key
    assert stored_examples("0" * 64, store) is None
    assert stored_examples(None, store) is None


def test_stored_pictures_are_read_without_torch() -> None:
    code = (
        "import sys; import optimize.measure.stored_examples, optimize.report.class_table; "
        "from optimize.tasks.base import find_task; find_task('segmentation').drawn; "
        "print({'torch', 'matplotlib'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
