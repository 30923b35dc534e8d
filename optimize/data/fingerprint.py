"""What identifies a data set (a hash over every image, label and split), and what can be read off its images."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from optimize.data.records import Augmentation, ImageData, Split, read_source
from serve.runtime import images
from serve.runtime.errors import ImageError, UserError

#: Above this many bytes, files are fingerprinted by size and time of change instead of content.
STAT_FINGERPRINT_ABOVE = 1 << 30


def described(
    name: str, classes: tuple[str, ...], splits: tuple[Split, Split], augment: Augmentation, root: Path | None = None
) -> ImageData:
    """Complete a data set with what can be read off its images."""
    train, val = splits
    data = ImageData(name, classes, train, val, "", "content", augment, _native_size(train))
    digest, kind = _fingerprint(data, root)
    return replace(data, fingerprint=digest, fingerprint_kind=kind)


def _native_size(split: Split) -> tuple[int, int] | None:
    """``(height, width)`` that 16 images, spread over the split, all have; None if they differ."""
    sizes = set()
    for index in torch.linspace(0, len(split) - 1, min(16, len(split))).long().tolist():
        source = split.sources[index]
        try:
            height, width = images.decode(read_source(source)).shape[-2:]
        except (ImageError, MemoryError) as error:
            where = "an image in memory" if isinstance(source, bytes) else source
            raise UserError(f"{where}: {error}") from None
        sizes.add((height, width))
    return sizes.pop() if len(sizes) == 1 else None


def _fingerprint(data: ImageData, root: Path | None) -> tuple[str, Literal["content", "stat"]]:
    splits = (("train", data.train), ("val", data.val))
    try:
        stats = {source: source.stat() for _, split in splits for source in split.sources if isinstance(source, Path)}
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read ({error.strerror})") from None
    by_stat = sum(stat.st_size for stat in stats.values()) > STAT_FINGERPRINT_ABOVE
    digest = hashlib.sha256(repr(data.classes).encode("utf-8", "surrogateescape"))
    above = f"{root}{os.sep}"
    for title, split in splits:
        for source, label in zip(split.sources, split.labels.tolist(), strict=True):
            if isinstance(source, Path) and by_stat:
                content = f"{stats[source].st_size} {stats[source].st_mtime_ns}"
            else:
                content = hashlib.sha256(read_source(source)).hexdigest()
            # Cut as text: Path.relative_to takes longer than reading a small file.
            place = str(source).removeprefix(above) if isinstance(source, Path) else ""
            digest.update(f"{title}\0{place}\0{label}\0{content}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest(), "stat" if by_stat else "content"
