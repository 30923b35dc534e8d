"""Finds how many units of each group stay, for a budget of multiply-accumulates or of time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from optimize.pruning.groups import Group, Grouping

#: Whether one threshold holds for the units of all groups, or every group keeps the same share.
Spread = Literal["global", "uniform"]


@dataclass(frozen=True)
class Rounding:
    """The allowed numbers of channels of a layer: multiples of ``multiple`` and at least ``least``, or all it has."""

    multiple: int
    least: int

    def nearest(self, wanted: float, group: Group) -> int:
        """Return the allowed number of units of a group that is nearest to ``wanted``, and the larger of two."""
        count = len(group.units)
        # Each layer's number of channels must be a multiple, and 1 unit may be several channels.
        step = math.lcm(*(self.multiple // math.gcd(self.multiple, size) for size in group.layers.values()))
        least = max(1, *(math.ceil(self.least / size) for size in group.layers.values()))
        allowed = [kept for kept in range(step, count, step) if kept >= least]
        return min([*allowed, count], key=lambda kept: (abs(kept - wanted), -kept))


class Costs:
    """Multiply-accumulates of one image as a function of how many units of each group stay.

    This covers convolutions and linear layers whose channels are followed. The rest of a network does not change.
    """

    def __init__(self, grouping: Grouping) -> None:
        number = {unit: index for index, group in enumerate(grouping.groups) for unit in group.units}
        size = [len(group.units) for group in grouping.groups]
        labels = grouping.channels.labels
        self._layers = list(grouping.channels.layers.values())
        self._parts: list[tuple[tuple[int, torch.Tensor], ...]] = []
        for layer in self._layers:
            sides = []
            for part in (layer.out, layer.into):
                of_group = [number.get(unit, -1) for unit in labels.sets(part).tolist()]
                each = torch.tensor([index for index in of_group if index >= 0], dtype=torch.int64)
                counts = torch.bincount(each, minlength=len(size)) if size else torch.zeros(0, dtype=torch.int64)
                sides.append((of_group.count(-1), counts // torch.tensor(size, dtype=torch.int64)))
            self._parts.append(tuple(sides))
        self.full = self.macs(size)

    def macs(self, kept: Sequence[int]) -> int:
        """Return the multiply-accumulates with these numbers of units."""
        units = torch.tensor(kept, dtype=torch.int64)
        total = 0
        for layer, parts in zip(self._layers, self._parts, strict=True):
            out, into = (fixed + int((each * units).sum()) for fixed, each in parts)
            total += layer.macs(out, into)
        return total


def widths(
    grouping: Grouping,
    scores: Sequence[torch.Tensor],
    rounding: Rounding,
    spread: Spread,
    reached: Callable[[list[int]], bool],
    *,
    fill: bool = False,
) -> list[int] | None:
    """Return how many units of each group stay. None: even the fewest allowed are too many.

    Args:
        grouping: the groups.
        scores: of each group's units, ``float (units,)``. With ``global`` they are comparable between groups.
        rounding: the allowed numbers.
        spread: how the removal is spread over the groups.
        reached: tells whether these numbers of units are few enough. If so, smaller numbers are, too.
        fill: with ``global``, whether to use what the last step leaves over. ``rounding`` shrinks a group at once. A
            residual stream that shrinks from 16 channels to 8 takes a third of a network with it. The threshold is then
            searched again for the other groups, as often as a group stops it. This calls ``reached`` many times.
    """
    steps: list[float]
    if spread == "global":
        steps = sorted({value for score in scores for value in score.tolist()})
        steps.append(math.inf)
    else:
        steps = sorted({kept / len(group.units) for group in grouping.groups for kept in range(len(group.units))})
        steps.reverse()

    def kept(place: int) -> list[int]:
        if spread == "global":
            wanted: list[float] = [float((score >= steps[place]).sum()) for score in scores]
        else:
            wanted = [steps[place] * len(group.units) for group in grouping.groups]
        return [rounding.nearest(count, group) for count, group in zip(wanted, grouping.groups, strict=True)]

    most = [len(group.units) for group in grouping.groups]

    def held(place: int) -> list[int]:
        return [min(count, bound) for count, bound in zip(kept(place), most, strict=True)]

    def first() -> int:
        low, high = 0, len(steps) - 1
        while low < high:
            middle = (low + high) // 2
            if reached(held(middle)):
                high = middle
            else:
                low = middle + 1
        return high

    if not steps or not reached(kept(len(steps) - 1)):
        return None
    place = first()
    while fill and spread == "global" and place > 0:
        # Fix the groups that this step shrinks. An earlier step is then few enough for the others.
        last, now = held(place - 1), held(place)
        most = [after if after < before else bound for before, after, bound in zip(last, now, most, strict=True)]
        place = first()
    return held(place)


def removed(grouping: Grouping, scores: Sequence[torch.Tensor], kept: Sequence[int]) -> set[int]:
    """Return the units to remove: those with the lowest scores of each group, and the last of equal ones."""
    gone: set[int] = set()
    for group, score, count in zip(grouping.groups, scores, kept, strict=True):
        order = torch.sort(score, descending=True, stable=True).indices.tolist()
        gone.update(group.units[place] for place in order[count:])
    return gone
