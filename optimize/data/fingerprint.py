"""Fingerprints of a split's images: a hash that does not depend on their folder and follows changes.

There are two kinds:

- ``content``, for splits of at most `CONTENT_LIMIT` bytes and `CONTENT_IMAGES` images. It covers the label and every
  byte of every image, in order. Names and places do not count.
- ``sample``, for larger ones. It covers the label, the path below the data set's folder and the size in bytes of every
  image, in order. It also covers every byte of `SAMPLE` images at equal distances. If another image is replaced by one
  of the same size, it does not notice.

Neither covers times of change, which a copy does not keep. An unreadable image counts as unreadable.
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

#: Splits of at most this many bytes (1 GiB) are read completely.
CONTENT_LIMIT = 1 << 30

#: They must also have at most this many images, because opening files takes time too.
CONTENT_IMAGES = 100_000

#: The number of images that are read from a larger split.
SAMPLE = 1024

#: The size of a file that cannot be read.
NO_SIZE = -1


@dataclass(frozen=True)
class Fingerprint(Described):
    """SHA-256 in hexadecimal, and the kind, which says what it covers: see the module."""

    digest: str
    kind: Literal["content", "sample"]

    def grouped(self, groups: npt.NDArray[np.int64]) -> Fingerprint:
        """Return the fingerprint of the same images in groups, ``int64 (N,)``."""
        return Fingerprint(_joined(self.digest, "groups", groups), self.kind)

    def part(self, rows: npt.NDArray[np.integer[Any]]) -> Fingerprint:
        """Return the fingerprint of the images at ``rows``, in that order, derived from this one."""
        return Fingerprint(_joined(self.digest, "part", rows), self.kind)


def fingerprint(
    sources: Sequence[Source], labels: npt.NDArray[np.integer[Any]], sizes: npt.NDArray[np.int64] | None = None
) -> Fingerprint:
    """Fingerprint images and their labels, in their order.

    Args:
        sources: the images.
        labels: ``(N,)``, the class of each.
        sizes: ``int64 (N,)``, their sizes in bytes or `NO_SIZE`, if known. By default they are looked up.
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
    """Return the fingerprint of a data set from those of its two splits."""
    digest = hashlib.sha256(f"{train.digest} {val.digest}".encode()).hexdigest()
    return Fingerprint(digest, "content" if train.kind == val.kind == "content" else "sample")


def _joined(digest: str, word: str, rows: npt.NDArray[np.integer[Any]]) -> str:
    return hashlib.sha256(f"{digest} {word} ".encode() + rows.astype("<i8").tobytes()).hexdigest()


def _size(source: Source) -> int:
    if isinstance(source, Path):
        try:
            return source.stat().st_size
        except OSError:
            return NO_SIZE
    return len(source) if isinstance(source, bytes) else source.nbytes


def _content(source: Source) -> bytes:
    """Return the SHA-256 of an image's bytes. For an unreadable image it is all zeros."""
    if isinstance(source, Path):
        try:
            return hashlib.sha256(source.read_bytes()).digest()
        except OSError:
            return bytes(32)
    if isinstance(source, bytes):
        return hashlib.sha256(source).digest()
    return hashlib.sha256(repr(source.shape).encode() + source.tobytes()).digest()


def _places(sources: Sequence[Source]) -> Iterator[bytes]:
    """Yield each file's path below its data set's folder, if that folder is known."""
    whole, rows = (sources.whole, sources.rows) if isinstance(sources, Selected) else (sources, np.arange(len(sources)))
    return whole.below(rows) if isinstance(whole, Files) else iter(())
