"""Labels of channels: numbers that are the same for channels that can only be removed together.

A tensor of the network is described by a tensor of labels that can be broadcast to its shape and that changes along
one dimension at most, which is that of its channels. Values that are no layer's channels have one label that must stay.
"""

from __future__ import annotations

import torch


class Labels:
    """Which labels are the same channel (disjoint sets), and which must stay, with the reason."""

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._reasons: dict[int, str] = {}

    def fresh(self, count: int) -> torch.Tensor:
        """``count`` labels of their own, ``int64 (count,)``."""
        first = len(self._parent)
        self._parent += range(first, first + count)
        return torch.arange(first, first + count)

    def tie(self, one: torch.Tensor, other: torch.Tensor) -> None:
        """Let each of ``one`` be the same channel as the one of ``other`` at its place; if either must stay, both."""
        for left, right in set(zip(one.tolist(), other.tolist(), strict=True)):
            root, joined = self._find(left), self._find(right)
            if root != joined:
                self._parent[joined] = root
                if (kept := self._reasons.pop(joined, None)) is not None:
                    self._reasons.setdefault(root, kept)

    def keep(self, labels: torch.Tensor, reason: str) -> None:
        """These channels must stay; the first reason that is given is the one that is told."""
        for label in set(labels.flatten().tolist()):
            self._reasons.setdefault(self._find(label), reason)

    def sets(self, labels: torch.Tensor) -> torch.Tensor:
        """The set that each label belongs to, as the number of one of its labels."""
        return torch.tensor([self._find(label) for label in labels.tolist()], dtype=torch.int64)

    def reason(self, found: int) -> str | None:
        """Why the channels of a set must stay; None: they need not."""
        return self._reasons.get(found)

    def _find(self, label: int) -> int:
        while self._parent[label] != label:
            self._parent[label] = self._parent[self._parent[label]]
            label = self._parent[label]
        return label


def squeezed(labels: torch.Tensor) -> torch.Tensor:
    """The same labels with every dimension along which they do not change made 1."""
    for dim in range(labels.ndim):
        first = labels.narrow(dim, 0, 1)
        if labels.shape[dim] > 1 and bool((labels == first).all()):
            labels = first
    return labels


def channel_dims(labels: torch.Tensor) -> list[int]:
    """The dimensions along which squeezed labels change, counted from the last, -1."""
    return [dim - labels.ndim for dim, size in enumerate(labels.shape) if size > 1]
