"""The settings of a measurement. They are apart from the code that measures, because reports are read without torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PlainSerializer, PlainValidator, field_validator

from serve.common.config import Config
from serve.runtime.card.execution import Execution
from serve.runtime.errors import UserError


def _wanted(body: object) -> str | Execution:
    if isinstance(body, str | Execution):
        return body
    try:
        return Execution.from_json(body)
    except UserError as error:
        raise ValueError(str(error)) from None


def _as_json(wanted: str | Execution) -> object:
    return wanted if isinstance(wanted, str) else wanted.to_json()


#: The name of an engine, which stands for its default settings on every measured device, or one execution as a mapping.
Wanted = Annotated[str | Execution, PlainValidator(_wanted), PlainSerializer(_as_json)]


class Timing(Config):
    """What to measure, and how to measure speed."""

    executions: tuple[Wanted, ...] | None = Field(
        default=None,
        description="engines that run the artifacts: names, or mappings such as {engine: openvino, threads: 1}; by "
        "default every engine that can. The baseline is always measured, because the rest is compared "
        "with it",
    )

    rounds: int = Field(default=8, ge=1, description="rounds of measurements for each variant at batch 1")
    processes: int = Field(
        default=4,
        ge=1,
        description="processes that time each variant, one after the other, with equal shares of the rounds: speed "
        "can differ between processes. Larger batch sizes are timed once in each process, or once in "
        "each round if there is one process",
    )
    batch_sizes: tuple[int, ...] = Field(
        default=(1, 8, 32),
        min_length=1,
        description="images per call; 1 must be among them, because latency is measured at batch 1",
    )
    seconds: float = Field(
        default=0.2, gt=0, description="length of one measurement of one variant at one batch size, in seconds"
    )
    minimum: int = Field(
        default=3, ge=1, description="minimum number of timed calls in a measurement; five times as many at batch 1"
    )
    warm_up: int = Field(default=2, ge=0, description="untimed calls before each measurement")

    @property
    def starts(self) -> tuple[int, ...]:
        """Return the rounds that begin in new processes, ascending from 0."""
        processes = min(self.processes, self.rounds)
        return tuple(number * self.rounds // processes for number in range(processes))

    @property
    def of_a_turn(self) -> dict[str, object]:
        """Return the settings that affect a turn, as JSON values: all but the choice of executions."""
        return self.model_dump(mode="json", exclude={"executions"})

    @field_validator("batch_sizes")
    @classmethod
    def _ascending_from_one(cls, sizes: tuple[int, ...]) -> tuple[int, ...]:
        if sorted(set(sizes)) != list(sizes) or sizes[0] != 1:
            raise ValueError(f"batch_sizes must ascend from 1, got {list(sizes)}")
        return sizes
