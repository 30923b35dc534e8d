"""``digits``: scikit-learn's 1,797 handwritten digits, which need no download."""

from __future__ import annotations

import hashlib

import numpy as np

from optimize.data.fingerprint import described
from optimize.data.formats.base import DataFormat, register
from optimize.data.records import ImageData, png
from optimize.data.splits import split_off


def _open(place: str, seed: int) -> ImageData:
    """8x8 greys of 0 to 16, in ten classes."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    pixels = np.rint(bunch.images * (255 / 16)).astype(np.uint8)
    sources = tuple(png(image) for image in pixels)
    keys = [hashlib.sha256(f"{seed}/{index}".encode()).digest() for index in range(len(sources))]
    splits = split_off(sources, bunch.target.tolist(), keys)
    return described("digits", tuple(str(digit) for digit in range(10)), splits, "shift")


DIGITS = register(DataFormat(name="digits", open=_open, summary="scikit-learn's 1,797 handwritten digits"))
