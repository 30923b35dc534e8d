"""What identifies the images of a split: a hash that is the same wherever they lie, and follows every change.

Two kinds, and the kind says which:

- ``content``, of splits of at most `CONTENT_LIMIT` bytes and `CONTENT_IMAGES` images: the label and every byte of
  every image, in order. Names and places do not count.
- ``sample``, of larger ones: the label, the path below the data set's folder and the size in bytes of every image,
  in order, and every byte of `SAMPLE` images at equal distances. An image that is replaced by another one of the
  same size, and is not among those, goes unnoticed.

Neither holds times of change, which a copy does not keep. An image that cannot be read counts as such.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from optimize.data.sources import Files, Selected, Source
from serve.runtime.display import Described

#: Splits of at most this many bytes (1 GiB) are read whole.
CONTENT_LIMIT = 1 << 30

#: And of at most this many images: opening files takes its time, too.
CONTENT_IMAGES = 100_000

#: So many images of a larger one are read.
SAMPLE = 1024

#: Stands for the size of a file that cannot be looked at.
NO_SIZE = -1


@dataclass(frozen=True)
class Fingerprint(Described):
    """SHA-256 in hexadecimal, and what it covers: see the module."""

    digest: str
    kind: Literal["content", "sample"]

    def part(self, rows: npt.NDArray[np.integer[Any]]) -> Fingerprint:
        """That of the images at ``rows``, in that order, of what this is the fingerprint of."""
        chosen = rows.astype("<i8").tobytes()
        return Fingerprint(hashlib.sha256(f"{self.digest} part ".encode() + chosen).hexdigest(), self.kind)


def fingerprint(
    sources: Sequence[Source], labels: npt.NDArray[np.integer[Any]], sizes: npt.NDArray[np.int64] | None = None
) -> Fingerprint:
    """Fingerprint images and their labels, in their order.

    Args:
        sources: the images.
        labels: ``(N,)``, the class of each.
        sizes: ``int64 (N,)``, their sizes in bytes or `NO_SIZE`, where they are known; else they are looked up.
    """
    sizes = np.fromiter(map(_size, sources), np.int64, len(sources)) if sizes is None else sizes
    digest = hashlib.sha256(labels.astype("<i8").tobytes())
    if int(sizes.clip(0).sum()) <= CONTENT_LIMIT and len(sources) <= CONTENT_IMAGES:
        for source in sources:
            digest.update(_content(source))
        return Fingerprint(digest.hexdigest(), "content")
    digest.update(sizes.astype("<i8").tobytes())
    for place in _places(sources):
        digest.update(place + b"\0")
    for row in np.linspace(0, len(sources) - 1, min(SAMPLE, len(sources))).astype(np.int64).tolist():
        digest.update(_content(sources[row]))
    return Fingerprint(digest.hexdigest(), "sample")


def both(train: Fingerprint, val: Fingerprint) -> Fingerprint:
    """That of a data set: of its two splits."""
    digest = hashlib.sha256(f"{train.digest} {val.digest}".encode()).hexdigest()
    return Fingerprint(digest, "content" if train.kind == val.kind == "content" else "sample")


def _size(source: Source) -> int:
    if isinstance(source, Path):
        try:
            return source.stat().st_size
        except OSError:
            return NO_SIZE
    return len(source) if isinstance(source, bytes) else source.nbytes


def _content(source: Source) -> bytes:
    """SHA-256 of an image's bytes; of one that cannot be read, as many zeros."""
    if isinstance(source, Path):
        try:
            return hashlib.sha256(source.read_bytes()).digest()
        except OSError:
            return bytes(32)
    if isinstance(source, bytes):
        return hashlib.sha256(source).digest()
    return hashlib.sha256(repr(source.shape).encode() + source.tobytes()).digest()


def _places(sources: Sequence[Source]) -> Iterator[bytes]:
    """Each file's path below its data set's folder, if that is known."""
    whole, rows = (sources.whole, sources.rows) if isinstance(sources, Selected) else (sources, np.arange(len(sources)))
    return whole.below(rows) if isinstance(whole, Files) else iter(())
