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


def halves(ease: NDArray[np.generic]) -> Halves:
    """Split the images at random, the same way every time, with equally many easy images in both halves.

    Args:
        ease: ``(n,)``, how well the baseline answers each image; see `optimize.tasks.base.Task.ease`. Every level is
            split evenly.
    """
    shuffled = np.random.default_rng(_SEED).permutation(len(ease))
    ordered = shuffled[np.argsort(ease[shuffled], kind="stable")]
    return Halves(np.sort(ordered[0::2]), np.sort(ordered[1::2]))
