"""Tests which candidates lose less than the rule allows, all of them together on all images.

The hypothesis for each candidate is that it loses ``max_drop`` of its score or more. Its difference to the baseline has
the test (`optimize.statistics.PairedDifference.score`). Holm's procedure (`optimize.statistics.holm`) tests them
together. With a confidence of 0.95, the chance is at most 5 % that any candidate passes that really loses
``max_drop`` or more. This holds for any choice among those that pass, and for any dependence of their errors.

Another method gives each candidate a share of the error that falls with its place in the order of speed. It is valid
because that order is independent of the errors of accuracy. It proves more if the fastest candidate is accurate, and
less if it is not. Holm's equal shares lose little in the first case. There, float candidates pass first and leave their
shares to the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

from optimize.statistics import MOST_IMAGES, PairedDifference, holm

_NORMAL = NormalDist()


@dataclass(frozen=True)
class Tested:
    """The result of a candidate's test.

    Attributes:
        difference: the difference to the baseline.
        proven: whether it was shown to lose less than ``max_drop``.
        level: the one-sided level of its test.
        images: the number of images that would prove it, if all candidates gained and lost at the same rates on more
            images. None if no number would.
    """

    difference: PairedDifference
    proven: bool
    level: float
    images: int | None

    @property
    def low(self) -> float:
        """Return the lower bound of the difference at the test's level. It is above ``-max_drop`` exactly if proven."""
        return self.difference.at(1 - 2 * self.level).low


def prove(differences: Mapping[str, PairedDifference], max_drop: float, confidence: float) -> dict[str, Tested]:
    """Test all candidates together.

    Args:
        differences: the differences to the baseline on the same images, by candidate. The choice of candidates must not
            depend on their accuracy.
        max_drop: loss of the score, a fraction.
        confidence: the confidence for all together. The highest level of a single test is one side of a two-sided
            interval of this confidence. So that interval also excludes ``max_drop`` for a proven candidate.
    """
    names = list(differences)
    scores = {name: difference.score(max_drop) for name, difference in differences.items()}
    found = holm([_p_value(scores[name]) for name in names], 1 - confidence, most_of_one(confidence))
    enough = _images(differences, scores, confidence)
    return {
        name: Tested(differences[name], proven, level, enough[name])
        for name, (proven, level) in zip(names, found, strict=True)
    }


def first_level(candidates: int, confidence: float) -> float:
    """Return the level of the first test among this many candidates."""
    return min(most_of_one(confidence), (1 - confidence) / candidates)


def most_of_one(confidence: float) -> float:
    """Return the highest level of a single test: one side of the two-sided interval."""
    return (1 - confidence) / 2


def _p_value(score: float) -> float:
    return math.erfc(score / math.sqrt(2)) / 2


def _images(
    differences: Mapping[str, PairedDifference], scores: Mapping[str, float], confidence: float
) -> dict[str, int | None]:
    """Return for each candidate the fewest images that prove it at the present rates.

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
