"""The mean intersection over union (mIoU) of class maps, and intervals of it: pure functions of pixel counts.

It is the mean of a ratio for each class. Its pixels come from all images together, so it is not a mean over images. An
image's part in it is found by leaving the image out (the jackknife). Images that belong together, such as the frames of
a video, are left out together, because each says little that the others do not.

A confusion matrix has the pixels of an image by their class, and by the class that a network gives them: ``(C, C)``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from optimize.statistics import PairedDifference, images_needed, smallest_loss

_Counts = NDArray[np.float64]


@dataclass(frozen=True)
class Spread:
    """How far an estimate from groups of images may be from its true value.

    Attributes:
        error: the jackknife's standard error. Infinite for a single group.
        freedom: degrees of freedom of that error.
        groups: the number of groups.
        classes: the mean number of classes that a group shows, from 1.
    """

    error: float
    freedom: float
    groups: int
    classes: float

    def reach(self, z: float) -> float:
        """Return the half width of the interval whose ends are ``z`` normal standard deviations away.

        It is Student's, but at least `unseen`.
        """
        return max(self.error * student_quantile(z, self.freedom) if self.error else 0.0, self.unseen(z))

    def unseen(self, z: float) -> float:
        """Return the share of the score that may be lost although no group shows any loss.

        ``z²/(n+z²)`` is the upper end of Wilson's interval for none of n groups (1927; it is near the rule of three,
        3/n). So many groups may be answered otherwise. One that is answered otherwise loses one of its classes, all of
        its pixels, which is as much as a single class of it can cost. With one class in each group this is exactly
        Tango's interval of a difference without changes.
        """
        return z * z / (self.groups + z * z) / self.classes

    def deviations(self, distance: float) -> float:
        """Return how many normal standard deviations a distance from the estimate is: the inverse of `reach`."""
        share = min(1.0, abs(distance) * self.classes)
        by_unseen = math.sqrt(self.groups * share / (1 - share)) if share < 1 else math.inf
        by_error = student_score(abs(distance) / self.error, self.freedom) if self.error else math.inf
        return math.copysign(min(by_unseen, by_error), distance) if distance else 0.0


@dataclass(frozen=True)
class JackknifeDifference(PairedDifference):
    """The difference of a score of two networks on the same images, from leaving out each group; see `iou_difference`.

    ``gained`` and ``lost`` count images with more and with fewer right pixels.
    """

    spread: Spread

    def at(self, confidence: float) -> JackknifeDifference:
        """See `PairedDifference`."""
        reach = self.spread.reach(_quantile(confidence))
        return dataclasses.replace(self, low=max(-1.0, self.delta - reach), high=min(1.0, self.delta + reach))

    def score(self, loss: float) -> float:
        """See `PairedDifference`."""
        return self.spread.deviations(self.delta + loss)

    def smallest_loss(self, confidence: float) -> float:
        """See `Spread.unseen`."""
        return smallest_loss(self.spread.groups, confidence) / self.spread.classes

    def images_needed(self, loss: float, confidence: float) -> int | None:
        """See `PairedDifference`. Groups have as many images and classes as these."""
        groups = images_needed(min(1.0, loss * self.spread.classes), confidence)
        return None if groups is None else math.ceil(groups * self.n / self.spread.groups)


def mean_iou(confusion: NDArray[np.integer], weights: NDArray[np.float64] | None = None) -> float:
    """Return the mIoU: the mean over the classes that have pixels of what is common to target and answer over both.

    A class without pixels of its own is left out, for every network alike. If an answer has it, the classes of those
    pixels lose. It is 0 if no class has pixels.

    Args:
        confusion: ``(N, C, C)``: for each image its pixels by class and by the class that they were given.
        weights: ``(N,)``: how often each image counts. None: once.
    """
    counts = _pixels(confusion)
    return float(_mean(np.einsum("knc,n->kc", counts, np.ones(len(confusion)) if weights is None else weights)))


def class_ious(confusion: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return the intersection over union of each class, ``(C,)``. It is NaN for a class without pixels."""
    common, both, own = _pixels(confusion).sum(1)
    return np.where(own > 0, common / np.maximum(both, 1), np.nan)


def iou_interval(
    confusion: NDArray[np.integer], groups: NDArray[np.int64] | None = None, confidence: float = 0.95
) -> tuple[float, float]:
    """Return the interval of a network's mIoU, from 0 to 1. See `iou_difference` for its kind and its arguments."""
    return _interval(_pixels(confusion), groups, confidence)


