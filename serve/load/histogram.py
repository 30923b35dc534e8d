"""Latencies in buckets of equal relative width: mergeable, small as JSON, percentiles within a quarter of a percent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

#: A bucket ends at 1.005 times its beginning.
_STEP = math.log(1.005)
_LEAST_MS = 1e-3


@dataclass
class Histogram:
    """Counts of latencies in ms by bucket. Not for several threads at once."""

    counts: dict[int, int] = field(default_factory=dict)

    def add(self, milliseconds: float) -> None:
        """Count one latency; what is below a microsecond counts as one."""
        bucket = int(math.log(max(milliseconds, _LEAST_MS) / _LEAST_MS) / _STEP)
        self.counts[bucket] = self.counts.get(bucket, 0) + 1

    def __len__(self) -> int:
        return sum(self.counts.values())

    def percentile(self, share: float) -> float:
        """The latency in ms that ``share`` (above 0, to 100) percent do not exceed; NaN where nothing was counted.

        The smallest counted value with at least that share at or below it (nearest rank), to its bucket's middle.
        """
        rank, seen = max(1, math.ceil(len(self) * share / 100)), 0
        for bucket, count in sorted(self.counts.items()):
            seen += count
            if seen >= rank:
                return _middle(bucket)
        return math.nan

    @property
    def mean(self) -> float:
        """The mean in ms; NaN where nothing was counted."""
        total = len(self)
        return sum(_middle(bucket) * count for bucket, count in self.counts.items()) / total if total else math.nan

    def to_json(self) -> dict[str, int]:
        """As JSON values; `from_json` reads them back."""
        return {str(bucket): count for bucket, count in sorted(self.counts.items())}

    @classmethod
    def from_json(cls, body: Mapping[str, int]) -> Histogram:
        """Read what `to_json` wrote."""
        return cls({int(bucket): count for bucket, count in body.items()})


def merged(histograms: Iterable[Histogram]) -> Histogram:
    """All counts together."""
    found = Histogram()
    for histogram in histograms:
        for bucket, count in histogram.counts.items():
            found.counts[bucket] = found.counts.get(bucket, 0) + count
    return found


def _middle(bucket: int) -> float:
    return _LEAST_MS * math.exp((bucket + 0.5) * _STEP)
