"""The order of classes: what a checkpoint states, or the user; labels move with the names; a wrong order is seen."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from optimize.data.class_order import in_recorded_order, with_order
from optimize.data.formats.base import open_data
from optimize.data.from_python import image_data
from optimize.data.records import ImageData, Split
from optimize.listener import Silent
from optimize.models.checkpoint import read_checkpoint
from optimize.models.preprocessing_config import PreprocessingConfig, Wish
from optimize.models.stated_classes import stated_classes
from optimize.run.job import Job
from optimize.run.opened_job import open_job
from optimize.tasks.classification import misplaced
from serve.runtime.errors import UserError
from tests.optimize.workbench import TINY_NET

NAMES = ("1", "10", "2", "3")  # as folders are sorted


@pytest.fixture
def folder(tmp_path):
    """Numbered classes, each picture as bright as its number."""
    for part in ("train", "val"):
        for label in NAMES:
            for number in range(2):
                path = tmp_path / "set" / part / label / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.new("L", (8, 8), int(label)).save(path)
    return tmp_path / "set"


def meant(split: Split, classes: tuple[str, ...]) -> bool:
    """Whether each picture's class is that which its brightness says."""
    paths = [source for source in split.sources if isinstance(source, Path)]
    found = [Image.open(path).getpixel((0, 0)) for path in paths]
    return [str(value) for value in found] == [classes[label] for label in split.labels.tolist()]


class Heard(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def said(self, message: str) -> None:
        self.lines.append(message)


def opened(folder: Path, **options: Any) -> tuple[ImageData, str]:
    heard = Heard()
    wish = Wish(PreprocessingConfig(mean=0.5, std=0.5, resize=8, crop=8))
    job = Job(
        model=f"{TINY_NET}:tiny",
        data=f"imagefolder:{folder}",
        store=folder.parent / "store",
        preprocessing=wish,
        **options,
    )
    return open_job(job, heard).session.context.data, "\n".join(heard.lines)


ORDER = ("2", "1", "3", "10")
BY_NAME = {name: index for index, name in enumerate(ORDER)}
BY_INDEX = dict(enumerate(ORDER))

STATED: dict[str, Any] = {
    "class_to_idx": {"class_to_idx": BY_NAME},
    "mmengine": {"meta": {"dataset_meta": {"classes": ORDER}}},
    "mmcv": {"meta": {"CLASSES": ORDER}},
    "list": {"classes": list(ORDER)},
    "lightning": {"hyper_parameters": {"class_names": list(ORDER)}},
    "idx_to_class": {"idx_to_class": BY_INDEX},
    "ultralytics": {"names": BY_INDEX},
    "transformers": {
        "config": {"id2label": {str(index): name for index, name in BY_INDEX.items()}, "label2id": BY_NAME}
    },
    "namespace": {"args": argparse.Namespace(classes=list(ORDER), lr=0.1)},
    "unsorted": {"extra": {"class_to_idx": dict(reversed(BY_NAME.items()))}},
}


def saved(path: Path, content: dict[str, Any]) -> Path:
    torch.save({"state_dict": {"weight": torch.zeros(2)}, "epoch": 3, **content}, path)
    return path


@pytest.mark.parametrize("kind", STATED)
def test_the_order_that_a_checkpoint_states_is_that_of_the_outputs(kind, folder, tmp_path):
    data, said = opened(folder, checkpoint=saved(tmp_path / "net.pt", STATED[kind]))
    assert data.classes == ORDER
    assert meant(data.train, ORDER)
    assert meant(data.val, ORDER)
    assert "the order of the classes is that of" in said
    assert "net.pt" in said
    plain = open_data(f"imagefolder:{folder}")
    assert data.train.fingerprint != plain.train.fingerprint
    assert data.val.fingerprint != plain.val.fingerprint


def test_safetensors_state_it_in_their_metadata(folder, tmp_path):
    save_file(
        {"weight": torch.zeros(2)}, tmp_path / "net.safetensors", {"class_to_idx": json.dumps(BY_NAME), "by": "us"}
    )
    assert opened(folder, checkpoint=tmp_path / "net.safetensors")[0].classes == ORDER


def test_a_module_states_it_by_an_attribute(folder, tmp_path):
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    module.class_to_idx = BY_NAME  # type: ignore[assignment]
    job = Job(model=module, data=f"imagefolder:{folder}", store=tmp_path / "store", image_size=8)
    assert open_job(job, Silent()).session.context.data.classes == ORDER


def test_an_order_that_is_the_datas_own_changes_and_says_nothing(folder, tmp_path):
    data, said = opened(folder, checkpoint=saved(tmp_path / "net.pt", {"classes": list(NAMES)}))
    assert data.fingerprint == open_data(f"imagefolder:{folder}").fingerprint
    assert (data.order, data.notes) == (None, ())
    assert "order" not in said


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("data", NAMES),
        ("sorted", NAMES),
        ("natural", ("1", "2", "3", "10")),
        ("checkpoint", ORDER),
        (("3", "2", "1", "10"),) * 2,
    ],
)
def test_an_order_can_be_asked_for(order, expected, folder, tmp_path):
    data, _ = opened(folder, checkpoint=saved(tmp_path / "net.pt", STATED["list"]), class_order=order)
    assert data.classes == expected
    assert meant(data.val, expected)


