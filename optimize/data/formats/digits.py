"""``digits``: scikit-learn's 1,797 handwritten digits, which need no download."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from optimize.data.formats.base import DataFormat, register

if TYPE_CHECKING:
    from optimize.data.records import ImageData
    from optimize.listener import Listener

#: Side in pixels that the 8x8 digits are scaled to for a network that does not ask for another.
SIDE = 64


def _open(place: str, seed: int, listener: Listener) -> ImageData:
    """8x8 greys of 0 to 16, in ten classes."""
    import numpy as np
    from sklearn.datasets import load_digits

    from optimize.data.pixels import native_size
    from optimize.data.records import ImageData
    from optimize.data.sources import Records, png
    from optimize.data.splits import split_off

    bunch = load_digits()
    sources = Records.of(png(image) for image in np.rint(bunch.images * (255 / 16)).astype(np.uint8))
    keys = [hashlib.sha256(f"{seed}/{index}".encode()).digest() for index in range(len(sources))]
    train, val = split_off(sources, bunch.target, keys)
    classes = tuple(str(digit) for digit in range(10))
    return ImageData("digits", classes, train, val, "shift", native_size(train), preferred_side=SIDE)


DIGITS = register(DataFormat(name="digits", open=_open, summary="scikit-learn's 1,797 handwritten digits"))
