"""What was measured of an artifact before it was packed: evidence that travels with it, in ``serving.json``."""

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
    """The accuracy of an artifact as an execution runs it.

    Attributes:
        execution: what ran it, on ``cpu`` or ``cuda``.
        top1: part of the images whose best class was theirs, 0 to 1.
        low: lower end of its interval at 95 % (Wilson 1927).
        high: upper end.
        images: that it was measured on; the card says of which data.
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
        """Whether an execution computes the same: threads, buckets and which GPU it is make no difference."""
        mine = (self.execution.engine, self.execution.device_type, dict(self.execution.options))
        return mine == (execution.engine, execution.device_type, dict(execution.options))

    def to_json(self) -> dict[str, Any]:
        """As JSON values; `from_json` reads them back to an equal record."""
        body = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}
        return {**body, "execution": self.execution.to_json()}

    @classmethod
    def from_json(cls, body: object) -> Evidence:
        """Read what `to_json` wrote.

        Raises:
            CardError: a field is missing, unknown or out of range.
            UserError: the execution is none.
        """
        names = {entry.name for entry in dataclasses.fields(cls)}
        if not isinstance(body, Mapping) or set(body) != names:
            raise CardError(f"evidence must have the fields {', '.join(sorted(names))}, found {fields.shown(body)}")
        return cls(**{**body, "execution": Execution.from_json(body["execution"])})


def evidence_for(evidence: tuple[Evidence, ...], execution: Execution) -> dict[str, Any] | None:
    """What is known of an execution's accuracy, for a person; None: nothing."""
    for entry in evidence:
        if entry.holds_for(execution):
            return {name: value for name, value in entry.to_json().items() if name != "execution"}
    return None