def test_an_order_comes_from_a_file_and_names_from_another_go_with_it(folder, tmp_path):
    (tmp_path / "order.txt").write_text("3\n2\n1\n10\n")
    (tmp_path / "names.txt").write_text("one\nten\ntwo\nthree\n")
    data, _ = opened(folder, class_order=str(tmp_path / "order.txt"), classes=tmp_path / "names.txt")
    assert data.classes == ("three", "two", "one", "ten")
    assert data.order == ("3", "2", "1", "10")
    assert meant(data.val, data.order)
    stated = saved(tmp_path / "net.pt", {"classes": ["ten", "three", "two", "one"]})
    data, _ = opened(folder, checkpoint=stated, classes=tmp_path / "names.txt")
    assert data.classes == ("ten", "three", "two", "one")
    assert data.order is not None
    assert meant(data.val, data.order)


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (
            {"classes": ["1", "2", "3", "11"]},
            {},
            "'classes' states other classes than set has: 11 that the data does not have, not 10; ren",
        ),
        (
            {"classes": ["a", "b"]},
            {"class_order": "checkpoint"},
            "'classes' has 2 names where there are 4 classes, a, b that",
        ),
        ({}, {"class_order": "checkpoint"}, "it states no classes"),
        (
            {"classes": list(ORDER), "names": list(NAMES)},
            {},
            "states two orders of the classes, in 'classes' and 'names'",
        ),
        (
            {},
            {"class_order": "natrual"},
            "--class-order natrual: there is no such file; give .* data, sorted, natural, checkpoint",
        ),
        ({}, {"class_order": ("1", "2", "3")}, "has other classes than set: 3 names where there are 4 classes, not 10"),
        ({}, {"class_order": ("1", "2", "3", "3")}, "has other classes than set: not 10"),
    ],
)
def test_an_order_of_other_classes_is_refused_in_one_line(content, options, message, folder, tmp_path):
    with pytest.raises(UserError, match=message) as caught:
        opened(folder, checkpoint=saved(tmp_path / "net.pt", content), **options)
    assert "\n" not in str(caught.value)


def test_as_many_other_classes_are_said_and_the_datas_order_is_taken(folder, tmp_path):
    data, said = opened(folder, checkpoint=saved(tmp_path / "net.pt", {"classes": ["a", "b", "c", "d"]}))
    assert data.classes == NAMES
    assert "'classes' states other classes than set has: a, b, c, d that the data does not have" in said


def test_the_order_of_a_checkpoint_needs_a_checkpoint(folder):
    with pytest.raises(UserError, match="--class-order checkpoint needs a checkpoint, and none is given"):
        opened(folder, class_order="checkpoint")


def test_the_card_keeps_the_order_for_who_opens_the_data_again(folder):
    data, _ = opened(folder, class_order="natural")
    recorded = {"class_order": list(data.order or ()), "notes": list(data.notes)}
    again = in_recorded_order(open_data(f"imagefolder:{folder}"), recorded)
    assert (again.classes, again.fingerprint, again.notes) == (data.classes, data.fingerprint, data.notes)


