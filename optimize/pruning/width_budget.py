"""How many units of each group stay: as many as leave a network of so many multiply-accumulates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from optimize.pruning.groups import Group, Grouping

#: Whether all groups' units are held against one threshold, or every group keeps the same share.
Spread = Literal["global", "uniform"]


@dataclass(frozen=True)
class Rounding:
    """Which numbers of channels a layer may have: multiples of ``multiple``, at least ``least``, or all that it has."""

    multiple: int
    least: int

    def nearest(self, wanted: float, group: Group) -> int:
        """The number of units of a group that is allowed and nearest to ``wanted``; of two, the larger one."""
        count = len(group.units)
        # Every layer's channels are to be a multiple: 1 unit may be several of them.
        step = math.lcm(*(self.multiple // math.gcd(self.multiple, size) for size in group.layers.values()))
        least = max(1, *(math.ceil(self.least / size) for size in group.layers.values()))
        allowed = [kept for kept in range(step, count, step) if kept >= least]
        return min([*allowed, count], key=lambda kept: (abs(kept - wanted), -kept))


class Costs:
    """Multiply-accumulates of one image as a function of how many units of each group stay.

    Of convolutions and linear layers whose channels are followed; the rest of a network has as many as before.
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
        """With so many units of each group."""
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
    """How many units of each group stay; None: even the fewest that are allowed are too many.

    Args:
        grouping: the groups.
        scores: of each group's units, ``float (units,)``; comparable between groups for ``global``.
        rounding: which numbers are allowed.
        spread: how what is removed is spread over the groups.
        reached: given the numbers of units that stay, whether they are few enough; true for fewer if for more.
        fill: with ``global``, whether to use what the last step leaves over. A group goes by ``rounding`` at once, and
            a residual stream that goes from 16 channels to 8 takes a third of a network with it: the threshold is then
            looked for anew for the others, as often as a group stops it. It asks ``reached`` many times.
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
        # Those that this step takes from are left with that; with them so, an earlier step is few enough.
        last, now = held(place - 1), held(place)
        most = [after if after < before else bound for before, after, bound in zip(last, now, most, strict=True)]
        place = first()
    return held(place)


def removed(grouping: Grouping, scores: Sequence[torch.Tensor], kept: Sequence[int]) -> set[int]:
    """The units that go: in each group those of the lowest scores; of equal ones, the last."""
    gone: set[int] = set()
    for group, score, count in zip(grouping.groups, scores, kept, strict=True):
        order = torch.sort(score, descending=True, stable=True).indices.tolist()
        gone.update(group.units[place] for place in order[count:])
    return gone
