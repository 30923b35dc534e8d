"""Accuracy that was measured before an artifact was packed. It is stored in ``serving.json``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import CardError
from . import fields
from .execution import Execution

_MOST_IMAGES = 1 << 40


@dataclass(frozen=True)
class Evidence:
    """The accuracy of an artifact with one execution.

    Attributes:
        execution: the execution, on ``cpu`` or ``cuda``.
        top1: share of the images whose best class was right, 0 to 1.
        low: lower end of its 95 % interval (Wilson 1927).
        high: upper end.
        images: number of images. The card names the data.
    """

    execution: Execution
    top1: float
    low: float
    high: float
    images: int

    def __post_init__(self) -> None:
        if not isinstance(self.execution, Execution):
            raise CardError(f"evidence: an execution must be a JSON object, found {fields.shown(self.execution)}")
        for name in ("top1", "low", "high"):
            fields.number(f"evidence: {name}", getattr(self, name), 0.0, 1.0)
        if not self.low <= self.top1 <= self.high:
            raise CardError(f"evidence: top1 must lie in its interval, found {self.low} {self.top1} {self.high}")
        fields.whole("evidence: images", self.images, 1, _MOST_IMAGES)

    def holds_for(self, execution: Execution) -> bool:
        """Whether an execution computes the same. Threads, buckets and the index of the GPU make no difference."""
        mine = (self.execution.engine, self.execution.device_type, dict(self.execution.options))
        return mine == (execution.engine, execution.device_type, dict(execution.options))

    def to_json(self) -> dict[str, Any]:
        """Return JSON values. `from_json` reads them back to an equal record."""
        body = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}
        return {**body, "execution": self.execution.to_json()}

    @classmethod
    def from_json(cls, body: object) -> Evidence:
        """Read the result of `to_json`.

        Raises:
            CardError: a field is missing, unknown or out of range.
            UserError: the execution is invalid.
        """
        names = {entry.name for entry in dataclasses.fields(cls)}
        if not isinstance(body, Mapping) or set(body) != names:
            raise CardError(f"evidence must have the fields {', '.join(sorted(names))}, found {fields.shown(body)}")
        return cls(**{**body, "execution": Execution.from_json(body["execution"])})


def evidence_for(evidence: tuple[Evidence, ...], execution: Execution) -> dict[str, Any] | None:
    """Return the known accuracy of an execution, for a person. None: it is unknown."""
    for entry in evidence:
        if entry.holds_for(execution):
            return {name: value for name, value in entry.to_json().items() if name != "execution"}
    return None
