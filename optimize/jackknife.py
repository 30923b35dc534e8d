"""The jackknife: how far a score from groups of images may be from its true value, by leaving out each group.

It suits scores that are no mean over images. Images that belong together, such as the frames of a video, are left out
together, because each says little that the others do not.

A group's *influence* is how much a score, or the difference of two, changes without the group.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from optimize.statistics import PairedDifference, images_needed, smallest_loss


@dataclass(frozen=True)
class Spread:
    """How far an estimate from groups of images may be from its true value.

    Attributes:
        error: the jackknife's standard error. Infinite for a single group.
        freedom: degrees of freedom of that error.
        groups: the number of groups.
        parts: the mean number of parts that the answer to a group has, from 1: classes that it shows, or labels.
    """

    error: float
    freedom: float
    groups: int
    parts: float

    def reach(self, z: float) -> float:
        """Return the half width of the interval whose ends are ``z`` normal standard deviations away.

        It is Student's, but at least `unseen`.
        """
        return max(self.error * student_quantile(z, self.freedom) if self.error else 0.0, self.unseen(z))

    def unseen(self, z: float) -> float:
        """Return the share of the score that may be lost although no group shows any loss.

        ``z²/(n+z²)`` is the upper end of Wilson's interval for none of n groups (1927; it is near the rule of three,
        3/n). So many groups may be answered otherwise. One that is answered otherwise loses one of its parts. With one
        part in each group this is exactly Tango's interval of a difference without changes.
        """
        return z * z / (self.groups + z * z) / self.parts

    def deviations(self, distance: float) -> float:
        """Return how many normal standard deviations a distance from the estimate is: the inverse of `reach`."""
        share = min(1.0, abs(distance) * self.parts)
        by_unseen = math.sqrt(self.groups * share / (1 - share)) if share < 1 else math.inf
        by_error = student_score(abs(distance) / self.error, self.freedom) if self.error else math.inf
        return math.copysign(min(by_unseen, by_error), distance) if distance else 0.0


@dataclass(frozen=True)
class JackknifeDifference(PairedDifference):
    """The difference of a score of two networks on the same images, from leaving out each group.

    ``gained`` and ``lost`` count the images that are answered better and worse. ``most`` is the largest difference that
    there can be.
    """

    spread: Spread
    most: float = 1.0

    def at(self, confidence: float) -> JackknifeDifference:
        """See `PairedDifference`."""
        reach = self.spread.reach(normal_quantile(confidence))
        low, high = max(-self.most, self.delta - reach), min(self.most, self.delta + reach)
        return dataclasses.replace(self, low=low, high=high)

    def among(self, shown: NDArray[np.bool_], groups: NDArray[np.int64] | None) -> JackknifeDifference:
        """Return the difference with `Spread.unseen` of those images or groups alone that can lose something.

        Args:
            shown: ``(N,)``, whether each image can. At least one must.
            groups: the images' groups.
        """
        count = int(shown.sum()) if groups is None else len(np.unique(groups[shown]))
        return dataclasses.replace(self, spread=dataclasses.replace(self.spread, groups=count)).at(0.95)

    def score(self, loss: float) -> float:
        """See `PairedDifference`."""
        return self.spread.deviations(self.delta + loss)

    def smallest_loss(self, confidence: float) -> float:
        """See `Spread.unseen`."""
        return smallest_loss(self.spread.groups, confidence) / self.spread.parts

    def images_needed(self, loss: float, confidence: float) -> int | None:
        """See `PairedDifference`. Groups have as many images and parts as these."""
        groups = images_needed(min(1.0, loss * self.spread.parts), confidence)
        return None if groups is None else math.ceil(groups * self.n / self.spread.groups)


def influence_of_groups(influence: NDArray[np.float64], groups: NDArray[np.int64] | None) -> NDArray[np.float64]:
    """Return the influences of groups ``(G,)``: the sums of those of their images ``(N,)``, as if these were small."""
    if groups is None:
        return influence
    names, places = np.unique(groups, return_inverse=True)
    return np.bincount(places, influence, len(names)).astype(np.float64)


def spread_of(influence: NDArray[np.float64], parts: float = 1.0) -> Spread:
    """Return the spread of an estimate from the influence of each group, ``(G,)``.

    The standard error is the jackknife's. To the first order it is that of the linear approximation of the estimate.
    Where that does not hold, because a class is in few groups, it is too large rather than too small (Efron and Stein,
    "The jackknife estimate of variance", Annals of Statistics 9 (1981), 586-596). The degrees of freedom follow from
    the kurtosis of the influences, as Satterthwaite's do (Biometrics Bulletin 2 (1946), 110-114), because a few groups
    often have most of the variance.
    """
    groups, parts = len(influence), max(1.0, parts)
    squares = (influence - influence.mean()) ** 2
    total = float(squares.sum())
    if groups == 1:
        return Spread(math.inf, 1.0, groups, parts)
    # The variance of a variance is that of a normal one times (kurtosis - 1) / 2.
    kurtosis = groups * float(np.sum((squares / total) ** 2)) if total else 0.0
    freedom = min(groups - 1.0, max(1.0, 2 * groups / (kurtosis - 1))) if kurtosis > 1 else groups - 1.0
    return Spread(math.sqrt((groups - 1) / groups * total), freedom, groups, parts)


def jackknife_interval(
    score: float, spread: Spread, confidence: float = 0.95, *, least: float = 0.0
) -> tuple[float, float]:
    """Return the interval of a score from ``least`` to 1."""
    reach = spread.reach(normal_quantile(confidence))
    return max(least, score - reach), min(1.0, score + reach)


def jackknife_difference(
    delta: float, spread: Spread, better: NDArray[np.float64], confidence: float = 0.95, *, most: float = 1.0
) -> JackknifeDifference:
    """Return a difference of scores, with its interval.

    Args:
        delta: the score of the second network minus that of the first.
        spread: of that difference.
        better: ``(N,)``, how much better the second answers each image.
        confidence: confidence of the interval.
        most: the largest difference that there can be.
    """
    gained, lost = int(np.sum(better > 0)), int(np.sum(better < 0))
    found = JackknifeDifference(delta, -most, most, gained, lost, len(better), spread, most)
    return found.at(confidence)


def student_quantile(z: float, freedom: float) -> float:
    """Return the quantile of Student's distribution at the probability of a normal quantile ``z``.

    Wallace, "Bounds on normal approximations to Student's and the chi-square distributions", Annals of Mathematical
    Statistics 30 (1959), 1121-1130. At z = 1.96 it is too large by 4 % at 2 degrees of freedom, and by 0.04 % at 10.
    Further out it is too large by more: at z = 3 by 22 % and by 0.2 %.
    """
    scaled = z * (8 * freedom + 3) / (8 * freedom + 1)
    power = scaled * scaled / freedom
    return math.copysign(math.sqrt(freedom * math.expm1(power)), z) if power < 700 else math.copysign(math.inf, z)


def student_score(t: float, freedom: float) -> float:
    """Return the normal quantile at the probability of a quantile of Student's: the inverse of `student_quantile`."""
    root = math.sqrt(freedom * math.log1p(t * t / freedom))
    return math.copysign(root * (8 * freedom + 1) / (8 * freedom + 3), t)


def normal_quantile(confidence: float) -> float:
    """Return the normal quantile of the upper end of a two-sided interval."""
    return NormalDist().inv_cdf(0.5 + confidence / 2)
