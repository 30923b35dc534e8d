"""The plan and the result of a run: the records passed to the generator's process and back."""

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
    """The target of the requests.

    Attributes:
        address: ``host:port``, or ``unix:/path/of/a/socket``.
        path: path of the requests, for example ``/predictions/NAME``.
        headers: sent with each request, for example a token.
    """

    address: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """One run of the generator.

    Attributes:
        target: the target of the requests.
        clients: closed loop: number of connections, each of which sends after its answer. Open loop: most connections.
        rate: open loop: mean arrivals a second, with exponential gaps (a Poisson process). None: closed loop.
        seconds: the counted time.
        warm_s: seconds of the same load before, which are not counted.
        timeout_s: seconds after which an answer is lost, and its connection closed.
        give_up_ms: end the run when a request waits this long from when it was due. None: never.
        seed: seed for the order of requests and the gaps.
        spread: open loop: connections to open before one is used again. They are then used in turns, because a server
            of several processes gets whole connections. 0: as few as possible.
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
        """Return JSON values. `from_json` reads them back."""
        return {**dataclasses.asdict(self), "target": {**vars(self.target), "headers": dict(self.target.headers)}}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Plan:
        """Read the result of `to_json`."""
        return cls(**{**body, "target": Target(**body["target"])})


@dataclass(frozen=True)
class Result:
    """The result of one run, for requests due (open loop) or answered (closed loop) in the counted seconds.

    Attributes:
        seconds: the counted seconds. Fewer than planned if it gave up.
        counts: requests by verdict.
        latency: latencies of known answers and refusals. In the open loop from when the request was due.
        rejection: latencies of rejected requests.
        cpu_s: CPU time of the generator's process in those seconds.
        came: known answers that arrived in those seconds, whenever their requests were due.
        stages: mean ms by name, from the server's ``Server-Timing`` headers.
        faults: examples of wrong, failed or lost requests, in words.
        gave_up: whether a request waited longer than the plan allows.
        late_ms: open loop: longest delay of the generator itself for a request with a free connection. It had no
            processor for that time, and the requests due meanwhile were sent together.
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
        """Number of requests with their known answer."""
        return sum(self.counts.get(verdict, 0) for verdict in GOOD)

    @property
    def throughput(self) -> float:
        """Known answers a second, by when they arrived, because a filling queue delays some of the due requests."""
        return self.came / self.seconds if self.seconds else 0.0

    @property
    def bad(self) -> int:
        """Number of requests with a wrong answer, a server error, or no answer. A full server is not counted."""
        return sum(self.counts.get(verdict, 0) for verdict in ("wrong", "failed", "lost"))

    def to_json(self) -> dict[str, Any]:
        """Return JSON values. `from_json` reads them back."""
        return {
            **dataclasses.asdict(self),
            "latency": self.latency.to_json(),
            "rejection": self.rejection.to_json(),
            "counts": dict(self.counts),
            "stages": dict(self.stages),
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Result:
        """Read the result of `to_json`."""
        return cls(
            **{
                **body,
                "latency": Histogram.from_json(body["latency"]),
                "rejection": Histogram.from_json(body["rejection"]),
                "faults": tuple(body["faults"]),
            }
        )


def pooled(results: list[Result]) -> Result:
    """Combine several runs into one. Stages are the mean of the runs'."""
    names = {name for result in results for name in result.stages}
    stage_values = {name: [result.stages[name] for result in results if name in result.stages] for name in names}
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
        stages={name: sum(values) / len(values) for name, values in stage_values.items()},
        faults=tuple(fault for result in results for fault in result.faults)[:8],
        gave_up=any(result.gave_up for result in results),
        late_ms=max((result.late_ms for result in results), default=0.0),
    )
