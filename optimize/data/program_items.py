"""Reads single images with labels from a program's data: arrays, a ``Dataset``, a ``DataLoader``, or any iterable.

A loader is read through its batches, so that the effect of its ``collate_fn`` on images and labels counts. Two things
are not the loader's. The order is that of its data set, and ``drop_last`` does not reduce the number of images. Random
numbers that are drawn during reading are functions of a seed, so that the next run reads the same images.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL import Image
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
    default_convert,
)

from serve.runtime.errors import UserError, one_line

#: Pairs of an image and its target, a class or a class map: a ``Dataset``, a ``DataLoader``, any iterable of such pairs
#: or of batches of them. Or a pair of arrays or tensors, ``(N, …)`` images and ``(N,)`` labels or ``(N, H, W)`` maps.
Data: TypeAlias = Dataset[Any] | Iterable[Any] | tuple[Any, Any]

#: An image and its label, as the data gives them.
Pair: TypeAlias = tuple[Any, Any]

#: The names of an image and a target in a batch or an item that has names.
_IMAGE_NAMES = ("image", "images", "img", "imgs", "pixel_values", "pixels", "x", "input", "inputs", "data")
_LABEL_NAMES = (
    *(name + ending for name in ("label", "target", "mask") for ending in ("", "s")),
    *("y", "class", "classes", "class_id", "class_idx"),
)

#: A sampler that draws more batches than this for each row of its data set is taken to be endless.
_DRAWS = 64

#: This many images are read twice, to see whether they are the same.
_LOOKED_AT = 16


@dataclasses.dataclass(frozen=True)
class Items:
    """The images of one split, to be read once.

    Attributes:
        pairs: each image with its label.
        count: the number of images, if it is known.
        rows: their rows of the data set, if they do not come in its order.
        again: reads the first of them once more, with other random numbers. None for data that can be read only once.
    """

    pairs: Iterator[Pair]
    count: int | None = None
    rows: Sequence[int] | None = None
    again: Callable[[], Iterator[Pair]] | None = None


def items_of(data: Data, title: str) -> Items:
    """Return the items of ``data``. Messages call it ``title``.

    Raises:
        UserError: it has none of the forms of `Data`. While iterating: reading it fails.
    """
    if isinstance(data, tuple) and len(data) == 2 and all(hasattr(part, "shape") for part in data):
        images, labels = data
        if len(images) != len(labels):
            raise UserError(f"{title}: has {len(images)} images and {len(labels)} labels; give one label per image")
        return Items(zip(images, labels, strict=True), len(images))
    if isinstance(data, DataLoader):
        return _of_loader(data, title)
    readable = hasattr(data, "__getitem__") or hasattr(data, "__iter__")
    if not readable or isinstance(data, str | bytes | Mapping | torch.Tensor | np.ndarray):
        raise UserError(
            f"{title}: is {kind(data)}; it must be a pair of images and labels, a Dataset, a DataLoader, "
            "or a sequence of pairs of an image and its class"
        )
    if isinstance(data, IterableDataset) or not hasattr(data, "__getitem__"):
        return Items(_apart(_guarded(data, title), title))
    held: Any = data  # a map-style Dataset, or a list

    def read(count: int) -> Iterator[Pair]:
        rows = _guarded((held[row] for row in range(count)), title)
        return (_fields(row, f"{title}[{number}]") for number, row in enumerate(rows))

    return Items(read(len(held)), len(held), again=lambda: read(min(_LOOKED_AT, len(held))))


@contextlib.contextmanager
def drawn_by(seed: int) -> Iterator[None]:
    """Make random numbers of Python, NumPy and torch depend only on ``seed``, and restore the generators afterwards."""
    before, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % (1 << 32))
            yield
    finally:
        random.setstate(before)
        np.random.set_state(of_numpy)


def kind(value: Any) -> str:
    """Describe a value in words for messages."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"{type(value).__name__} of {value.dtype}, shape {tuple(value.shape)}"
    if isinstance(value, str | int | float | bool):
        return repr(value)[:60]
    return f"of type {type(value).__name__}"


