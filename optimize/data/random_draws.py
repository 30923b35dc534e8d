"""Random numbers as functions of (seed, epoch, image): the same in any batch and process.

A generator would have to be passed from image to image. A run that resumes in the middle of an epoch, or shares it with
other processes, would draw other numbers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

_Words = npt.NDArray[np.uint64]


class Draws:
    """The random numbers of some images in one epoch.

    Args:
        seed: the run's seed.
        epoch: its number, from 0.
        rows: the images' rows of the split, ``int64 (N,)``.
    """

    def __init__(self, seed: int, epoch: int, rows: torch.Tensor) -> None:
        key = _mixed(_mixed(np.array([seed], np.int64).view(np.uint64)) ^ np.array([epoch], np.uint64))
        self._words = _mixed(key ^ rows.numpy().astype(np.uint64))

    def words(self, what: int) -> _Words:
        """Return 64 random bits for each image, ``uint64 (N,)``. Each ``what`` is an independent draw."""
        return _mixed(self._words ^ np.array([what], np.uint64))

    def uniform(self, what: int) -> npt.NDArray[np.float64]:
        """Return a number in [0, 1) for each image, ``float64 (N,)``."""
        return (self.words(what) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def below(self, bound: int, what: int) -> list[int]:
        """Return a whole number in [0, ``bound``) for each image."""
        numbers: list[int] = (self.uniform(what) * bound).astype(np.int64).tolist()
        return numbers


def _mixed(words: _Words) -> _Words:
    """Apply SplitMix64 (Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators")."""
    words = words + np.array([0x9E3779B97F4A7C15], np.uint64)
    words = (words ^ (words >> np.uint64(30))) * np.array([0xBF58476D1CE4E5B9], np.uint64)
    words = (words ^ (words >> np.uint64(27))) * np.array([0x94D049BB133111EB], np.uint64)
    return words ^ (words >> np.uint64(31))
