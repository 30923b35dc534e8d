"""A loader as data: what its collate function makes of images and labels, whatever form its batches have."""

from __future__ import annotations

import collections
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch._utils import ExceptionWrapper
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from optimize.data.from_python import image_data
from optimize.data.records import Split
from serve.runtime.errors import UserError
from serve.runtime.images import image_preprocessing
from tests.narrow import encoded

PIXELS = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (20, 3, 6, 7), dtype=np.uint8))
LABELS = torch.arange(20) % 4
PLAIN = TensorDataset(PIXELS, LABELS)
VAL = (PIXELS[:8], LABELS[:8])


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def pictures(split: Split) -> list[Any]:
    return [image_preprocessing.decode(encoded(source)).tolist() for source in split.sources]


def read(loader: Any) -> Split:
    return image_data(loader, VAL).train


def shifted(batch: list[tuple[torch.Tensor, torch.Tensor]]) -> list[Any]:
    """Labels from 0 on, as of files that count from 1; and the images inverted."""
    inputs, labels = default_collate(batch)
    return [255 - inputs, labels + 1]


def one_by_one(item: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return 255 - item[0], item[1] + 1


class Stream(IterableDataset):
    def __init__(self, batch: int | None = None) -> None:
        self.batch = batch

    def __iter__(self):
        if self.batch is None:
            yield from zip(PIXELS, LABELS, strict=True)
        else:
            yield from zip(PIXELS.split(self.batch), LABELS.split(self.batch), strict=True)


class Custom(DataLoader):
    def __iter__(self):
        return (shifted(list(zip(*batch, strict=True))) for batch in super().__iter__())


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(PLAIN, batch_size=6, collate_fn=shifted),
        DataLoader(PLAIN, batch_size=6, collate_fn=shifted, shuffle=True, drop_last=True),
        DataLoader(PLAIN, batch_sampler=[[19, 3, 4], [0, 1, 2], [*range(5, 19)]], collate_fn=shifted),
        DataLoader(PLAIN, sampler=RandomSampler(range(20), generator=torch.Generator()), collate_fn=shifted),
        DataLoader(PLAIN, batch_size=None, collate_fn=one_by_one),
        DataLoader(Stream(), batch_size=6, collate_fn=shifted),
        DataLoader(Stream(), batch_size=None, collate_fn=one_by_one),
        DataLoader(Stream(6), batch_size=None, collate_fn=lambda batch: [255 - batch[0], batch[1] + 1]),
        Custom(PLAIN, batch_size=6),
        [(255 - PIXELS[:15], LABELS[:15] + 1), (255 - PIXELS[15:], LABELS[15:] + 1)].__iter__(),
    ],
    ids=[
        "plain",
        "shuffled",
        "batches",
        "sampled",
        "singly",
        "stream",
        "streamed",
        "batches stream",
        "own",
        "iterator",
    ],
)
def test_whatever_a_loader_does_behind_its_data_set_counts(loader):
    split = read(loader)
    assert split.labels.tolist() == [label % 4 + 1 for label in range(20)]
    assert pictures(split) == (255 - PIXELS).tolist()


def test_a_loader_with_workers_gives_the_same():
    split = read(DataLoader(PLAIN, batch_size=6, collate_fn=shifted, num_workers=2, shuffle=True))
    assert split.labels.tolist() == (LABELS + 1).tolist()
    assert pictures(split) == (255 - PIXELS).tolist()


@dataclass
class Sample:
    image: torch.Tensor
    label: torch.Tensor


Named = collections.namedtuple("Named", ["index", "pixel_values", "labels"])


