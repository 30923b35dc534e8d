"""Times that were taken in turns, and the two of them that all speeds are multiples of."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from optimize.measure.figures import Timed
from optimize.measure.latency import Speed

#: The reference that is the model as PyTorch runs it, with nothing done to it.
EAGER: Final = "eager"


@dataclass(frozen=True)
class Turns:
    """Pairs and references that took turns.

    Attributes:
        speeds: by pair's id or reference's name.
        yardstick: the fastest float execution at batch 1; the baseline's fastest, where no float was measured.
        eager: the eager reference; the baseline's fastest pair, where it was not measured.
    """

    speeds: Mapping[str, Speed]
    yardstick: str
    eager: str

    def timed(self, name: str) -> Timed:
        """What a report says of the times of one of them."""
        return self.speeds[name].against(self.speeds[self.yardstick], self.speeds[self.eager])


def turns(speeds: Mapping[str, Speed], *, floats: Collection[str], baseline: Collection[str]) -> Turns:
    """Find what the speeds are to be multiples of.

    Args:
        speeds: by pair's id or reference's name.
        floats: which of them compute with floating-point numbers alone.
        baseline: the pairs of the artifact that the others are compared with; at least one was measured.
    """
    start = fastest(speeds, baseline)
    assert start is not None
    return Turns(speeds, fastest(speeds, floats) or start, EAGER if EAGER in speeds else start)


def fastest(speeds: Mapping[str, Speed], names: Collection[str]) -> str | None:
    """Which of the names has the lowest p50 at batch 1, as a report states it; None if none was measured."""
    measured = [name for name in names if name in speeds]
    return min(measured, key=lambda name: speeds[name].p50, default=None)
