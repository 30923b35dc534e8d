"""Which images go where: validation, calibration, held out of training; stratified, and the same for a seed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from weakref import WeakKeyDictionary

import torch

from optimize.data.records import Split
from serve.runtime.errors import UserError

#: Share of the images that is kept for validation where a data set brings no split of its own.
VAL_SHARE = 0.2


def split_off(sources: tuple[Path | bytes, ...], labels: list[int], keys: list[bytes]) -> tuple[Split, Split]:
    """Split off `VAL_SHARE` of each class (at least one image): those with the smallest keys.

    A key depends on its image's name alone, so that a new image leaves the others where they are, but
    for at most one of its class that it displaces at the boundary.
    """
    members: dict[int, list[int]] = {}
    for index, label in enumerate(labels):
        members.setdefault(label, []).append(index)
    chosen: set[int] = set()
    for indices in members.values():
        count = max(1, round(len(indices) * VAL_SHARE))
        chosen.update(sorted(indices, key=lambda index: keys[index])[:count])

    def part(indices: Iterable[int]) -> Split:
        taken = list(indices)
        return Split(
            tuple(sources[index] for index in taken), torch.tensor([labels[i] for i in taken], dtype=torch.int64)
        )

    everyone = range(len(sources))
    return part(i for i in everyone if i not in chosen), part(i for i in everyone if i in chosen)


_subsets: WeakKeyDictionary[Split, dict[tuple[int, int], Split]] = WeakKeyDictionary()


def subset(split: Split, limit: int, seed: int = 0) -> Split:
    """A random subset of ``limit`` images that keeps the classes' proportions; the same for the same seed.

    Images are taken in shares by largest remainder, and come in a random order, so that any first part
    of it is mixed too. All of the split, if it has no more than ``limit``.

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
        # Ties among remainders are broken at random, or a small subset would hold only the first classes.
        lottery = torch.rand(len(counts), generator=generator) * 1e-6
        quota[(shares - quota + lottery).argsort(descending=True)[: limit - int(quota.sum())]] += 1
        chosen = []
        for index in order.tolist():
            label = int(split.labels[index])
            if quota[label] > 0:
                quota[label] -= 1
                chosen.append(index)
        with torch.inference_mode(False):  # kept, as the pixels are
            labels = split.labels[chosen]
        kept[limit, seed] = Split(tuple(split.sources[index] for index in chosen), labels)
    return kept[limit, seed]


# Pixels are cached by split: the baseline and qat must get the same two splits to share them.
_held_out: WeakKeyDictionary[Split, dict[tuple[float, int], tuple[Split, Split]]] = WeakKeyDictionary()


def hold_out(split: Split, share: float, seed: int) -> tuple[Split, Split]:
    """Split off ``share`` of each class (at least one image of it, if it has two), at random; the rest comes first."""
    known = _held_out.setdefault(split, {})
    if (share, seed) not in known:
        generator = torch.Generator().manual_seed(seed)
        kept: list[int] = []
        held: list[int] = []
        for label in torch.unique(split.labels).tolist():
            members = (split.labels == label).nonzero().flatten()
            members = members[torch.randperm(len(members), generator=generator)]
            count = min(max(1, round(share * len(members))), len(members) - 1)
            held += members[:count].tolist()
            kept += members[count:].tolist()
        known[share, seed] = (_part(split, sorted(kept)), _part(split, sorted(held)))
    return known[share, seed]


def _part(split: Split, indices: list[int]) -> Split:
    return Split(tuple(split.sources[index] for index in indices), split.labels[indices])
