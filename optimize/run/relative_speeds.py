"""Times that were taken in turns, and the two of them that all speeds are relative to."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from optimize.measure.figures import Timed
from optimize.measure.latency import Speed

#: The reference that is the unchanged model as PyTorch runs it.
EAGER: Final = "eager"


@dataclass(frozen=True)
class Turns:
    """Pairs and references that took turns.

    Attributes:
        speeds: speeds by pair's id or reference's name.
        yardstick: the fastest float execution at batch 1, or the baseline's fastest pair if no float was measured.
        eager: the eager reference, or the baseline's fastest pair if it was not measured.
    """

    speeds: Mapping[str, Speed]
    yardstick: str
    eager: str

    def timed(self, name: str) -> Timed:
        """Return the times of one of them as a report states them."""
        return self.speeds[name].against(self.speeds[self.yardstick], self.speeds[self.eager])


def turns(speeds: Mapping[str, Speed], *, floats: Collection[str], baseline: Collection[str]) -> Turns:
    """Find the two that all speeds are relative to.

    Args:
        speeds: speeds by pair's id or reference's name.
        floats: those that compute only with floating-point numbers.
        baseline: the pairs of the artifact that the others are compared with. At least one was measured.
    """
    start = fastest(speeds, baseline)
    assert start is not None
    return Turns(speeds, fastest(speeds, floats) or start, EAGER if EAGER in speeds else start)


def fastest(speeds: Mapping[str, Speed], names: Collection[str]) -> str | None:
    """Return the name with the lowest p50 at batch 1, as a report states it. None if none was measured."""
    measured = [name for name in names if name in speeds]
    return min(measured, key=lambda name: speeds[name].p50, default=None)