def iou_difference(
    first: NDArray[np.integer],
    second: NDArray[np.integer],
    groups: NDArray[np.int64] | None = None,
    confidence: float = 0.95,
) -> JackknifeDifference:
    """Return the mIoU of the second network minus that of the first on the same images, with its interval.

    The standard error is the jackknife's over groups of images. To the first order it is that of the linear
    approximation of the mIoU. Where that does not hold, because a class is in few groups, it is too large rather than
    too small (Efron and Stein, "The jackknife estimate of variance", Annals of Statistics 9 (1981), 586-596). The
    interval is Student's. Its degrees of freedom follow from the kurtosis of the groups' influences, as Satterthwaite's
    do (Biometrics Bulletin 2 (1946), 110-114), because a few groups often have most of the variance. It is never
    narrower than the loss that so many groups cannot exclude, even if both networks answer alike: see `Spread.unseen`.

    Args:
        first: ``(N, C, C)``, see `mean_iou`.
        second: the same of the other network.
        groups: ``(N,)``: images with equal numbers belong together. None: each is a group of its own.
        confidence: confidence of the interval.

    Raises:
        ValueError: the shapes differ, or there are no images.
    """
    if first.shape != second.shape or not len(first):
        raise ValueError(f"paired confusion matrices must have one shape, got {first.shape} and {second.shape}")
    return _difference(_pixels(first), _pixels(second), groups, confidence)


def grouped_share(right: NDArray[np.bool_], groups: NDArray[np.int64], confidence: float = 0.95) -> tuple[float, float]:
    """Return the interval of a share of images, such as an accuracy, that belong together in groups.

    It is that of the mIoU of images of one pixel and one class: see `iou_difference`.
    """
    return _interval(_of_shares(right), groups, confidence)


def grouped_difference(
    first: NDArray[np.bool_], second: NDArray[np.bool_], groups: NDArray[np.int64], confidence: float = 0.95
) -> JackknifeDifference:
    """Return the difference of two such shares of the same images, with its interval."""
    return _difference(_of_shares(first), _of_shares(second), groups, confidence)


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


def _quantile(confidence: float) -> float:
    return NormalDist().inv_cdf(0.5 + confidence / 2)


def _pixels(confusion: NDArray[np.integer]) -> _Counts:
    """Return what the mIoU is made of, ``(3, N, C)``: common pixels, pixels of target or answer, and the target's."""
    common = np.diagonal(confusion, axis1=1, axis2=2).astype(np.float64)
    own, given = (confusion.sum(axis, dtype=np.float64) for axis in (2, 1))
    return np.stack([common, own + given - common, own])


def _of_shares(right: NDArray[np.bool_]) -> _Counts:
    """Return the counts of images of one pixel and one class."""
    common = np.asarray(right, np.float64)[:, None]
    return np.stack([common, np.ones_like(common), np.ones_like(common)])


def _interval(counts: _Counts, groups: NDArray[np.int64] | None, confidence: float) -> tuple[float, float]:
    own = _by_group(counts, groups)
    score, reach = float(_mean(own.sum(1))), _spread([own]).reach(_quantile(confidence))
    return max(0.0, score - reach), min(1.0, score + reach)


def _difference(
    first: _Counts, second: _Counts, groups: NDArray[np.int64] | None, confidence: float
) -> JackknifeDifference:
    own = [_by_group(counts, groups) for counts in (first, second)]
    more = second[0].sum(1) - first[0].sum(1)
    found = JackknifeDifference(
        delta=float(_mean(own[1].sum(1)) - _mean(own[0].sum(1))),
        low=-1.0,
        high=1.0,
        gained=int(np.sum(more > 0)),
        lost=int(np.sum(more < 0)),
        n=first.shape[1],
        spread=_spread(own),
    )
    return found.at(confidence)


def _mean(counts: _Counts) -> NDArray[np.float64]:
    """Return the mIoU of ``(3, ..., C)`` pixels, ``(...)``."""
    common, both, own = counts
    shown = own > 0
    ratios = np.where(shown, common / np.maximum(both, np.finfo(np.float64).tiny), 0.0)
    means: NDArray[np.float64] = ratios.sum(-1) / np.maximum(shown.sum(-1), 1)
    return means


def _by_group(counts: _Counts, groups: NDArray[np.int64] | None) -> _Counts:
    if groups is None:
        return counts
    names, places = np.unique(groups, return_inverse=True)
    found = np.zeros((3, len(names), counts.shape[2]))
    for part, own in zip(found, counts, strict=True):
        np.add.at(part, places, own)
    return found


def _spread(networks: Sequence[_Counts]) -> Spread:
    """Return the spread of a network's mIoU, or of that of the last minus that of the first, from ``(3, G, C)``."""
    groups = networks[0].shape[1]
    shown = float((networks[0][2] > 0).sum(1).mean())
    # Sums of whole numbers are exact, so a class that only one group has is gone without it.
    left = [_mean(counts.sum(1, keepdims=True) - counts) for counts in networks]
    influence = left[-1] - (left[0] if len(left) > 1 else 0.0)
    squares = (influence - influence.mean()) ** 2
    total = float(squares.sum())
    if groups == 1:
        return Spread(math.inf, 1.0, groups, max(1.0, shown))
    # The variance of a variance is that of a normal one times (kurtosis - 1) / 2.
    kurtosis = groups * float(np.sum((squares / total) ** 2)) if total else 0.0
    freedom = min(groups - 1.0, max(1.0, 2 * groups / (kurtosis - 1))) if kurtosis > 1 else groups - 1.0
    return Spread(math.sqrt((groups - 1) / groups * total), freedom, groups, max(1.0, shown))
