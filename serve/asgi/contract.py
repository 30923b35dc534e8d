"""What this server needs of a service of the runtime, and no more."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from serve.runtime.predictor import Outcome
from serve.runtime.protocol import Request


class Stages(Protocol):
    """Where the time of one request went, in milliseconds."""

    @property
    def queue(self) -> float: ...  # noqa: D102
    @property
    def decode(self) -> float: ...  # noqa: D102
    @property
    def preprocess(self) -> float: ...  # noqa: D102
    @property
    def infer(self) -> float: ...  # noqa: D102
    @property
    def postprocess(self) -> float: ...  # noqa: D102


class Answered(Protocol):
    """The outcomes of one request's images, in order."""

    @property
    def outcomes(self) -> tuple[Outcome, ...]: ...  # noqa: D102
    @property
    def stages(self) -> Stages: ...  # noqa: D102
    @property
    def batch_size(self) -> int: ...  # noqa: D102


class Service(Protocol):
    """An opened artifact that many threads may ask."""

    def submit(self, request: Request, *, deadline: float | None = None) -> Future[Answered]:  # noqa: D102
        ...

    def drain(self, timeout_s: float) -> bool:  # noqa: D102
        ...

    def close(self) -> None:  # noqa: D102
        ...

    @property
    def waiting(self) -> int: ...  # noqa: D102
