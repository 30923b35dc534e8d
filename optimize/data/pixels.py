"""Decodes a split's images and targets once for the network, and keeps them in memory or in a file."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary, finalize

import numpy as np
import torch

from optimize.data.cache_folders import cache_folder
from optimize.data.records import Split
from optimize.data.sources import Source, file_bytes, read_source
from optimize.data.unreadable import refused
from serve.runtime.card.card import Preprocessing
from serve.runtime.device.cores import cores
from serve.runtime.errors import ImageError, UserError
from serve.runtime.images import image_preprocessing
from serve.runtime.images.placement import PlacedImage, Placement

#: A split whose fitted images and targets need at most this many bytes (1 GiB) is decoded once and kept in memory.
MEMORY_LIMIT = 1 << 30

#: A split that needs at most this many (32 GiB), and half of the free disk space, is kept in a file.
DISK_LIMIT = 32 << 30

_CHUNK = 64  # images that a thread decodes at a time

Told = Callable[[float], None]


class Rows(Protocol):
    """Tensors of one shape and dtype, one for each image of a split."""

    def write(self, start: int, chunk: torch.Tensor) -> None:
        """Keep ``chunk`` from row ``start`` on. Safe to call from several threads."""
        ...

    def read(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the tensors at ``rows``, ``int64 (N,)``, as one."""
        ...


