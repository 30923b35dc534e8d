"""Splits images into validation, calibration and held-out parts, stratified, and the same for a seed.

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
from optimize.data.sources import Source, select
from serve.runtime.errors import UserError

#: Share of the images that is kept for validation if a data set has no split of its own.
VAL_SHARE = 0.2

_Rows = npt.NDArray[np.int64]


def split_off(sources: Sequence[Source], labels: Sequence[int] | _Rows, keys: Sequence[bytes]) -> tuple[Split, Split]:
    """Split off `VAL_SHARE` of each class (at least one image, if it has two): those with the smallest keys.

    A key depends only on its image's name. So a new image leaves the others in place, except for at most one of its
    class that it displaces at the boundary.
    """
    classes = np.asarray(labels, np.int64)
    chosen = chosen_by_key(classes, np.asarray([int.from_bytes(key[:8], "big") for key in keys], np.uint64))
    whole = Split(sources, torch.from_numpy(classes))
    return part(whole, np.flatnonzero(~chosen)), part(whole, np.flatnonzero(chosen))


def chosen_by_key(labels: _Rows, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """Return which images `split_off` takes for validation."""
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
    """Split off ``share`` of each class (at least one image, if it has two) at random. The rest is returned first."""
    known = _held_out.setdefault(split, {})
    if (share, seed) not in known:
        order = torch.randperm(len(split), generator=torch.Generator().manual_seed(seed)).numpy()
        labels = split.labels.numpy()
        counts = np.bincount(labels)
        quota = np.minimum(np.maximum(1, np.rint(counts * share).astype(np.int64)), counts - 1)
        held = ranks(labels, order) < quota[labels]
        known[share, seed] = (part(split, np.flatnonzero(~held)), part(split, np.flatnonzero(held)))
    return known[share, seed]


def part(split: Split, rows: npt.NDArray[np.integer[Any]]) -> Split:
    """Return the images at ``rows``, in that order."""
    with torch.inference_mode(False):  # it is kept: a caller who measures must not make it unusable in training
        labels = torch.from_numpy(split.labels.numpy()[rows])
    return Split(select(split.sources, rows), labels, split.known and split.known.part(rows))
