"""The share of the absolute error that a network explains (D²), and its intervals: pure functions of numbers.

It is one minus the network's mean absolute error over that of the best constant answer, the median of the targets. So 1
is without an error, 0 is as good as that constant, and a loss of 0.01 is an error that has grown by a hundredth of the
constant's. It has no unit, so that several numbers in different units have a mean. See ``d2_absolute_error_score`` of
scikit-learn. It is no mean over images, so an image's part in it is found by leaving it out, see `optimize.jackknife`.

Answers and targets are ``(N, K)``: K numbers for each image.
"""

from __future__ import annotations

from typing import Final

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

#: No interval is wider. A single group says nothing about the error.
_WIDEST: Final = 1e6


def explained_shares(answers: _Floats, targets: _Floats, weights: _Floats | None = None) -> _Floats:
    """Return D² of each number, ``(K,)``. If all targets are equal it is 1 without an error, and else 0.

    Args:
        answers: ``(N, K)``.
        targets: ``(N, K)``.
        weights: ``(N,)``: how often each image counts. None: once.
    """
    often = np.ones(len(targets)) if weights is None else weights
    return _shares(often @ np.abs(answers - targets), often @ np.abs(targets - _medians(targets, often)))


def explained_error(answers: _Floats, targets: _Floats, weights: _Floats | None = None) -> float:
    """Return the mean D² of the numbers."""
    return float(explained_shares(answers, targets, weights).mean())


def spreads(values: _Floats) -> tuple[_Floats, _Floats]:
    """Return the median of each number ``(K,)``, and its mean distance from it ``(K,)``."""
    middle = np.median(values, axis=0)
    return middle, np.abs(values - middle).mean(0)


def error_interval(
    answers: _Floats, targets: _Floats, groups: NDArray[np.int64] | None = None, confidence: float = 0.95
) -> tuple[float, float]:
    """Return the interval of a network's D². See `error_difference` for its kind and its arguments."""
    score = explained_error(answers, targets)
    spread = spread_of(influence_of_groups(influences(answers, targets), groups))
    return jackknife_interval(score, spread, confidence, least=min(score, -_WIDEST))


def error_difference(
    first: _Floats,
    second: _Floats,
    targets: _Floats,
    groups: NDArray[np.int64] | None = None,
    confidence: float = 0.95,
) -> JackknifeDifference:
    """Return the D² of the second network minus that of the first on the same images, with its interval.

    The interval is Student's with the jackknife's error over images or groups. It is never narrower than the loss that
    so many groups cannot exclude, even if both networks answer alike: see `Spread.unseen`. An image that is answered
    otherwise is answered there as well as by the constant. An image counts as gained if its errors are smaller, in
    units of the constant's mean error.

    Args:
        first: answers of the first network.
        second: the same of the other.
        targets: the right numbers.
        groups: ``(N,)``: images with equal numbers belong together. None: each is a group of its own.
        confidence: confidence of the interval.
    """
    influence = influences(second, targets) - influences(first, targets)
    delta = explained_error(second, targets) - explained_error(first, targets)
    spread = spread_of(influence_of_groups(influence, groups))
    better = errors_of_images(first, targets) - errors_of_images(second, targets)
    return jackknife_difference(delta, spread, better, confidence, most=max(_WIDEST, abs(delta)))


def errors_of_images(answers: _Floats, targets: _Floats) -> _Floats:
    """Return the mean absolute error of each image's numbers, in units of the constant's mean error, ``(N,)``."""
    unit = spreads(targets)[1]
    errors: _Floats = (np.abs(answers - targets) / np.where(unit > 0, unit, 1.0)).mean(1)
    return errors


def influences(answers: _Floats, targets: _Floats) -> _Floats:
    """Return how much the D² changes without each image, ``(N,)``.

    Without a target in the lower half, the median moves to the first of the upper half, or stays with an odd number of
    images. So the sum of the distances loses that between these two.
    """
    errors, count = np.abs(answers - targets), len(targets)
    ordered = np.sort(targets, axis=0)
    low, high = ordered[(count - 1) // 2], ordered[count // 2]
    places = np.argsort(np.argsort(targets, axis=0, kind="stable"), axis=0)
    opposite = np.where(places < count // 2, high, low)
    whole = np.abs(targets - low).sum(0)
    # Rounding may leave a little of a sum that is 0.
    distances = whole - np.abs(targets - opposite)
    distances[distances < 1e-12 * whole] = 0.0
    left: _Floats = _shares(np.maximum(errors.sum(0) - errors, 0.0), distances).mean(1)
    change: _Floats = left - explained_error(answers, targets)
    return change


def _shares(errors: _Floats, distances: _Floats) -> _Floats:
    varied = distances > 0
    shares: _Floats = np.where(varied, 1 - errors / np.where(varied, distances, 1.0), np.where(errors > 0, 0.0, 1.0))
    return shares


def _medians(targets: _Floats, often: _Floats) -> _Floats:
    """Return a median of each number if images count so often."""
    order = np.argsort(targets, axis=0, kind="stable")
    half = np.argmax(np.cumsum(often[order], axis=0) >= often.sum() / 2, axis=0)
    columns = np.arange(targets.shape[1])
    medians: _Floats = targets[order[half, columns], columns]
    return medians
