"""A latency histogram with buckets of equal relative width: mergeable, small as JSON, percentiles within 0.25 %."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

#: A bucket ends at 1.005 times its beginning.
_STEP = math.log(1.005)
_LEAST_MS = 1e-3


@dataclass
class Histogram:
    """Counts of latencies in ms by bucket. Not thread-safe."""

    counts: dict[int, int] = field(default_factory=dict)

    def add(self, milliseconds: float) -> None:
        """Count one latency. Anything below a microsecond counts as a microsecond."""
        bucket = int(math.log(max(milliseconds, _LEAST_MS) / _LEAST_MS) / _STEP)
        self.counts[bucket] = self.counts.get(bucket, 0) + 1

    def __len__(self) -> int:
        return sum(self.counts.values())

    def percentile(self, share: float) -> float:
        """Return the latency in ms that ``share`` (above 0, to 100) percent do not exceed. NaN if it is empty.

        It is the middle of a bucket: the lowest one with at least that share at or below it (nearest rank).
        """
        rank, seen = max(1, math.ceil(len(self) * share / 100)), 0
        for bucket, count in sorted(self.counts.items()):
            seen += count
            if seen >= rank:
                return _middle(bucket)
        return math.nan

    @property
    def mean(self) -> float:
        """The mean in ms. NaN if it is empty."""
        total = len(self)
        return sum(_middle(bucket) * count for bucket, count in self.counts.items()) / total if total else math.nan

    def to_json(self) -> dict[str, int]:
        """Return JSON values. `from_json` reads them back."""
        return {str(bucket): count for bucket, count in sorted(self.counts.items())}

    @classmethod
    def from_json(cls, body: Mapping[str, int]) -> Histogram:
        """Read the result of `to_json`."""
        return cls({int(bucket): count for bucket, count in body.items()})


def merged(histograms: Iterable[Histogram]) -> Histogram:
    """Return all counts together."""
    found = Histogram()
    for histogram in histograms:
        for bucket, count in histogram.counts.items():
            found.counts[bucket] = found.counts.get(bucket, 0) + count
    return found


def _middle(bucket: int) -> float:
    return _LEAST_MS * math.exp((bucket + 0.5) * _STEP)
