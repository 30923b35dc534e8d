"""Loads batches of ``uint8`` pixels and targets: a data set's images after the runtime's own preprocessing.

Training, calibration and measurement all read from here, so that each sees what the endpoint will see.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from optimize.data.pixels import Fitted, Told, fitted, load_row
from optimize.data.records import Split
from optimize.data.splits import subset
from optimize.data.unreadable import NAMED, named, refused
from serve.runtime.card.card import Preprocessing
from serve.runtime.device.cores import cores
from serve.runtime.errors import ImageError, UserError

#: Once there are too many unreadable images, others are searched for this many seconds, so that all can be named.
_SEARCH_SECONDS = 30.0

_Batch = tuple[torch.Tensor, torch.Tensor]
_Numbered = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_Read = tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]

#: Images and targets of a batch, or of a part of one, in which no image can be read.
_NOTHING: _Batch = (torch.empty(0), torch.empty(0))


class Placed(NamedTuple):
    """A batch, or a process's part of one, in its epoch.

    Attributes:
        place: the batch's number in the epoch, from 0.
        rows: rows of the split, ``int64 (N,)``. A part may be empty.
        images: ``uint8 (N, C, H, W)``.
        targets: see `Targets`. Labels are ``int64 (N,)``, class maps ``(N, H, W)``.
        copies: the number of processes that have each of these images. It is all of them if a batch is too small to be
            divided.
    """

    place: int
    rows: torch.Tensor
    images: torch.Tensor
    targets: torch.Tensor
    copies: int


def loader(
    split: Split,
    preprocessing: Preprocessing,
    *,
    batch_size: int,
    device: torch.device,
    shuffle: bool = False,
    seed: int = 0,
    limit: int | None = None,
    skip_unreadable: float = 0.0,
    remedy: str = "",
    scratch: Path | None = None,
    told: Told | None = None,
    said: Callable[[str], None] | None = None,
    share: tuple[int, int] = (0, 1),
) -> Loader:
    """Return batches of ``split``: ``uint8`` ``(N, C, H, W)`` images and their targets, in host memory.

    Args:
        split: the split to read.
        preprocessing: how bytes become pixels. Normalising is left to ``image_preprocessing.normalise`` on the device.
        batch_size: images per batch. The last batch may be smaller.
        device: where the batches will be used. For CUDA they are in pinned memory.
        shuffle: use another order in each epoch, and no batch of a single image, on which BatchNorm cannot work in
            training.
        seed: the seed of the order and of the subset.
        limit: read only this many images, drawn at random and stratified.
        skip_unreadable: share of the images, in [0, 1], that may be unreadable, or have unreadable targets. These are
            left out of their batches and recorded in ``left_out``.
        remedy: the end of the message about too many unreadable images.
        scratch: folder for pixels that do not fit into memory. By default the user's cache folder.
        told: receives the share that is done if all images are decoded before the first batch.
        said: receives one line that names the images that are left out, at the end of an epoch that found some.
        share: the part of each batch to read, from 0, and the number of parts, if several processes share it.

    Raises:
        UserError: ``batch_size`` or ``limit`` is not positive. While iterating: too many images are unreadable, or all.
    """
    if batch_size < 1:
        raise UserError(f"the batch size must be at least 1, got {batch_size}")
    chosen = split if limit is None else subset(split, limit, seed)
    return Loader(
        chosen, preprocessing, batch_size, device, shuffle, seed, skip_unreadable, remedy, scratch, told, said, share
    )


@dataclass(eq=False)
class Loader:
    """Reads a split in batches, any number of times. Use `loader` to make one.

    Threads decode a small split at first use, and it is kept in memory. A larger one that is read in order is kept in a
    file. Worker processes decode any other split anew in each epoch, and stay alive between epochs. ``left_out`` has
    the reason for each row that was unreadable so far. ``share`` is the part of each batch to read, and the number of
    parts, if several processes share it.
    """

    split: Split
    preprocessing: Preprocessing
    batch_size: int
    device: torch.device
    shuffle: bool = False
    seed: int = 0
    skip_unreadable: float = 0.0
    remedy: str = ""
    scratch: Path | None = None
    told: Told | None = None
    said: Callable[[str], None] | None = None
    share: tuple[int, int] = (0, 1)
    left_out: dict[int, str] = field(default_factory=dict)
    _streaming: tuple[DataLoader[Any], _Batches] | None = None

    def __len__(self) -> int:
        """Return the number of batches. A batch without readable images is left out during iteration."""
        count, rest = divmod(len(self.split), self.batch_size)
        return count + (rest > 0 and not (self.shuffle and rest == 1 and count > 0))

    def __iter__(self) -> Iterator[_Batch]:
        """Return the batches of epoch 0."""
        return self.epoch(0)

    def epoch(self, number: int) -> Iterator[_Batch]:
        """Return the batches of one epoch. Its order depends only on the seed and on ``number``."""
        return ((images, targets) for _, images, targets in self.numbered(number))

    def numbered(self, number: int = 0) -> Iterator[_Numbered]:
        """Return what `epoch` does, each batch with its rows of the split, ``int64 (N,)``, before it."""
        return ((part.rows, part.images, part.targets) for part in self.placed(number))

    def placed(self, number: int = 0, start: int = 0) -> Iterator[Placed]:
        """Return what `numbered` does with each batch's place in the epoch, from ``start`` on.

        Earlier batches are not read.

        A shared batch has a part for each place, so that all processes have the same number of parts.
        """
        order = self._order(number)
        # A file is not used for another order in each epoch, because it would be read at random places of a disk.
        kept = fitted(self.split, self.preprocessing, self.scratch, disk=not self.shuffle, told=self.told)
        read = self._from_kept(order, kept, start) if kept is not None else self._from_workers(order, start)
        known = len(self.left_out)
        found = start > 0
        for place, (rows, images, targets, copies) in enumerate(read, start=start):
            # A single image has no variance. It is allowed only if all batches have one image.
            lone = self.shuffle and len(rows) == 1 and min(self.batch_size, len(self.split)) > 1
            if self.share[1] == 1 and (not len(rows) or lone):
                continue
            found = found or len(rows) > 0
            if self.device.type == "cuda":
                yield Placed(place, rows, images.pin_memory(), targets.pin_memory(), copies)
            else:
                yield Placed(place, rows, images, targets, copies)
        if not found and self.left_out:
            raise self._refused()
        if self.said is not None and len(self.left_out) > known:
            self.said(self.note())

    def note(self) -> str:
        """Describe the images that were left out so far, in one line. There must be some."""
        images = "image" if len(self.left_out) == 1 else "images"
        return f"{len(self.left_out)} unreadable {images} left out: {named(self.left_out, self.split.sources)}"

    def _order(self, number: int) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(len(self.split))
        # A plain sum would give seed 1 the order of seed 0, one epoch later.
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + number) % (1 << 63))
        return torch.randperm(len(self.split), generator=generator)

    def _from_kept(self, order: torch.Tensor, kept: Fitted, start: int) -> Iterator[_Read]:
        """Yield each batch's readable rows, or our part of them, with images and targets. They may be empty."""
        self.left_out.update(kept.unreadable)
        if len(self.left_out) > self._allowed:
            raise self._refused()
        bad = torch.zeros(len(self.split), dtype=torch.bool)
        bad[list(kept.unreadable)] = True
        for rows in _Batches(order, self.batch_size, len(self), start).tensors():
            good, copies = _part(rows[~bad[rows]] if kept.unreadable else rows, self.share)
            yield good, *(kept.read(good) if len(good) else _NOTHING), copies

    def _from_workers(self, order: torch.Tensor, start: int) -> Iterator[_Read]:
        """Yield the same as `_from_kept`. After too many unreadable images it searches for more and yields nothing."""
        if self._streaming is None:
            batches = _Batches(order, self.batch_size, len(self), start, self.share)
            # On the CPU the network itself needs the cores.
            workers = min(8, cores()) if self.device.type == "cuda" else max(1, cores() // 2)
            stream: DataLoader[Any] = DataLoader(
                _Encoded(self.split, self.preprocessing),
                batch_sampler=batches,
                num_workers=workers,
                collate_fn=_collate,
                persistent_workers=True,
                prefetch_factor=2,
                # Otherwise each epoch would take a number from the process's generator, which a network's dropout uses.
                generator=torch.Generator(),
            )
            self._streaming = (stream, batches)
        stream, batches = self._streaming
        # The sampler stays in this process, so that it can change while the workers stay alive.
        batches.order, batches.start = order, start
        deadline = None
        for place, (good, read, faults) in enumerate(stream, start=start):
            self.left_out.update(faults)
            if len(self.left_out) > self._allowed:
                deadline = deadline or time.monotonic() + _SEARCH_SECONDS
                if len(self.left_out) > NAMED or time.monotonic() > deadline:
                    raise self._refused(more=True)
            else:
                _, copies = _part(order[self.batch_size * place : self.batch_size * (place + 1)], self.share)
                yield torch.tensor(good, dtype=torch.int64), *(read or _NOTHING), copies
        if deadline is not None:
            raise self._refused()

    @property
    def _allowed(self) -> float:
        return self.skip_unreadable * len(self.split)

    def _refused(self, *, more: bool = False) -> UserError:
        return refused(self.left_out, self.split.sources, self.remedy, more=more)


def _part(rows: torch.Tensor, share: tuple[int, int]) -> tuple[torch.Tensor, int]:
    """Return a process's part of a batch's rows, and the number of processes that have each of its rows.

    Parts are consecutive and consist of pairs, so that each has at least two images, without which no norm can train. A
    batch that is too small for that goes to every process completely.
    """
    number, count = share
    if len(rows) < 2 * count:
        return rows, count
    first, end = (len(rows) // 2 * place // count * 2 for place in (number, number + 1))
    return rows[first : end if number + 1 < count else len(rows)], 1


class _Batches:
    """A batch sampler whose order and first batch are set from outside. It cuts each batch on request."""

    def __init__(
        self, order: torch.Tensor, batch_size: int, count: int, start: int = 0, share: tuple[int, int] = (0, 1)
    ) -> None:
        self.order = order
        self.start = start
        self._share = share
        self._size = batch_size
        self._count = count

    def tensors(self) -> Iterator[torch.Tensor]:
        return (self.order[self._size * n : self._size * (n + 1)] for n in range(self.start, self._count))

    def __iter__(self) -> Iterator[list[int]]:
        return (_part(rows, self._share)[0].tolist() for rows in self.tensors())

    def __len__(self) -> int:
        return self._count - self.start


class _Encoded(Dataset[Any]):
    """Decodes in a worker. It returns an error as text, because a raised one would arrive wrapped in a traceback."""

    def __init__(self, split: Split, preprocessing: Preprocessing) -> None:
        self.split = split
        self.preprocessing = preprocessing

    def __getitem__(self, row: int) -> tuple[int, _Batch | str]:
        try:
            return row, load_row(self.split, row, self.preprocessing)
        except ImageError as error:
            return row, str(error)


def _collate(items: Sequence[tuple[int, _Batch | str]]) -> tuple[list[int], _Batch | None, dict[int, str]]:
    """Return the rows that could be read, their images and targets, and the reason for each that could not."""
    good = [(row, read) for row, read in items if not isinstance(read, str)]
    faults = {row: fault for row, fault in items if isinstance(fault, str)}
    images, targets = zip(*(read for _, read in good), strict=True) if good else ((), ())
    return [row for row, _ in good], (torch.stack(images), torch.stack(targets)) if good else None, faults
