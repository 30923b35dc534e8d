"""Makes images to send without photographs: smooth shapes and noise of every scale, encoded as JPEG."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

from serve.runtime.errors import UserError

#: Endings of the image files in a folder.
ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp")


def make_picture(seed: int, size: tuple[int, int], quality: int = 90) -> bytes:
    """Return a JPEG of ``size`` (width, height): a sum of noise over octaves, as in photographs (about 1/f).

    It has some 0.25 bytes a pixel.
    """
    generator = np.random.default_rng(seed)
    width, height = size
    canvas = np.full((height, width, 3), 128, dtype=np.float32)
    cells = 2
    while cells < max(size):
        rows, columns = max(2, cells * height // max(size)), max(2, cells * width // max(size))
        field = generator.integers(0, 256, (rows, columns, 3), dtype=np.uint8)
        scaled = np.asarray(Image.fromarray(field).resize(size, Image.Resampling.BICUBIC), dtype=np.float32)
        canvas += (scaled - 128) * cells**-0.35
        cells *= 2
    stream = io.BytesIO()
    Image.fromarray(np.clip(canvas, 0, 255).astype(np.uint8)).save(stream, "JPEG", quality=quality)
    return stream.getvalue()


def make_pictures(
    count: int, sizes: tuple[tuple[int, int], ...] = ((500, 375), (375, 500), (640, 480), (320, 240))
) -> list[tuple[str, bytes]]:
    """Return images by name, with these sizes in turns."""
    return [(f"made-{seed}", make_picture(seed, sizes[seed % len(sizes)])) for seed in range(count)]


def read_pictures(folder: Path) -> list[tuple[str, bytes]]:
    """Return the images of a folder, by file name.

    Raises:
        UserError: there are none.
    """
    found = sorted(path for path in folder.glob("*") if path.suffix.lower() in ENDINGS)
    if not found:
        raise UserError(f"{folder}: contains no images ({', '.join(ENDINGS)})")
    return [(path.name, path.read_bytes()) for path in found]
