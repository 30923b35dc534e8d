"""Accuracy that was measured before an artifact was packed. It is stored in ``serving.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import CardError
from . import fields
from .execution import Execution

_MOST_IMAGES = 1 << 40
#: A score may be far below that of a guess, if it is a share of an error that is explained.
_LEAST_SCORE = -1e12
_FIELDS = {"execution", "low", "high", "images"}


@dataclass(frozen=True)
class Evidence:
    """The accuracy of an artifact with one execution. JSON has the score under the name of its metric.

    Attributes:
        execution: the execution, on ``cpu`` or ``cuda``.
        metric: name of the task's score.
        score: its value, at most 1.
        low: lower end of its 95 % interval.
        high: upper end.
        images: number of images. The card names the data.
    """

    execution: Execution
    metric: str
    score: float
    low: float
    high: float
    images: int

    def __post_init__(self) -> None:
        if not isinstance(self.execution, Execution):
            raise CardError(f"evidence: an execution must be a JSON object, found {fields.shown(self.execution)}")
        fields.text("evidence: the metric", self.metric)
        for name, value in ((self.metric, self.score), ("low", self.low), ("high", self.high)):
            fields.number(f"evidence: {name[:40]}", value, _LEAST_SCORE, 1.0)
        if not self.low <= self.score <= self.high:
            raise CardError(
                f"evidence: {self.metric[:40]} must lie in its interval, found {self.low} {self.score} {self.high}"
            )
        fields.whole("evidence: images", self.images, 1, _MOST_IMAGES)

    def holds_for(self, execution: Execution) -> bool:
        """Whether an execution computes the same. Threads, buckets and the index of the GPU make no difference."""
        mine = (self.execution.engine, self.execution.device_type, dict(self.execution.options))
        return mine == (execution.engine, execution.device_type, dict(execution.options))

    def to_json(self) -> dict[str, Any]:
        """Return JSON values. `from_json` reads them back to an equal record."""
        return {
            "execution": self.execution.to_json(),
            self.metric: self.score,
            "low": self.low,
            "high": self.high,
            "images": self.images,
        }

    @classmethod
    def from_json(cls, body: object) -> Evidence:
        """Read the result of `to_json`.

        Raises:
            CardError: a field is missing, unknown or out of range.
            UserError: the execution is invalid.
        """
        metrics = set(body) - _FIELDS if isinstance(body, Mapping) else set()
        if not isinstance(body, Mapping) or len(metrics) != 1 or not set(body) >= _FIELDS:
            raise CardError(
                f"evidence must have the fields {', '.join(sorted(_FIELDS))} and one score, found {fields.shown(body)}"
            )
        own = {name: body[name] for name in _FIELDS - {"execution"}}
        (metric,) = metrics
        return cls(Execution.from_json(body["execution"]), metric, body[metric], **own)


def evidence_for(evidence: tuple[Evidence, ...], execution: Execution) -> dict[str, Any] | None:
    """Return the known accuracy of an execution, for a person. None: it is unknown."""
    for entry in evidence:
        if entry.holds_for(execution):
            return {name: value for name, value in entry.to_json().items() if name != "execution"}
    return None
