"""Splits images into validation, calibration and held-out parts, stratified or by groups, and the same for a seed.

Not scikit-learn's ``StratifiedShuffleSplit`` or ``train_test_split`` (1.9). They refuse fewer images than classes (256
to calibrate with, of 1,000 classes) and classes of one image, and may leave a small class without any.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from optimize.data.records import Split
from optimize.data.sources import select
from serve.runtime.errors import UserError

#: Share of the images that is kept for validation if a data set has no split of its own.
VAL_SHARE = 0.2

_Rows = npt.NDArray[np.int64]


def split_off(whole: Split, keys: Sequence[bytes]) -> tuple[Split, Split]:
    """Split off `VAL_SHARE` of each class (at least one image, if it has two): those with the smallest keys.

    A key depends only on its image's name. So a new image leaves the others in place, except for at most one of its
    class that it displaces at the boundary. If the images have groups, whole groups are split off instead.

    Raises:
        UserError: all images belong to one group.
    """
    numbers = np.asarray([int.from_bytes(key[:8], "big") for key in keys], np.uint64)
    if whole.groups is None:
        chosen = chosen_by_key(whole.labels.numpy(), numbers)
    else:
        chosen = _whole_groups(whole.groups.numpy(), np.argsort(numbers, kind="stable"), VAL_SHARE)
    return part(whole, np.flatnonzero(~chosen)), part(whole, np.flatnonzero(chosen))


def chosen_by_key(labels: _Rows, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """Return which images `split_off` takes for validation, if they have no groups."""
    found = np.bincount(labels)
    counts = np.minimum(np.maximum(1, np.rint(found * VAL_SHARE).astype(np.int64)), found - 1)
    chosen: npt.NDArray[np.bool_] = ranks(labels, np.argsort(keys, kind="stable")) < counts[labels]
    return chosen


def ranks(labels: _Rows, order: _Rows) -> _Rows:
    """Return how many images of its own class come before each image in ``order``, as ``int64 (N,)``."""
    ordered = labels[order]
    # Sixteen bits are sorted by radix, eight times as fast as 64.
    narrow = ordered.astype(np.uint16) if len(ordered) and ordered.max() < 1 << 16 else ordered
    by_class = np.argsort(narrow, kind="stable")
    counts = np.bincount(labels)
    starts = np.cumsum(counts) - counts
    found = np.empty(len(labels), np.int64)
    found[order[by_class]] = np.arange(len(labels)) - np.repeat(starts, counts)
    return found


_subsets: WeakKeyDictionary[Split, dict[tuple[int, int], Split]] = WeakKeyDictionary()


def subset(split: Split, limit: int, seed: int = 0) -> Split:
    """Return a random subset of ``limit`` images that keeps the classes' proportions, the same for the same seed.

    Shares are rounded by largest remainder. The images come in a random order, so that any first part is mixed too. If
    the split has no more than ``limit`` images, it is returned completely.

    Raises:
        UserError: ``limit`` is not positive.
    """
    if limit < 1:
        raise UserError(f"the number of images must be at least 1, got {limit}")
    if limit >= len(split):
        return split
    kept = _subsets.setdefault(split, {})
    if (limit, seed) not in kept:
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(split), generator=generator)
        counts = torch.bincount(split.labels)
        shares = counts.double() * limit / len(split)
        quota = shares.floor().long()
        # Ties among remainders are broken at random. Otherwise a small subset would contain only the first classes.
        lottery = torch.rand(len(counts), generator=generator) * 1e-6
        quota[(shares - quota + lottery).argsort(descending=True)[: limit - int(quota.sum())]] += 1
        kept[limit, seed] = part(split, _first(order.numpy(), split.labels.numpy(), quota.numpy()))
    return kept[limit, seed]


def _first(order: _Rows, labels: _Rows, quota: _Rows) -> _Rows:
    """Return the first ``quota`` rows of each class in ``order``, in that order."""
    # They are mostly near the beginning, and ranks in a beginning are ranks in the whole.
    length = 32 * int(quota.sum())
    while True:
        beginning = order[:length]
        of_class = labels[beginning]
        chosen = ranks(of_class, np.arange(len(beginning))) < quota[of_class]
        if length >= len(order) or chosen.sum() == quota.sum():
            return beginning[chosen]
        length *= 4


# Pixels are cached by split: the baseline and qat must get the same two splits to share them.
_held_out: WeakKeyDictionary[Split, dict[tuple[float, int], tuple[Split, Split]]] = WeakKeyDictionary()


def hold_out(split: Split, share: float, seed: int) -> tuple[Split, Split]:
    """Split off ``share`` of each class (at least one image, if it has two) at random. The rest is returned first.

    If the images have groups, whole groups are split off instead.

    Raises:
        UserError: all images belong to one group.
    """
    known = _held_out.setdefault(split, {})
    if (share, seed) not in known:
        order = torch.randperm(len(split), generator=torch.Generator().manual_seed(seed)).numpy()
        if split.groups is None:
            labels = split.labels.numpy()
            counts = np.bincount(labels)
            quota = np.minimum(np.maximum(1, np.rint(counts * share).astype(np.int64)), counts - 1)
            held = ranks(labels, order) < quota[labels]
        else:
            held = _whole_groups(split.groups.numpy(), order, share)
        known[share, seed] = (part(split, np.flatnonzero(~held)), part(split, np.flatnonzero(held)))
    return known[share, seed]


def _whole_groups(groups: _Rows, order: _Rows, share: float) -> npt.NDArray[np.bool_]:
    """Return the images of some groups that are together about ``share`` of all images.

    A group is taken if that brings the number of images nearer to the share. They come in the order of their first
    images in ``order``.

    Raises:
        UserError: there is only one group.
    """
    names, group, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    if len(names) < 2:
        raise UserError(f"all {len(groups)} images belong to one group, so none can be held out; name at least two")
    first = np.unique(group[order], return_index=True)[1]
    taken: list[int] = []
    left = share * len(groups)
    for name in np.argsort(first)[: len(names) - 1].tolist():
        if abs(left - sizes[name]) < abs(left):
            taken.append(name)
            left -= sizes[name]
    chosen: npt.NDArray[np.bool_] = np.isin(group, taken or [int(sizes.argmin())])
    return chosen


def part(split: Split, rows: npt.NDArray[np.integer[Any]]) -> Split:
    """Return the images at ``rows``, in that order."""
    with torch.inference_mode(False):  # it is kept: a caller who measures must not make it unusable in training
        groups = None if split.groups is None else torch.from_numpy(split.groups.numpy()[rows])
    return Split(select(split.sources, rows), split.targets.part(rows), split.known and split.known.part(rows), groups)
