"""Which candidates are shown to lose less than the rule allows: tests of all of them together, on all images.

Each candidate has the hypothesis that it loses ``max_drop`` of top-1 or more. Its test is Tango's score test for paired
proportions (`optimize.measure.statistics.loss_score`). Holm's procedure (`optimize.measure.statistics.holm`) tests them
together: with a confidence of 0.95, the chance that any candidate passes which really loses ``max_drop`` or more is at
most 5 %, whatever candidates are chosen of those that pass, and however alike their errors are.

Why Holm, and not a share of the error that falls with the place in the order of speed: that order is independent of
the errors of accuracy, so that shares by place are valid too. They prove more where the fastest candidate is accurate,
and less where it is not. Equal shares lose little of the first, because float candidates pass first and leave their
shares to the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

from optimize.measure.statistics import MOST_IMAGES, PairedDifference, holm, loss_score, paired_interval

_NORMAL = NormalDist()


@dataclass(frozen=True)
class Tested:
    """What the tests say of a candidate.

    Attributes:
        difference: to the baseline.
        proven: whether it is shown to lose less than ``max_drop``.
        level: of its test, one-sided.
        images: from how many images on it would be proven, if all candidates gain and lose at the same rates on them;
            None where no number would do.
    """

    difference: PairedDifference
    proven: bool
    level: float
    images: int | None

    @property
    def low(self) -> float:
        """Lower bound of the difference at the test's level; above ``-max_drop`` exactly if it is proven."""
        found = self.difference
        return paired_interval(found.gained, found.lost, found.n, 1 - 2 * self.level).low


def prove(differences: Mapping[str, PairedDifference], max_drop: float, confidence: float) -> dict[str, Tested]:
    """Test all candidates together.

    Args:
        differences: to the baseline on the same images, by candidate. Which candidates there are must not depend on
            their accuracy.
        max_drop: loss of top-1, a fraction.
        confidence: of the whole. No single test has a higher level than one side of a two-sided interval of this
            confidence, so that also that interval excludes ``max_drop`` where a candidate is proven.
    """
    names = list(differences)
    scores = {name: loss_score(d.gained, d.lost, d.n, max_drop) for name, d in differences.items()}
    found = holm([_p_value(scores[name]) for name in names], 1 - confidence, most_of_one(confidence))
    enough = _images(differences, scores, confidence)
    return {
        name: Tested(differences[name], proven, level, enough[name])
        for name, (proven, level) in zip(names, found, strict=True)
    }


def first_level(candidates: int, confidence: float) -> float:
    """The level at which the surest of so many candidates is tested."""
    return min(most_of_one(confidence), (1 - confidence) / candidates)


def most_of_one(confidence: float) -> float:
    """The highest level of a single test: one side of the two-sided interval."""
    return (1 - confidence) / 2


def _p_value(score: float) -> float:
    return math.erfc(score / math.sqrt(2)) / 2


def _images(
    differences: Mapping[str, PairedDifference], scores: Mapping[str, float], confidence: float
) -> dict[str, int | None]:
    """For each candidate the fewest images that prove it, all rates being as they are.

    Scores grow with the square root of the number of images, so that their order stays. A candidate is proven as soon
    as it and all before it are above their quantiles.
    """
    found: dict[str, int | None] = {}
    factor = 0.0
    for done, name in enumerate(sorted(scores, key=lambda name: -scores[name])):
        level = min(most_of_one(confidence), (1 - confidence) / (len(scores) - done))
        factor = max(factor, (-_NORMAL.inv_cdf(level) / scores[name]) ** 2) if scores[name] > 0 else math.inf
        images = factor * differences[name].n
        found[name] = math.floor(images) + 1 if images < MOST_IMAGES else None
    return found
