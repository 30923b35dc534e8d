"""``regression``: an image gets a number for each name of the card, in the unit of the training targets.

With a request's parameter ``spread``, or its header ``X-Spread``, of ``1`` each number comes with the mean distance of
the training targets from their median. A difference is large or small beside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from ..card import fields
from ..display import Described
from ..errors import CardError, Refusal, RequestError
from .base import Outcome, Task, TensorType, register, text_of

if TYPE_CHECKING:  # see `base`
    from ..card.card import Card
    from ..card.known_answer import KnownAnswer
    from ..card.serving import Serving
    from ..images.placement import Placement
    from ..outputs import Outputs

#: Largest allowed difference of a known number, as a share of the spread.
TOLERANCE: Final = 0.2

_NOT_FINITE = Refusal(500, "the network returned NaN or infinity for the image")
_LARGEST: Final = 3.5e38


@dataclass(frozen=True)
class Numbers(Described):
    """An answer: a number for each name, and whether each is written with its spread."""

    values: tuple[float, ...]
    spread: bool = False


@register
class Regression(Task):
    """Options say whether spreads are wanted. An answer is a `Numbers`."""

    name = "regression"
    parameters = ("spread",)
    headers: ClassVar[Mapping[str, str]] = {"x-spread": "spread"}
    complete: ClassVar[Mapping[str, str]] = {"spread": "1"}

    def __init__(self, card: Card) -> None:
        super().__init__(card)
        self._names = card.classes
        if not self._names:
            raise CardError(f"{card.name}: the card has no names of numbers")
        self._spread = _spreads(card.data.get("spread"), len(self._names))
        self.reading = "a number for each name in `labels.txt`, in their order"
        self.tensors = {"values": TensorType("FP32", (len(self._names),))}

    def described(self) -> dict[str, Any]:
        """Return the names of the numbers in the order of the tensor, and their spreads in the training data."""
        return {"numbers": list(self._names), "spread": list(self._spread)}

    def options(self, parameters: Mapping[str, Any], serving: Serving | None = None) -> bool:
        """Return whether spreads are wanted."""
        value = parameters.get("spread", "0")
        text = text_of(value)
        if text not in ("0", "1"):
            raise RequestError(f"spread must be 0 or 1, got {text[:40]!r}")
        return text == "1"

    def size(self, options: bool) -> int:
        """Return the number of numbers."""
        return len(self._names)

    def answers(self, outputs: Outputs, options: Sequence[bool], placements: Sequence[Placement]) -> list[Outcome]:
        """Return the numbers of each row."""
        numbers = outputs[0]
        finite = numbers.isfinite().all(dim=1).tolist()
        return [
            Numbers(tuple(row), spread) if good else _NOT_FINITE
            for row, spread, good in zip(numbers.tolist(), options, finite, strict=True)
        ]

    def json(self, answer: Numbers) -> str:
        """Return ``[{"label": …, "index": …, "value": …}, …]``, with ``spread`` in each if it is wanted."""
        rows: list[dict[str, Any]] = [
            {"label": name, "index": index, "value": value}
            for index, (name, value) in enumerate(zip(self._names, answer.values, strict=True))
        ]
        if answer.spread:
            for row, spread in zip(rows, self._spread, strict=True):
                row["spread"] = spread
        return json.dumps(rows, allow_nan=False)

    @classmethod
    def lines(cls, answer: Any) -> list[str]:
        """Return number and name of each."""
        return [f"{entry['value']:12.6g}  {entry['label']}" for entry in answer]

    def tensor(
        self,
        name: str,
        answers: Sequence[Numbers],
        options: bool,
    ) -> tuple[tuple[int, ...], list[float]]:
        """Return a column for each number."""
        return (len(self._names),), [value for answer in answers for value in answer.values]

    def known(self, outputs: Outputs, placement: Placement) -> dict[str, Any]:
        """Return the numbers, their spreads, and the tolerance."""
        return {"values": outputs[0][0].tolist(), "spread": list(self._spread), "tolerance": TOLERANCE}

    def check_known(self, known: KnownAnswer) -> None:
        """See `Task`. There must be a number for each name."""
        super().check_known(known)
        values, _, _ = _facts(known.facts)
        if len(values) != len(self._names):
            raise CardError(f"has {len(values)} numbers for {len(self._names)} names")

    @classmethod
    def compared(cls, facts: Mapping[str, Any], answer: Any) -> tuple[str, str]:
        """Compare each number with the known one, in units of its spread."""
        values, spreads, tolerance = _facts(facts)
        found = [entry["value"] for entry in answer]
        if len(found) != len(values):
            return f"it has {len(found)} numbers instead of {len(values)}", ""
        worst = max(abs(a - b) / unit for a, b, unit in zip(found, values, spreads, strict=True))
        said = f"a number is off by {worst:.2g} of the spread of its targets"
        return f"{said}, more than the allowed {tolerance:.2g}" if worst > tolerance else "", (
            f"numbers within {worst:.2g} of the spread of their targets, allowed {tolerance:.2g}"
        )

    @classmethod
    def fault(cls, reference: Any, answer: Any, tolerance: float) -> str:
        """Compare each number. The tolerance is a share of its spread."""
        if len(reference) != len(answer):
            return f"it has {len(answer)} numbers instead of {len(reference)}"
        for known, found in zip(reference, answer, strict=True):
            if not abs(found["value"] - known["value"]) <= tolerance * known["spread"]:
                return f"{known['label']} is {found['value']:.6g} instead of {known['value']:.6g}"
        return ""


def _spreads(found: Any, count: int) -> tuple[float, ...]:
    """Return the spreads of a card. They are 1 if it has none."""
    if found is None:
        return (1.0,) * count
    spreads = tuple(fields.sequence("card: data: spread", tuple(found) if isinstance(found, list) else found))
    for spread in spreads:
        fields.number("card: data: a spread", spread, 1e-38, _LARGEST)
    if len(spreads) != count:
        raise CardError(f"card: data: spread has {len(spreads)} numbers for {count} names")
    return spreads


def _facts(facts: Mapping[str, Any]) -> tuple[list[float], tuple[float, ...], float]:
    """Return values, spreads and tolerance of known facts.

    Raises:
        CardError: one is missing, or of another kind.
    """
    if set(facts) != {"values", "spread", "tolerance"} or not isinstance(facts["values"], list) or not facts["values"]:
        raise CardError("known: a list of values, their spreads and a tolerance are needed")
    for value in facts["values"]:
        fields.number("known: a value", value, -_LARGEST, _LARGEST)
    fields.number("known: tolerance", facts["tolerance"], 0.0, 1e6)
    return facts["values"], _spreads(facts["spread"], len(facts["values"])), facts["tolerance"]
