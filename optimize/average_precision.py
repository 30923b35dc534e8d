"""The mean average precision (mAP) of labels, and its intervals: pure functions of scores.

The average precision of a class is the mean, over the images that have it, of the share of right images among those
with at least the image's score. Equal scores share a rank, as in scikit-learn's ``average_precision_score``. The mAP is
the mean over classes. It is no mean over images, so an image's part in it is found by leaving the image out, see
`optimize.jackknife`.

Scores are ``(N, classes)``, the larger the surer. The truth is ``bool (N, classes)``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optimize.jackknife import (
    JackknifeDifference,
    influence_of_groups,
    jackknife_difference,
    jackknife_interval,
    spread_of,
)

_Floats = NDArray[np.float64]
_Truth = NDArray[np.bool_]


@dataclass(frozen=True)
class _Ranks:
    """Images from the surest to the least sure one.

    Attributes:
        order: their rows.
        first: the place of the first image with the same score.
        last: the place of the last one.
        right: whether each is right, as 0 or 1.
    """

    order: NDArray[np.int64]
    first: NDArray[np.int64]
    last: NDArray[np.int64]
    right: _Floats

    @classmethod
    def of(cls, scores: NDArray[np.floating], truth: _Truth) -> _Ranks:
        """Rank the images of a class: ``scores`` and ``truth`` are ``(N,)``."""
        order = np.argsort(-scores, kind="stable")
        falling = -scores[order]
        first, last = (np.searchsorted(falling, falling, side) for side in ("left", "right"))
        return cls(order, first, last - 1, truth[order].astype(np.float64))


def class_precisions(scores: NDArray[np.floating], truth: _Truth, weights: _Floats | None = None) -> _Floats:
    """Return the average precision of each class, ``(classes,)``. NaN: no image has it.

    Args:
        scores: ``(N, classes)``.
        truth: ``bool (N, classes)``.
        weights: ``(N,)``: how often each image counts. None: once.
    """
    found = np.full(scores.shape[1], np.nan)
    for place in range(scores.shape[1]):
        ranks = _Ranks.of(scores[:, place], truth[:, place])
        often = np.ones(len(scores)) if weights is None else weights[ranks.order]
        right = often * ranks.right
        if (whole := right.sum()) > 0:
            among = np.maximum(np.cumsum(often)[ranks.last], np.finfo(np.float64).tiny)
            found[place] = float(np.sum(right * np.cumsum(right)[ranks.last] / among) / whole)
    return found


def mean_precision(scores: NDArray[np.floating], truth: _Truth, weights: _Floats | None = None) -> float:
    """Return the mAP: the mean over the classes that some image has. It is 0 if there are none."""
    every = class_precisions(scores, truth, weights)
    return float(np.nanmean(every)) if np.isfinite(every).any() else 0.0


def precision_interval(
    scores: NDArray[np.floating], truth: _Truth, groups: NDArray[np.int64] | None = None, confidence: float = 0.95
) -> tuple[float, float]:
    """Return the interval of a network's mAP. See `precision_difference` for its kind and its arguments."""
    spread = spread_of(influence_of_groups(influences(scores, truth), groups), _labels(truth))
    return jackknife_interval(mean_precision(scores, truth), spread, confidence)


def precision_difference(
    first: NDArray[np.floating],
    second: NDArray[np.floating],
    truth: _Truth,
    groups: NDArray[np.int64] | None = None,
    confidence: float = 0.95,
) -> JackknifeDifference:
    """Return the mAP of the second network minus that of the first on the same images, with its interval.

    The interval is Student's with the jackknife's error over images or groups. It is never narrower than the loss that
    so many groups cannot exclude, even if both networks answer alike: see `Spread.unseen`. An image that is answered
    otherwise loses one of its labels there. An image counts as gained or lost by its mean share of right images among
    those that are as sure, over its labels.

    Args:
        first: scores of the first network.
        second: the same of the other.
        truth: the labels.
        groups: ``(N,)``: images with equal numbers belong together. None: each is a group of its own.
        confidence: confidence of the interval.
    """
    influence = influences(second, truth) - influences(first, truth)
    better = image_precisions(second, truth) - image_precisions(first, truth)
    delta = mean_precision(second, truth) - mean_precision(first, truth)
    spread = spread_of(influence_of_groups(influence, groups), _labels(truth))
    return jackknife_difference(delta, spread, better, confidence)


def image_precisions(scores: NDArray[np.floating], truth: _Truth) -> _Floats:
    """Return, for each image, the mean precision at the ranks of its labels, ``(N,)``. It is 1 without labels."""
    total = np.zeros(len(scores))
    for place in range(scores.shape[1]):
        ranks = _Ranks.of(scores[:, place], truth[:, place])
        total[ranks.order] += ranks.right * np.cumsum(ranks.right)[ranks.last] / (ranks.last + 1)
    labels = truth.sum(1)
    return np.where(labels > 0, total / np.maximum(labels, 1), 1.0)


def influences(scores: NDArray[np.floating], truth: _Truth) -> _Floats:
    """Return how much the mAP changes without each image, ``(N,)``."""
    total, shown = np.zeros(len(scores)), np.zeros(len(scores))
    for place in range(scores.shape[1]):
        left = _without(_Ranks.of(scores[:, place], truth[:, place]))
        there = np.isfinite(left)
        total[there] += left[there]
        shown += there
    return total / np.maximum(shown, 1) - mean_precision(scores, truth)


def _without(ranks: _Ranks) -> _Floats:
    """Return the average precision of a class without each image, ``(N,)``. NaN: no other image has the class.

    The precision at a rank is ``t/n``, right images over all up to it. Without an image of the same rank or a better
    one it is ``(t - 1)/(n - 1)`` if that was right, else ``t/(n - 1)``. Sums from a rank on give all of them at once.
    """
    right, among, others = ranks.right, ranks.last + 1.0, np.maximum(ranks.last, 1)
    hits = np.cumsum(right)[ranks.last]
    better = _sums_before(right * hits / among)[ranks.first]
    kept, lost = (_sums_from(right * part / others)[ranks.first] for part in (hits, 1.0))
    own = right * (hits - 1) / others
    count = right.sum() - right
    found = np.full(len(right), np.nan)
    some = count > 0
    found[ranks.order[some]] = ((better + kept - right * lost - own) / np.maximum(count, 1))[some]
    return found


def _sums_before(values: _Floats) -> _Floats:
    """Return for each place the sum of the values before it."""
    return np.concatenate([[0.0], np.cumsum(values)[:-1]])


def _sums_from(values: _Floats) -> _Floats:
    """Return for each place the sum of the values from it on."""
    return np.cumsum(values[::-1])[::-1]


def _labels(truth: _Truth) -> float:
    return float(truth.sum(1).mean())
