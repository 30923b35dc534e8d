"""The mean intersection over union (mIoU) of class maps, and intervals of it: pure functions of pixel counts.

It is the mean of a ratio for each class. Its pixels come from all images together, so it is not a mean over images. An
image's part in it is found by leaving the image out (the jackknife). Images that belong together, such as the frames of
a video, are left out together, because each says little that the others do not.

A confusion matrix has the pixels of an image by their class, and by the class that a network gives them: ``(C, C)``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from optimize.jackknife import JackknifeDifference, Spread, jackknife_difference, jackknife_interval, spread_of

_Counts = NDArray[np.float64]


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

    The standard error is the jackknife's over groups of images, see `optimize.jackknife`. The interval is Student's. It
    is never narrower than the loss that so many groups cannot exclude, even if both networks answer alike. An image
    that is answered otherwise loses one of its classes, all of its pixels, which is as much as a single class of it can
    cost. See `Spread.unseen`.

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


def class_iou_differences(
    first: NDArray[np.integer], second: NDArray[np.integer], groups: NDArray[np.int64] | None = None
) -> list[JackknifeDifference | None]:
    """Return what `iou_difference` returns, for the IoU of each class. None: no target has pixels of the class.

    An image says something of a class if its target or an answer has it. Only targets can lose it.
    """
    pixels = _pixels(first), _pixels(second)
    found: list[JackknifeDifference | None] = []
    for place, own in enumerate(pixels[0][2].T > 0):
        rows = np.flatnonzero((pixels[0][1, :, place] > 0) | (pixels[1][1, :, place] > 0))
        named = None if groups is None else groups[rows]
        if own.any():
            of_class = [counts[:, rows, place : place + 1] for counts in pixels]
            found.append(_difference(of_class[0], of_class[1], named, 0.95).among(own[rows], named))
        else:
            found.append(None)
    return found


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
    return jackknife_interval(float(_mean(own.sum(1))), _spread([own]), confidence)


def _difference(
    first: _Counts, second: _Counts, groups: NDArray[np.int64] | None, confidence: float
) -> JackknifeDifference:
    own = [_by_group(counts, groups) for counts in (first, second)]
    delta = float(_mean(own[1].sum(1)) - _mean(own[0].sum(1)))
    return jackknife_difference(delta, _spread(own), second[0].sum(1) - first[0].sum(1), confidence)


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
    shown = float((networks[0][2] > 0).sum(1).mean())
    # Sums of whole numbers are exact, so a class that only one group has is gone without it.
    left = [_mean(counts.sum(1, keepdims=True) - counts) for counts in networks]
    return spread_of(left[-1] - (left[0] if len(left) > 1 else 0.0), shown)
