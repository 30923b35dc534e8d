"""How requests are sent, and what was found: the records that go to the generator's process and come back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from serve.load.answer_check import GOOD
from serve.load.histogram import Histogram, merged
from serve.runtime.errors import UserError


@dataclass(frozen=True)
class Target:
    """Where requests go.

    Attributes:
        address: ``host:port``, or ``unix:/path/of/a/socket``.
        path: of the request, such as ``/predictions/NAME``.
        headers: sent with each request, such as a token.
    """

    address: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """One run of the generator.

    Attributes:
        target: where requests go.
        clients: closed loop: connections, each of which sends when its answer has come; open loop: most connections.
        rate: open loop: mean arrivals a second, with exponential gaps (a Poisson process); None: closed loop.
        seconds: what is counted.
        warm_s: seconds of the same load before, which are not counted.
        timeout_s: an answer that takes longer is lost, and its connection closed.
        give_up_ms: end the run when a request has waited this long, counted from when it was due; None: never.
        seed: of the order of requests and of the gaps.
        spread: open loop: connections that are opened before one is used again, and used in turns then, for a server of
            several processes, which get whole connections; 0: the fewest that do.
    """

    target: Target
    clients: int = 1
    rate: float | None = None
    seconds: float = 5.0
    warm_s: float = 0.5
    timeout_s: float = 30.0
    give_up_ms: float | None = None
    seed: int = 0
    spread: int = 0

    def __post_init__(self) -> None:
        if self.clients < 1:
            raise UserError(f"clients must be at least 1, got {self.clients}")
        if self.rate is not None and not (math.isfinite(self.rate) and self.rate > 0):
            raise UserError(f"rate must be above 0 requests a second, got {self.rate}")
        for name in ("seconds", "timeout_s"):
            if not (math.isfinite(value := getattr(self, name)) and value > 0):
                raise UserError(f"{name} must be above 0 seconds, got {value}")

    def to_json(self) -> dict[str, Any]:
        """As JSON values; `from_json` reads them back."""
        return {**dataclasses.asdict(self), "target": {**vars(self.target), "headers": dict(self.target.headers)}}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Plan:
        """Read what `to_json` wrote."""
        return cls(**{**body, "target": Target(**body["target"])})


@dataclass(frozen=True)
class Result:
    """What one run found; of what was due (open loop) or answered (closed loop) in the seconds that count.

    Attributes:
        seconds: counted ones; fewer than planned where it gave up.
        counts: requests by verdict.
        latency: of those answered or refused as known; in the open loop from when the request was due.
        rejection: of those rejected.
        cpu_s: CPU time of the generator's process in those seconds.
        came: known answers that came in those seconds, whenever their requests were due.
        stages: mean ms by name, as the server's ``Server-Timing`` headers told.
        faults: some of what was wrong, failed or lost, in words.
        gave_up: whether a request waited longer than the plan allows.
        late_ms: open loop: the most that the generator itself was late with a request for which it had a connection. As
            long was it kept from the processor, and what was due meanwhile came at once.
    """

    seconds: float
    counts: Mapping[str, int]
    latency: Histogram
    rejection: Histogram
    cpu_s: float
    came: int
    stages: Mapping[str, float] = field(default_factory=dict)
    faults: tuple[str, ...] = ()
    gave_up: bool = False
    late_ms: float = 0.0

    @property
    def good(self) -> int:
        """Requests that got their known answer."""
        return sum(self.counts.get(verdict, 0) for verdict in GOOD)

    @property
    def throughput(self) -> float:
        """Known answers a second, by when they came: of what was due, some waits in a queue that fills meanwhile."""
        return self.came / self.seconds if self.seconds else 0.0

    @property
    def bad(self) -> int:
        """Requests that got a wrong answer, an error of the server's, or none; being full is not counted."""
        return sum(self.counts.get(verdict, 0) for verdict in ("wrong", "failed", "lost"))

    def to_json(self) -> dict[str, Any]:
        """As JSON values; `from_json` reads them back."""
        return {
            **dataclasses.asdict(self),
            "latency": self.latency.to_json(),
            "rejection": self.rejection.to_json(),
            "counts": dict(self.counts),
            "stages": dict(self.stages),
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Result:
        """Read what `to_json` wrote."""
        return cls(
            **{
                **body,
                "latency": Histogram.from_json(body["latency"]),
                "rejection": Histogram.from_json(body["rejection"]),
                "faults": tuple(body["faults"]),
            }
        )


def pooled(results: list[Result]) -> Result:
    """Several runs as one; stages are the mean of the runs'."""
    names = {name for result in results for name in result.stages}
    told = {name: [result.stages[name] for result in results if name in result.stages] for name in names}
    return Result(
        seconds=sum(result.seconds for result in results),
        counts={
            verdict: sum(result.counts.get(verdict, 0) for result in results)
            for verdict in {name for result in results for name in result.counts}
        },
        latency=merged(result.latency for result in results),
        rejection=merged(result.rejection for result in results),
        cpu_s=sum(result.cpu_s for result in results),
        came=sum(result.came for result in results),
        stages={name: sum(values) / len(values) for name, values in told.items()},
        faults=tuple(fault for result in results for fault in result.faults)[:8],
        gave_up=any(result.gave_up for result in results),
        late_ms=max((result.late_ms for result in results), default=0.0),
    )
