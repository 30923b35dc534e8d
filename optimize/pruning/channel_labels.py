"""Labels of channels: equal numbers for channels that can only be removed together.

A tensor of the network is described by a tensor of labels. The labels can be broadcast to its shape, and change along
at most one dimension, the channels. Values that are no layer's channels share one label that must stay.
"""

from __future__ import annotations

import torch


class Labels:
    """Disjoint sets of labels that are the same channel, and the reasons why some must stay."""

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._reasons: dict[int, str] = {}

    def fresh(self, count: int) -> torch.Tensor:
        """Return ``count`` new labels, ``int64 (count,)``."""
        first = len(self._parent)
        self._parent += range(first, first + count)
        return torch.arange(first, first + count)

    def tie(self, one: torch.Tensor, other: torch.Tensor) -> None:
        """Make each label of ``one`` the same channel as the label of ``other`` at its place.

        If one must stay, both must.
        """
        for left, right in set(zip(one.tolist(), other.tolist(), strict=True)):
            root, joined = self._find(left), self._find(right)
            if root != joined:
                self._parent[joined] = root
                if (kept := self._reasons.pop(joined, None)) is not None:
                    self._reasons.setdefault(root, kept)

    def keep(self, labels: torch.Tensor, reason: str) -> None:
        """Mark channels that must stay. The first given reason counts."""
        for label in set(labels.flatten().tolist()):
            self._reasons.setdefault(self._find(label), reason)

    def sets(self, labels: torch.Tensor) -> torch.Tensor:
        """Return the set of each label, as the number of one of its labels."""
        return torch.tensor([self._find(label) for label in labels.tolist()], dtype=torch.int64)

    def reason(self, found: int) -> str | None:
        """Return why the channels of a set must stay, or None if they need not."""
        return self._reasons.get(found)

    def _find(self, label: int) -> int:
        while self._parent[label] != label:
            self._parent[label] = self._parent[self._parent[label]]
            label = self._parent[label]
        return label


def squeezed(labels: torch.Tensor) -> torch.Tensor:
    """Return the same labels with size 1 in every dimension along which they do not change."""
    for dim in range(labels.ndim):
        first = labels.narrow(dim, 0, 1)
        if labels.shape[dim] > 1 and bool((labels == first).all()):
            labels = first
    return labels


def channel_dims(labels: torch.Tensor) -> list[int]:
    """Return the dimensions along which squeezed labels change, counted from the last, -1."""
    return [dim - labels.ndim for dim, size in enumerate(labels.shape) if size > 1]