def _of_loader(loader: DataLoader[Any], title: str) -> Items:
    dataset: Any = loader.dataset
    if type(loader).__iter__ is not DataLoader.__iter__:  # the subclass treats batches in its own way
        return Items(_apart(_guarded(loader, title), title))
    if isinstance(dataset, IterableDataset):
        stream = _twin(loader, batch_size=loader.batch_size)
        return Items(_apart(_guarded(stream, title), title, single=None if loader.batch_size is None else False))
    batches = _batches(loader, title)
    flat = [row for batch in batches for row in (batch if isinstance(batch, list) else [batch])]
    numbered = all(isinstance(row, int | np.integer) and not isinstance(row, bool) for row in flat)
    rows = None if not numbered or flat == sorted(set(flat)) else [int(row) for row in flat]

    def read(batches: Sequence[Any], twin: DataLoader[Any]) -> Iterator[Pair]:
        for number, (rows_, batch) in enumerate(zip(batches, _guarded(twin, title), strict=True)):
            size = len(rows_) if isinstance(rows_, list) else None
            pairs = list(_apart([batch], f"{title}: batch {number}", single=size is None))
            if rows is not None and len(pairs) != (size or 1):
                raise UserError(
                    f"{title}: batch {number} has {len(pairs)} images of {size or 1} rows, so the images cannot be "
                    "identified; with your own sampler, collate_fn must keep one image for each row"
                )
            yield from pairs

    def again() -> Iterator[Pair]:
        size = loader.batch_size or 1
        some = batches[: -(-_LOOKED_AT // size)]
        return read(some, _twin(loader, workers=0, **_index(loader, some)))

    return Items(read(batches, _twin(loader, **_index(loader, batches))), len(flat), rows, again)


def _batches(loader: DataLoader[Any], title: str) -> list[Any]:
    """Return the rows of each batch of a loader: lists, or single rows if it makes no batches.

    A loader that only shuffles all of its data set is read in order. For any other, its sampler is drawn from once.
    """
    dataset: Any = loader.dataset
    # If the user gives a batch sampler, torch still has a sampler of its own, which is never used.
    own: Any = loader.batch_sampler
    sampler: Any = loader.sampler
    if own is not None and not (type(own) is BatchSampler and own.sampler is sampler):
        return [list(batch) for batch in _ending(own, dataset, title)]
    whole = type(sampler) in (SequentialSampler, RandomSampler) and len(sampler) == len(dataset)
    if whole and not getattr(sampler, "replacement", False):
        rows: list[Any] = list(range(len(dataset)))
    else:
        rows = list(_ending(sampler, dataset, title))
    if own is None:
        return rows
    return [rows[start : start + own.batch_size] for start in range(0, len(rows), own.batch_size)]


def _ending(sampler: Iterable[Any], dataset: Any, title: str) -> Iterator[Any]:
    most = _DRAWS * (len(dataset) + 1)
    for number, drawn in enumerate(sampler):
        if number == most:
            raise UserError(f"{title}: its sampler does not end after {most} draws; give one that ends after an epoch")
        yield drawn


def _index(loader: DataLoader[Any], batches: Sequence[Any]) -> dict[str, Any]:
    """Return the arguments of a loader that gives these batches."""
    return {"batch_size": None, "sampler": batches} if loader.batch_sampler is None else {"batch_sampler": batches}


def _twin(loader: DataLoader[Any], *, workers: int | None = None, **index: Any) -> DataLoader[Any]:
    """Make a loader of the same data set for other batches, without torch's default collating, which only stacks."""
    stacks = loader.collate_fn in (default_collate, default_convert)
    count = loader.num_workers if workers is None else workers
    of_workers: dict[str, Any] = {}
    if count:
        of_workers = {
            "multiprocessing_context": loader.multiprocessing_context,
            "prefetch_factor": loader.prefetch_factor,
            "timeout": loader.timeout,
        }
    return DataLoader(
        loader.dataset,
        collate_fn=(_Apart if _makes_batches(index) else _as_it_is) if stacks else loader.collate_fn,
        num_workers=count,
        worker_init_fn=loader.worker_init_fn,
        **of_workers,
        **index,
    )


class _Apart(list[Any]):
    """Items of a batch that were not collated."""


def _makes_batches(index: Mapping[str, Any]) -> bool:
    return "batch_sampler" in index or index["batch_size"] is not None


def _as_it_is(item: Any) -> Any:
    return item


def _guarded(values: Iterable[Any], title: str) -> Iterator[Any]:
    """Yield ``values``, and report whatever the user's code raises in one line."""
    count = 0
    try:
        for value in values:
            yield value
            count += 1
    except UserError:
        raise
    except Exception as error:  # noqa: BLE001 - data sets and collate functions may raise anything
        # For an error in a worker process, torch (2.14) gives the whole traceback as text. Its last line is the error.
        text = str(error).strip()
        reason = text.splitlines()[-1] if "Original Traceback" in text else one_line(error)
        raise UserError(f"{title}[{count}]: reading it failed: {reason}") from None


def _apart(values: Iterable[Any], title: str, *, single: bool | None = None) -> Iterator[Pair]:
    """Yield single images from batches or single ones. ``single`` says which. With None each value shows it."""
    for number, value in enumerate(values):
        place = f"{title}[{number}]"
        if isinstance(value, _Apart) or (isinstance(value, list | tuple) and value and all(map(_is_item, value))):
            yield from (_fields(item, place) for item in value)
            continue
        images, labels = _fields(value, place)
        if single or (single is None and _is_single(images, labels, place)):
            yield images, labels
            continue
        try:
            counts = len(images), len(labels)
        except TypeError:  # from a number, or a tensor without axes
            raise UserError(
                f"{place}: is a batch of {kind(images)} with labels {kind(labels)} and must have equal numbers of both"
            ) from None
        if counts[0] != counts[1]:
            raise UserError(f"{place}: has {counts[0]} images and {counts[1]} labels and must have equal numbers")
        yield from zip(images, labels, strict=True)


def _fields(value: Any, place: str) -> Pair:
    """Return image and label, or images and labels, from a pair, a mapping or a record."""
    named: Mapping[str, Any] = {}
    if isinstance(value, Mapping):
        named = value
    elif dataclasses.is_dataclass(value):
        named = vars(value) if hasattr(value, "__dict__") else {}
    elif hasattr(value, "_fields"):
        named = value._asdict()
    found = [next((named[name] for name in names if name in named), None) for names in (_IMAGE_NAMES, _LABEL_NAMES)]
    if found[0] is not None and found[1] is not None:
        return found[0], found[1]
    if not isinstance(value, tuple | list) or len(value) != 2:
        there = f", and it has {', '.join(map(str, itertools.islice(named, 8)))}" if named else ""
        count = f" and has {len(value)} elements" if isinstance(value, tuple | list) else ""
        raise UserError(
            f"{place}: is {kind(value)}{count}; it must be a pair of an image and a class index, or have both as "
            f"fields ({'/'.join(_IMAGE_NAMES)} and {'/'.join(_LABEL_NAMES)}){there}"
        )
    return value[0], value[1]


def _is_item(value: Any) -> bool:
    """Return whether a batch's element is an image with its label, rather than all images or all labels."""
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return len(value) == 2 and _is_image(value[0]) and (not _is_image(value[1]) or _is_map_of(*value))
    return isinstance(value, Mapping) or dataclasses.is_dataclass(value) or hasattr(value, "_fields")


def _is_image(value: Any) -> bool:
    return isinstance(value, Image.Image) or (isinstance(value, torch.Tensor | np.ndarray) and value.ndim >= 2)


def _is_map_of(image: Any, target: Any) -> bool:
    """Return whether this is an image with its class map, rather than two images or two maps."""
    return getattr(image, "ndim", 0) == 3 and getattr(target, "ndim", 0) == 2


def _is_single(image: Any, label: Any, place: str) -> bool:
    """Return whether this is one image with its label rather than a batch."""
    if not isinstance(image, torch.Tensor | np.ndarray):
        return not isinstance(image, list | tuple)
    labels = len(label) if isinstance(label, list | tuple) or getattr(label, "ndim", 0) > 0 else 0
    if image.ndim != 3 or not labels or labels != len(image):
        return image.ndim < 4
    if labels == 1:
        return True  # either way it is this image and this label
    if labels == 3:
        raise UserError(
            f"{place}: may be one image of 3 channels with a one-hot label, or 3 grey images; give labels as indices"
        )
    return False
