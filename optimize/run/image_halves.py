"""Splits the evaluation images into two halves: one chooses among a search's trials, the other judges the choice.

The best of many trials looks better on the images that chose it. The recommendation of a run does not split its images:
it tests all candidates together on all of them (`optimize.run.recommendation.non_inferiority`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_SEED = 0


class Halves(NamedTuple):
    """The indices of the images that choose and of those that judge, ``int64``, ascending."""

    choose: NDArray[np.int64]
    judge: NDArray[np.int64]


def halves(ease: NDArray[np.generic], groups: NDArray[np.int64] | None = None) -> Halves:
    """Split the images at random, the same way every time, with equally many easy images in both halves.

    Images of one group, such as frames of a video, stay together. Otherwise both halves would have nearly the same
    images.

    Args:
        ease: ``(n,)``, how well the baseline answers each image; see `optimize.tasks.base.Task.ease`. Every level is
            split evenly.
        groups: ``(n,)``: images with equal numbers are a group. None: each is its own.
    """
    names, group = np.unique(np.arange(len(ease)) if groups is None else groups, return_inverse=True)
    means = np.bincount(group, ease) / np.bincount(group)
    shuffled = np.random.default_rng(_SEED).permutation(len(names))
    ordered = shuffled[np.argsort(means[shuffled], kind="stable")]
    first = np.isin(group, ordered[0::2])
    return Halves(np.flatnonzero(first), np.flatnonzero(~first))
