"""Batches of served pixels: a data set's images, through the runtime's own preprocessing, in ``uint8``.

Training, calibration and measurement all read from here, so that each sees what the endpoint will see.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader, Dataset

from optimize.data.records import Split, read_source
from optimize.data.splits import subset
from serve.runtime import images
from serve.runtime.card import Preprocessing
from serve.runtime.errors import ImageError, UserError

#: A split whose fitted images need at most this many bytes is decoded once and kept in memory.
MEMORY_LIMIT = 1 << 30


_Batch = tuple[torch.Tensor, torch.Tensor]


# Both live as long as their split: a command opens its data once, and its passes share the pixels.
_decoded: WeakKeyDictionary[Split, dict[Preprocessing, torch.Tensor]] = WeakKeyDictionary()


def loader(
    split: Split,
    preprocessing: Preprocessing,
    *,
    batch_size: int,
    device: torch.device,
    shuffle: bool = False,
    seed: int = 0,
    limit: int | None = None,
) -> Loader:
    """Batches of ``split``: ``uint8`` ``(N, C, H, W)`` images and ``int64`` ``(N,)`` labels, in host memory.

    Args:
        split: what to read.
        preprocessing: how bytes become pixels; normalising is left to ``images.normalise`` on the device.
        batch_size: images per batch; the last batch has what is left.
        device: where the batches will be used: for CUDA they lie in pinned memory.
        shuffle: another order in each epoch, and no last batch of a single image, on which BatchNorm
            in training cannot work.
        seed: of the order, and of the subset.
        limit: read only so many images, drawn at random and stratified.

    Raises:
        UserError: ``batch_size`` or ``limit`` is not positive; while iterating, an image cannot be decoded.
    """
    if batch_size < 1:
        raise UserError(f"the batch size must be at least 1, got {batch_size}")
    chosen = split if limit is None else subset(split, limit, seed)
    return Loader(chosen, preprocessing, batch_size, device, shuffle, seed)


@dataclass(eq=False)
class Loader:
    """Reads a split in batches, as often as wanted; made by `loader`.

    A small split is decoded at first use by threads and kept; batches are then slices of one tensor.
    A large one is decoded anew each epoch by worker processes that stay alive between epochs.
    """

    split: Split
    preprocessing: Preprocessing
    batch_size: int
    device: torch.device
    shuffle: bool = False
    seed: int = 0
    _streaming: tuple[DataLoader[Any], _Batches] | None = None

    def __len__(self) -> int:
        """Number of batches."""
        return len(self._indices(0))

    def __iter__(self) -> Iterator[_Batch]:
        """The batches of epoch 0."""
        return self.epoch(0)

    def epoch(self, number: int) -> Iterator[_Batch]:
        """The batches of one epoch; its order depends on the seed and on ``number`` alone."""
        indices = self._indices(number)
        if fits_in_memory(self.split, self.preprocessing):
            return self._from_memory(indices)
        return self._from_workers(indices)

    def _indices(self, number: int) -> list[torch.Tensor]:
        count = len(self.split)
        if not self.shuffle:
            return list(torch.split(torch.arange(count), self.batch_size)) if count else []
        # A plain sum would give seed 1 the order of seed 0, one epoch later.
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + number) % (1 << 63))
        batches = list(torch.split(torch.randperm(count, generator=generator), self.batch_size)) if count else []
        return batches[:-1] if len(batches) > 1 and len(batches[-1]) == 1 else batches

    def _from_memory(self, indices: list[torch.Tensor]) -> Iterator[_Batch]:
        pixels = decoded(self.split, self.preprocessing)
        for chosen in indices:
            if self.shuffle:
                batch, labels = pixels.index_select(0, chosen), self.split.labels.index_select(0, chosen)
            else:
                window = slice(int(chosen[0]), int(chosen[-1]) + 1)
                batch, labels = pixels[window], self.split.labels[window]
            if self.device.type == "cuda":
                batch, labels = batch.pin_memory(), labels.pin_memory()
            yield batch, labels

    def _from_workers(self, indices: list[torch.Tensor]) -> Iterator[_Batch]:
        if self._streaming is None:
            batches = _Batches([])
            # On the CPU the network itself needs the cores.
            workers = min(8, _cores()) if self.device.type == "cuda" else max(1, _cores() // 2)
            stream: DataLoader[Any] = DataLoader(
                _Encoded(self.split, self.preprocessing),
                batch_sampler=batches,
                num_workers=workers,
                collate_fn=_collate,
                pin_memory=self.device.type == "cuda",
                persistent_workers=True,
                prefetch_factor=2,
            )
            self._streaming = (stream, batches)
        stream, batches = self._streaming
        # The sampler stays in this process, so that it can change under workers that stay alive.
        batches.indices = indices
        for item in stream:
            if isinstance(item, str):
                raise UserError(item)
            yield item


class _Batches:
    """A batch sampler whose batches are set from outside."""

    def __init__(self, indices: list[torch.Tensor]) -> None:
        self.indices = indices

    def __iter__(self) -> Iterator[list[int]]:
        return (chosen.tolist() for chosen in self.indices)

    def __len__(self) -> int:
        return len(self.indices)


class _Encoded(Dataset[Any]):
    """Decodes in a worker. A fault is returned as text: raised there, it would arrive wrapped in a traceback."""

    def __init__(self, split: Split, preprocessing: Preprocessing) -> None:
        self.split = split
        self.preprocessing = preprocessing

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor] | str:
        try:
            return _load(self.split.sources[index], self.preprocessing), self.split.labels[index]
        except UserError as error:
            return str(error)


def _collate(items: Sequence[tuple[torch.Tensor, torch.Tensor] | str]) -> _Batch | str:
    good = []
    for item in items:
        if isinstance(item, str):
            return item
        good.append(item)
    return torch.stack([image for image, _ in good]), torch.stack([label for _, label in good])


def fits_in_memory(split: Split, preprocessing: Preprocessing) -> bool:
    """Whether the split's fitted images need at most `MEMORY_LIMIT` bytes."""
    channels, height, width = preprocessing.shape
    return len(split) * channels * height * width <= MEMORY_LIMIT


