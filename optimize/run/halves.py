"""Two halves of the evaluation images: one chooses among many, the other judges what was chosen.

The best of many on some images is flattered by them. Where each half is large enough to prove what the rule asks for,
the choice is made on one, and the accuracy that goes with it is that of the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optimize.measure.figures import Accuracy, Difference
from optimize.measure.rows import Judgement
from optimize.measure.statistics import PairedDifference, images_needed, paired_difference, paired_interval

#: Whether each evaluation image is answered correctly, ``bool (n,)``, by pair's id.
Right = Mapping[str, NDArray[np.bool_]]

#: Share of the images that even a good integer network gains, and loses, for which half of them must be enough.
CHANGES_SIDES: Final = 0.01

_SEED = 0


class Halves(NamedTuple):
    """Places of the images that choose and of those that judge, ``int64``, ascending; together all, none in both."""

    choose: NDArray[np.int64]
    judge: NDArray[np.int64]


def images_to_split(max_drop: float, confidence: float) -> int | None:
    """From how many images on they are split; None if no number would do.

    Each half alone must be able to exclude a loss of ``max_drop`` even if one image in fifty changes sides, half of
    these to the better: else the split would cost artifacts their proof.
    """
    needed = images_needed(max_drop, confidence, gained=CHANGES_SIDES, lost=CHANGES_SIDES)
    return None if needed is None else 2 * needed


def halves(right: NDArray[np.bool_]) -> Halves:
    """Split the images at random, the same way every time, with as many that are easy in both halves.

    Args:
        right: ``(n,)``, whether the baseline answers each image correctly; these and the others are split alike.
    """
    shuffled = np.random.default_rng(_SEED).permutation(len(right))
    ordered = shuffled[np.argsort(right[shuffled], kind="stable")]
    return Halves(np.sort(ordered[0::2]), np.sort(ordered[1::2]))


@dataclass(frozen=True)
class Judge:
    """By which images is chosen, and what the others say of what was chosen.

    Attributes:
        baseline: the pair that all are compared with.
        right: what each pair answers correctly; empty where the images were not split.
        halves: of the images; None where all of them choose.
        confidence: of the intervals that choose.
    """

    baseline: str
    right: Right
    halves: Halves | None
    confidence: float

    @classmethod
    def of(cls, baseline: str, images: int, right: Right | None, max_drop: float, confidence: float) -> Judge:
        """Split the images if there are enough, and if it is known which of them each pair answers correctly."""
        enough = images_to_split(max_drop, confidence)
        if right is None or enough is None or images < enough:
            return cls(baseline, {}, None, confidence)
        return cls(baseline, right, halves(right[baseline]), confidence)

    def chooses(self, pair: str, accuracy: Accuracy) -> PairedDifference:
        """The pair's difference to the baseline on the images that choose; ``accuracy`` is that on all."""
        gained, lost, images = 0, 0, accuracy.images
        if self.halves is not None:
            found = self._difference(pair, self.halves.choose)
            gained, lost, images = found.gained, found.lost, found.n
        elif accuracy.difference is not None:
            gained, lost = accuracy.difference.gained, accuracy.difference.lost
        return paired_interval(gained, lost, images, self.confidence)

    def judges(self, pair: str) -> Judgement | None:
        """The chosen pair on the images that did not choose; None if all did."""
        if self.halves is None:
            return None
        found = self._difference(pair, self.halves.judge)
        return Judgement(
            images=found.n,
            top1=float(self.right[pair][self.halves.judge].mean()),
            difference=None if pair == self.baseline else Difference.of(found),
        )

    def _difference(self, pair: str, images: NDArray[np.int64]) -> PairedDifference:
        return paired_difference(self.right[self.baseline][images], self.right[pair][images])