def batch_of(batch: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, labels = default_collate(batch)
    return inputs, labels


@pytest.mark.parametrize(
    "collate",
    [
        lambda batch: {"image": batch_of(batch)[0], "label": batch_of(batch)[1], "index": 3},
        lambda batch: Sample(*batch_of(batch)),
        lambda batch: Named(0, *batch_of(batch)),
        list,
        lambda batch: [{"img": image, "target": label} for image, label in batch],
        lambda batch: tuple(zip(*batch, strict=True)),
        lambda batch: (
            [Image.fromarray(image.permute(1, 2, 0).numpy()) for image, _ in batch],
            [int(b) for _, b in batch],
        ),
        lambda batch: (batch_of(batch)[0].permute(0, 2, 3, 1).contiguous(), batch_of(batch)[1]),
        lambda batch: (batch_of(batch)[0].numpy(), batch_of(batch)[1].numpy()),
        lambda batch: (batch_of(batch)[0], batch_of(batch)[1][:, None]),
        lambda batch: (batch_of(batch)[0], torch.nn.functional.one_hot(batch_of(batch)[1], 4)),
        lambda batch: (batch_of(batch)[0], torch.eye(4)[batch_of(batch)[1]]),
    ],
    ids=[
        *("dict", "record", "named tuple", "items", "dicts", "transposed", "PIL", "channels last", "arrays"),
        *("column", "one-hot", "one-hot floats"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_batches_may_have_any_usual_form(collate, size):
    split = read(DataLoader(PLAIN, batch_size=size, collate_fn=collate))
    assert split.labels.tolist() == LABELS.tolist()
    assert pictures(split) == PIXELS.tolist()


@given(st.lists(st.lists(st.integers(0, 19), min_size=1, max_size=4), min_size=1, max_size=8))
def test_a_batch_sampler_gives_each_row_once_and_in_the_order_of_the_data_set(batches):
    rows = sorted({row for batch in batches for row in batch})
    split = read(DataLoader(PLAIN, batch_sampler=batches, collate_fn=shifted))
    assert split.labels.tolist() == (LABELS[rows] + 1).tolist()
    assert pictures(split) == (255 - PIXELS[rows]).tolist()


def test_what_is_drawn_without_a_generator_is_the_same_each_time_and_leaves_the_callers_numbers_alone():
    def drawn(seed: int) -> str:
        sampler = WeightedRandomSampler([1.0] * 20, 12)
        return image_data(DataLoader(PLAIN, sampler=sampler, batch_size=4), VAL, seed=seed).train.fingerprint

    torch.manual_seed(5)
    first = drawn(0)
    number = torch.rand(())
    assert drawn(0) == first
    assert drawn(1) != first
    torch.manual_seed(5)
    assert torch.equal(torch.rand(()), number)


class Augmented(Dataset[Any]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, row: int) -> Any:
        return (PIXELS[row].flip(2) if random.random() < 0.5 else PIXELS[row]), LABELS[row]


@pytest.mark.parametrize("data", [Augmented(), DataLoader(Augmented(), batch_size=4)], ids=["data set", "loader"])
def test_random_transforms_are_said_and_come_out_alike_in_each_run(data):
    first, again = image_data(data, VAL), image_data(data, VAL)
    assert first.fingerprint == again.fingerprint
    assert [note for note in first.notes if "train" in note and "random transforms" in note]
    assert image_data(PLAIN, VAL).notes == ()


def raising(batch: list[Any]) -> Any:
    raise KeyError("mask")


def failing_in_a_worker() -> Iterator[Any]:
    """Raises what a loader does one of whose processes fails; a real one takes 5 s to end after that (torch 2.14)."""
    try:
        raising([])
    except KeyError:
        ExceptionWrapper(where="in DataLoader worker process 0").reraise()
    yield


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (DataLoader(PLAIN, collate_fn=raising), r"train\[0\]: reading it failed: KeyError: 'mask'"),
        (failing_in_a_worker(), r"train\[0\]: reading it failed: KeyError: 'mask'"),
        (DataLoader(PLAIN, batch_size=4, collate_fn=lambda b: default_collate(b)[0]), "it must be a pair of an image"),
        (
            DataLoader(PLAIN, batch_size=4, collate_fn=lambda b: (*batch_of(b), "path")),
            "tuple and has 3 elements; it must",
        ),
        (DataLoader(PLAIN, batch_size=4, collate_fn=lambda b: {"foo": 1, "bar": 2}), "as fields .*it has foo, bar"),
        (DataLoader(PLAIN, batch_size=4, collate_fn=lambda b: (batch_of(b)[0], LABELS[:3])), "4 images and 3 labels"),
        (
            DataLoader(PLAIN, batch_sampler=[[3, 2], [1, 0]], collate_fn=lambda b: batch_of(b[:1])),
            "has 1 images of 2 rows",
        ),
        (DataLoader(PLAIN, sampler=iter(lambda: 3, 4), batch_size=2), "its sampler does not end after"),
        (DataLoader(Stream(3), batch_size=None, collate_fn=lambda b: (b[0][:, 0], b[1])), "may be one image of 3"),
    ],
)
def test_a_loader_that_gives_nothing_of_use_is_refused_in_one_line(loader, message):
    with pytest.raises(UserError, match=message) as caught:
        read(loader)
    assert "\n" not in str(caught.value)