def decoded(split: Split, preprocessing: Preprocessing) -> torch.Tensor:
    """All of a split as ``uint8`` ``(N, C, H, W)``, decoded once and kept as long as ``split`` lives.

    Raises:
        UserError: a file cannot be read or is not a usable image; it is named.
    """
    kept = _decoded.setdefault(split, {})
    if preprocessing not in kept:
        # A caller who measures is in inference mode, whose tensors could not be trained on later; and the
        # mode is a thread's own (torch 2.14), so that the pool's threads may not even write to them.
        with torch.inference_mode(False):
            pixels = torch.empty((len(split), *preprocessing.shape), dtype=torch.uint8)

        def work(indices: range) -> None:
            for index in indices:
                pixels[index] = _load(split.sources[index], preprocessing)

        chunks = [range(start, min(start + 64, len(split))) for start in range(0, len(split), 64)]
        pool = ThreadPoolExecutor(max_workers=_decoding_threads(split))
        try:
            for _ in pool.map(work, chunks):
                pass
        finally:
            pool.shutdown(cancel_futures=True)  # after a fault or Ctrl-C, the rest is not wanted
        kept[preprocessing] = pixels
    return kept[preprocessing]


def _load(source: Path | bytes, preprocessing: Preprocessing) -> torch.Tensor:
    try:
        return images.load(read_source(source), preprocessing)
    except (ImageError, MemoryError) as error:
        where = "an image in memory" if isinstance(source, bytes) else source
        raise UserError(f"{where}: {error}") from None


def _decoding_threads(split: Split) -> int:
    """One thread for thumbnails, whose decoding is mostly Python and so holds the GIL; else one a core.

    Measured on 2 cores with 2 threads instead of one: photographs 1.65 times faster, CIFAR's 1 kB JPEGs
    1.4 times slower.
    """
    sample = [read_source(source) for source in split.sources[:8]]
    return min(8, _cores()) if sum(map(len, sample)) > len(sample) * 16_384 else 1


def _cores() -> int:
    """Cores that this process may use, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