@given(st.permutations(range(6)))
@settings(deadline=None)
def test_labels_move_with_their_names(order):
    labels = torch.arange(12) % 6
    pixels = torch.arange(12, dtype=torch.uint8)[:, None, None].repeat(1, 4, 4)
    names = tuple("abcdef")
    data = image_data((pixels, labels), (pixels, labels), classes=names)
    moved = with_order(data, names, tuple(names[row] for row in order))
    assert [moved.classes[label] for label in moved.val.labels.tolist()] == [names[label] for label in labels.tolist()]
    assert (moved.fingerprint == data.fingerprint) == (list(order) == list(range(6)))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["classes", "class_to_idx", "names", "meta", "0", "1"]) | st.integers(0, 3), inner
        )
    ),
    max_leaves=20,
)


@given(JSON)
@settings(deadline=None)
def test_whatever_a_checkpoint_holds_lists_of_classes_are_names_by_index(content):
    for place, names in stated_classes(content).items():
        assert isinstance(place, str)
        assert len(names) > 1
        assert all(isinstance(name, str) for name in names)


@pytest.mark.parametrize(
    "content",
    [
        {"class_to_idx": {"a": 1, "b": 2}},
        {"class_to_idx": {"a": 0, "b": 0}},
        {"classes": 10},
        {"labels": torch.arange(3)},
        {"names": ["a"]},
        {"class_to_idx": {"a": True, "b": False}},
        {"train": {"files": ["a", "b"]}},
    ],
)
def test_what_gives_no_index_to_each_name_is_no_order(content):
    assert stated_classes(content) == {}


def test_read_checkpoints_have_it(tmp_path):
    found = read_checkpoint(saved(tmp_path / "net.pt", STATED["transformers"])).classes
    assert found == {"config.id2label": ORDER, "config.label2id": ORDER}


# --- a wrong order is seen -----------------------------------------------------------------------------------------


def answers(count: int, classes: int, right: float, seed: int = 0) -> tuple[Any, Any]:
    """Labels, and answers that are right with this chance."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, count)
    return labels, np.where(rng.random(count) < right, labels, rng.integers(0, classes, count))


NUMBERS = sorted(map(str, range(1, 13)))


def test_answers_in_another_order_are_said_with_the_order_that_fits():
    labels, predicted = answers(600, 12, 0.9)
    natural = sorted(NUMBERS, key=int)
    moved = np.array([natural.index(name) for name in NUMBERS])[predicted]  # the network has learnt the natural order
    said = misplaced(moved, labels, NUMBERS)
    assert said is not None
    assert said.endswith("--class-order natural")
    assert "output 1 is '2' and not '10'" in said
    swapped = np.array([1, 0, *range(2, 12)])[predicted]
    said = misplaced(swapped, labels, NUMBERS)
    assert said is not None
    assert "output 0 is '10' and not '1', 1 is '1' and not '10'; give the order by --class-order FILE" in said


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("count", "classes"), [(12, 10), (40, 10), (1000, 10), (200, 2), (10, 2), (500, 100)])
def test_chance_and_networks_that_are_right_are_not_said_to_have_another_order(seed, count, classes):
    names = [str(number) for number in range(classes)]
    for right in (0.0, 0.3, 0.9, 1.0):
        labels, predicted = answers(count, classes, right, seed)
        assert misplaced(predicted, labels, names) is None
    rng = np.random.default_rng(seed)
    skewed = rng.choice(classes, count, p=[0.7, *[0.3 / (classes - 1)] * (classes - 1)])
    assert misplaced(np.full(count, 1), skewed, names) is None, "one that always answers the same"


def test_no_images_are_in_no_order():
    assert misplaced(np.zeros(0, np.int64), np.zeros(0, np.int64), ["a", "b"]) is None


def test_fields_of_records_are_kept(folder):
    data, _ = opened(folder, class_order="natural")
    plain = open_data(f"imagefolder:{folder}")
    kept = {"name", "task", "augment", "native_size", "preferred_side", "preprocessing", "val_of", "gaps"}
    assert {f.name for f in dataclasses.fields(data)} - kept == {"classes", "train", "val", "order", "notes"}
    assert all(getattr(data, name) == getattr(plain, name) for name in kept)