class InMemory:
    """`Rows` as one tensor, ``values``."""

    def __init__(self, count: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        # A caller who measures is in inference mode, whose tensors could not be used in training later. The mode
        # belongs to a thread (torch 2.14), so the pool's threads may not even write to such tensors.
        with torch.inference_mode(False):
            self.values = torch.zeros((count, *shape), dtype=dtype)

    def write(self, start: int, chunk: torch.Tensor) -> None:
        """See `Rows`."""
        self.values[start : start + len(chunk)] = chunk

    def read(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Rows`. Consecutive rows are not copied."""
        first, last = int(rows[0]), int(rows[-1])
        if last - first + 1 == len(rows) and torch.equal(rows, torch.arange(first, last + 1)):
            return self.values[first : last + 1]
        return self.values.index_select(0, rows)


class OnDisk:
    """`Rows` in an unnamed file, which is gone with the process, however that ends.

    It is read and written, not mapped, because mapped pages would count as this process's memory.
    """

    def __init__(self, folder: Path, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - lives as long as this object
        finalize(self, self._file.close)
        self._shape, self._dtype = shape, dtype
        self._size = _bytes(shape, dtype)

    def write(self, start: int, chunk: torch.Tensor) -> None:
        """See `Rows`."""
        left, at = chunk.contiguous().numpy().tobytes(), start * self._size
        while left:
            count = os.pwrite(self._file.fileno(), left, at)
            left, at = left[count:], at + count

    def read(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Rows`."""
        with torch.inference_mode(False):
            batch = torch.empty((len(rows), *self._shape), dtype=self._dtype)
        for one, row in zip(batch.numpy().reshape(len(rows), -1), rows.tolist(), strict=True):
            os.preadv(self._file.fileno(), [one.data], row * self._size)
        return batch


@dataclass(frozen=True, eq=False)
class Fitted:
    """All fitted images of a split, with their targets.

    Attributes:
        images: ``uint8 (N, C, H, W)``. An unreadable image is zeros.
        targets: see `Targets`. That of an unreadable image is zeros.
        unreadable: the reason for each row whose image or target could not be read.
    """

    images: Rows
    targets: Rows
    unreadable: dict[int, str] = field(default_factory=dict)

    def read(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the images and targets at ``rows``, ``int64 (N,)``."""
        return self.images.read(rows), self.targets.read(rows)


# They live as long as their split: a command opens its data once, and its passes share the pixels.
_kept: WeakKeyDictionary[Split, dict[Preprocessing, Fitted]] = WeakKeyDictionary()


def fitted(
    split: Split,
    preprocessing: Preprocessing,
    scratch: Path | None = None,
    *,
    disk: bool = False,
    told: Told | None = None,
) -> Fitted | None:
    """Return the split's images, decoded once and kept as long as ``split`` lives. None if they are too many.

    Args:
        split: the split to decode.
        preprocessing: how bytes become pixels.
        scratch: folder for pixels that do not fit into memory. By default the user's cache folder.
        disk: whether a file may be used.
        told: called now and then with the share, in [0, 1], that is decoded.
    """
    kept = _kept.setdefault(split, {})
    if preprocessing not in kept:
        if fits_in_memory(split, preprocessing):
            made = _in_memory(split, preprocessing)
        elif disk and (folder := _room(split, preprocessing, scratch)) is not None:
            images, targets = (OnDisk(folder, *form) for form in _forms(split, preprocessing))
            made = Fitted(images, targets)
        else:
            return None
        _decode(split, preprocessing, made, told)
        kept[preprocessing] = made
    return kept[preprocessing]


def decoded(split: Split, preprocessing: Preprocessing) -> torch.Tensor:
    """Return all of a split as ``uint8`` ``(N, C, H, W)`` in memory, decoded once and kept as long as ``split`` lives.

    Raises:
        UserError: files cannot be read or are not usable images. The message names them.
    """
    kept = _kept.setdefault(split, {})
    made = kept.get(preprocessing)
    if made is None or not isinstance(made.images, InMemory):
        made = _in_memory(split, preprocessing)
        _decode(split, preprocessing, made, None)
        kept[preprocessing] = made
    if made.unreadable:
        raise refused(made.unreadable, split.sources, "")
    assert isinstance(made.images, InMemory)
    return made.images.values


def load(source: Source, preprocessing: Preprocessing) -> torch.Tensor:
    """Return one image as the network gets it, ``uint8 (C, H, W)``.

    Raises:
        ImageError: it cannot be read, is not a usable image, or has finished pixels of another shape.
    """
    return _load(source, preprocessing).pixels


def load_row(split: Split, row: int, preprocessing: Preprocessing) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one image of a split as `load` does, and its target.

    Raises:
        ImageError: one of them cannot be read or is not usable, or they do not fit together.
    """
    image = _load(split.sources[row], preprocessing)
    return image.pixels, split.targets.load(row, image.placement)


def _load(source: Source, preprocessing: Preprocessing) -> PlacedImage:
    if isinstance(source, np.ndarray):
        if source.shape != preprocessing.shape:
            raise ImageError(f"its pixels have the shape {source.shape}, not {preprocessing.shape}")
        return PlacedImage(torch.from_numpy(np.array(source)), Placement(*[preprocessing.crop] * 3))
    try:
        data = file_bytes(source) if isinstance(source, Path) else source
        return image_preprocessing.load_placed(data, preprocessing)
    except MemoryError:
        raise ImageError("there is not enough memory to decode it") from None


def sample(split: Split, preprocessing: Preprocessing) -> bytes:
    """Return the first readable image of the split, encoded.

    Raises:
        UserError: there is none.
    """
    unreadable: dict[int, str] = {}
    for row, source in enumerate(split.sources):
        try:
            load(source, preprocessing)
            return read_source(source)
        except ImageError as error:
            unreadable[row] = str(error)
    raise refused(unreadable, split.sources, "")


def native_size(split: Split) -> tuple[int, int] | None:
    """Return the ``(height, width)`` that 16 images, spread over the split, all have. None if they differ.

    Raises:
        UserError: none of them can be read.
    """
    sizes = set()
    unreadable: dict[int, str] = {}
    rows = torch.linspace(0, len(split) - 1, min(16, len(split))).long().tolist()
    for row in rows:
        source = split.sources[row]
        try:
            # The scale of greys is not known yet, so any is accepted.
            found = (
                source.shape
                if isinstance(source, np.ndarray)
                else image_preprocessing.decode(read_source(source), pixel_max=math.inf).shape
            )
            sizes.add((int(found[-2]), int(found[-1])))
        except (ImageError, MemoryError) as error:
            unreadable[row] = str(error)
        except UserError as error:
            unreadable[row] = str(error).removeprefix(f"{source}: ")
    if len(unreadable) == len(rows):
        raise refused(unreadable, split.sources, "", more=True)
    return sizes.pop() if len(sizes) == 1 else None


def fits_in_memory(split: Split, preprocessing: Preprocessing) -> bool:
    """Return whether the split's fitted images and targets need at most `MEMORY_LIMIT` bytes."""
    return _needed(split, preprocessing) <= MEMORY_LIMIT


def _needed(split: Split, preprocessing: Preprocessing) -> int:
    return len(split) * sum(_bytes(*form) for form in _forms(split, preprocessing))


def _forms(split: Split, preprocessing: Preprocessing) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    """Return shape and dtype of an image and of a target."""
    targets = split.targets
    return (preprocessing.shape, torch.uint8), (targets.shape(preprocessing), targets.dtype)


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return int(np.prod(shape)) * dtype.itemsize


def _in_memory(split: Split, preprocessing: Preprocessing) -> Fitted:
    images, targets = (InMemory(len(split), *form) for form in _forms(split, preprocessing))
    return Fitted(images, targets)


def _room(split: Split, preprocessing: Preprocessing, scratch: Path | None) -> Path | None:
    """Return the folder for the split's pixels. None if they exceed the limit, or half of the free space there."""
    folder = scratch or cache_folder("pixels")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError:
        return None
    return folder if _needed(split, preprocessing) <= min(DISK_LIMIT, free // 2) else None


def _decode(split: Split, preprocessing: Preprocessing, made: Fitted, told: Told | None) -> None:
    def work(rows: range) -> None:
        with torch.inference_mode(False):
            images, targets = (
                torch.zeros((len(rows), *shape), dtype=dtype) for shape, dtype in _forms(split, preprocessing)
            )
        for place, row in enumerate(rows):
            try:
                images[place], targets[place] = load_row(split, row, preprocessing)
            except ImageError as error:
                made.unreadable[row] = str(error)
        made.images.write(rows.start, images)
        made.targets.write(rows.start, targets)

    chunks = [range(start, min(start + _CHUNK, len(split))) for start in range(0, len(split), _CHUNK)]
    pool = ThreadPoolExecutor(max_workers=_threads(split.sources))
    try:
        for done, _ in enumerate(pool.map(work, chunks), start=1):
            if told is not None:
                told(done / len(chunks))
    finally:
        pool.shutdown(cancel_futures=True)  # after a fault or Ctrl-C, the rest is not needed


def _threads(sources: Sequence[Any]) -> int:
    """Use one thread for thumbnails, whose decoding is mostly Python and so holds the GIL, else one per core.

    Measured on 2 cores with 2 threads instead of one: photographs 1.65 times faster, CIFAR's 1 kB JPEGs 1.4 times
    slower.
    """
    sizes = []
    for source in sources[:8]:
        if isinstance(source, np.ndarray):
            return 1
        try:
            sizes.append(len(read_source(source)))
        except UserError:
            continue
    return min(8, cores()) if sum(sizes) > len(sizes) * 16_384 else 1
