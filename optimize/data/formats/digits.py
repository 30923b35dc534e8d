"""``digits``: scikit-learn's 1,797 handwritten digits, which need no download."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from optimize.data.formats.base import DataFormat, register

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from optimize.data.records import ImageData, Split
    from optimize.data.sources import Records
    from optimize.listener import Listener

#: The 8x8 digits are scaled to this side in pixels for a network that does not request another.
SIDE = 64

CLASSES = tuple(str(digit) for digit in range(10))


def _open(place: str, seed: int, listener: Listener) -> ImageData:
    """Open the digits: 8x8 grey values of 0 to 255, in ten classes."""
    from optimize.data.pixels import native_size
    from optimize.data.records import ImageData

    train, val = split_digits(seed)
    return ImageData("digits", "classification", CLASSES, train, val, "shift", native_size(train), preferred_side=SIDE)


def split_digits(seed: int) -> tuple[Split, Split]:
    """Return the digits as PNG files of 8x8 greys, to train and to measure with."""
    import torch

    from optimize.data.records import Split
    from optimize.data.splits import split_off
    from optimize.data.targets import Labels

    sources, labels = _encoded()
    keys = [hashlib.sha256(f"{seed}/{index}".encode()).digest() for index in range(len(sources))]
    return split_off(Split(sources, Labels(torch.from_numpy(labels))), keys)


@functools.cache
def _encoded() -> tuple[Records, NDArray[np.int64]]:
    """Return the digits as PNG files, and their labels. A process that opens them again has them."""
    import numpy as np

    from optimize.data.sources import Records, png

    images, labels = _digits()
    return Records.of(png(image) for image in np.rint(images * (255 / 16)).astype(np.uint8)), labels


def _digits() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return what ``sklearn.datasets.load_digits`` does: images ``(1797, 8, 8)`` and labels.

    They are read from the installed file, because importing scikit-learn takes a second in each run.
    """
    import numpy as np

    path = Path(str(metadata.distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")))
    if not path.is_file():  # installed in some other way
        from sklearn.datasets import load_digits

        bunch = load_digits()
        return bunch.images, bunch.target
    table = np.loadtxt(path, delimiter=",")
    return table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(np.int64)


def _open_for_retrieval(place: str, seed: int, listener: Listener) -> ImageData:
    """Open the digits to retrieve those that are alike."""
    return dataclasses.replace(_open(place, seed, listener), name="retrievaldigits", task="embeddings")


DIGITS = register(DataFormat(name="digits", open=_open, summary="scikit-learn's 1,797 handwritten digits"))

RETRIEVAL_DIGITS = register(
    DataFormat(
        name="retrievaldigits",
        open=_open_for_retrieval,
        summary="the same digits, to retrieve those of one class",
        default_of="embeddings",
    )
)
