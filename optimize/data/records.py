"""What a data set is: encoded images (a file or its bytes), labels, two splits, and what is known of them."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image

from serve.runtime.errors import UserError

Augmentation = Literal["none", "shift", "shift+flip"]


@dataclass(frozen=True, eq=False)
class Split:
    """Encoded images and their labels. Compared by identity, so that it can key a cache.

    Attributes:
        sources: a file or its bytes for each image.
        labels: int64 of shape ``(N,)``, indices of classes.
    """

    sources: tuple[Path | bytes, ...]
    labels: torch.Tensor

    def __post_init__(self) -> None:
        if self.labels.shape != (len(self.sources),) or self.labels.dtype != torch.int64:
            raise ValueError(
                f"labels must be int64 of shape ({len(self.sources)},), "
                f"got {self.labels.dtype} of {tuple(self.labels.shape)}"
            )

    def __len__(self) -> int:
        return len(self.sources)


@dataclass(frozen=True, eq=False)
class ImageData:
    """A classification data set.

    Attributes:
        name: short name, for reports.
        classes: label of each class index.
        train: images to train and calibrate with.
        val: images to measure with, none of them in ``train``.
        fingerprint: SHA-256 over every image, its label and its split.
        fingerprint_kind: ``content`` if files' bytes were hashed, ``stat`` if only their sizes and times.
        augment: which random changes keep an image's label true.
        native_size: ``(height, width)`` in pixels if all of a sample of the images share it.
    """

    name: str
    classes: tuple[str, ...]
    train: Split
    val: Split
    fingerprint: str
    fingerprint_kind: Literal["content", "stat"]
    augment: Augmentation
    native_size: tuple[int, int] | None


def read_source(source: Path | bytes) -> bytes:
    """An image's encoded bytes.

    Raises:
        UserError: its file cannot be read.
    """
    if isinstance(source, bytes):
        return source
    try:
        return source.read_bytes()
    except OSError as error:
        raise UserError(f"{source}: cannot be read ({error.strerror})") from None


def png(pixels: np.ndarray[Any, Any]) -> bytes:
    """``uint8 (H, W)`` or ``(H, W, 3)`` as an encoded image: what a `Split` holds of images that lie in memory."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()
