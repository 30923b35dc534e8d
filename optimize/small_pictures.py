"""Writes pictures for a report's page as files of a bounded size: photographs, and maps of few colours."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image

#: The most pixels of a picture's longer side, and the most bytes of its file. A page has a few dozen pictures.
SIDE: Final = 320
BYTES: Final = 24_000

#: The qualities of JPEG that are tried. The last one is taken as it is: 320 pixels of noise have 13 kB then.
_QUALITIES: Final = (85, 60, 30)


def photograph(image: NDArray[np.uint8]) -> bytes:
    """Return an image ``(C, H, W)`` as a JPEG, in colours if it has three channels, else its first one in grey."""
    pixels = image.transpose(1, 2, 0) if len(image) == 3 else image[0]
    shown = Image.fromarray(np.ascontiguousarray(pixels))
    shown.thumbnail((SIDE, SIDE))
    for quality in _QUALITIES:
        stream = io.BytesIO()
        shown.save(stream, "JPEG", quality=quality)
        if stream.tell() <= BYTES:
            break
    return stream.getvalue()


def coloured(values: NDArray[np.uint8], palette: Sequence[int], *, above: int | None = None) -> bytes:
    """Return a map ``(H, W)`` as a PNG with a palette.

    Args:
        values: the number of a colour for each pixel.
        palette: red, green and blue of each colour in turns.
        above: the number of a colour that is transparent. Larger numbers are findings on it, and the largest of them in
            a place is kept if the map is scaled down. None: the number in the middle of the place is kept.
    """
    step = -(-max(values.shape) // SIDE)
    while True:
        middle = values[step // 2 :: step, step // 2 :: step]
        shown = Image.fromarray(np.ascontiguousarray(middle) if above is None else _largest(values, step))
        shown.putpalette(list(palette))
        stream = io.BytesIO()
        shown.save(stream, "PNG", optimize=True, **({} if above is None else {"transparency": above}))
        if stream.tell() <= BYTES:
            return stream.getvalue()
        step += 1


def _largest(values: NDArray[np.uint8], step: int) -> NDArray[np.uint8]:
    """Return the largest value of each square of ``step`` pixels."""
    height, width = (-(-size // step) for size in values.shape)
    rows, columns = height * step - values.shape[0], width * step - values.shape[1]
    squares = np.pad(values, ((0, rows), (0, columns))).reshape(height, step, width, step)
    found: NDArray[np.uint8] = squares.max((1, 3))
    return found
