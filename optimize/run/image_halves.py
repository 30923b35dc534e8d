"""Two halves of the evaluation images: one chooses among the trials of a search, the other judges what was chosen.

The best of many on some images is flattered by them. The recommendation of a run does not split its images: it tests
all candidates together on all of them (`optimize.run.recommendation.non_inferiority`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

#: Whether each evaluation image is answered correctly, ``bool (n,)``, by pair's id.
Right = Mapping[str, NDArray[np.bool_]]

_SEED = 0


class Halves(NamedTuple):
    """Places of the images that choose and of those that judge, ``int64``, ascending; together all, none in both."""

    choose: NDArray[np.int64]
    judge: NDArray[np.int64]


def halves(right: NDArray[np.bool_]) -> Halves:
    """Split the images at random, the same way every time, with as many that are easy in both halves.

    Args:
        right: ``(n,)``, whether the baseline answers each image correctly; these and the others are split alike.
    """
    shuffled = np.random.default_rng(_SEED).permutation(len(right))
    ordered = shuffled[np.argsort(right[shuffled], kind="stable")]
    return Halves(np.sort(ordered[0::2]), np.sort(ordered[1::2]))
