"""The honest pictures that the hostile ones are made from."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image


def picture(seed: int = 0, size: tuple[int, int] = (60, 45)) -> Image.Image:
    """A smooth coloured picture, different for each seed; its four corners differ."""
    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    """An image as a file of a format, with the options of Pillow's writer of it."""
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()
