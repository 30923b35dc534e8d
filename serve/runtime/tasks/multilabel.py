"""``multilabel``: an image gets all classes whose probability reaches a threshold, the most probable first.

A request's parameter ``threshold``, or its header ``X-Threshold``, is a probability from 0 to 1, by default 0.5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from ..card.card import Card
from ..display import Described
from ..errors import CardError, Refusal, RequestError
from .base import Outcome, TensorType, register, text_of
from .classification import Classification, Label

if TYPE_CHECKING:  # see `base`
    from ..card.serving import Serving
    from ..images.placement import Placement
    from ..outputs import Outputs

_THRESHOLD: Final = 0.5


@dataclass(frozen=True)
class Labelled(Described):
    """An answer: the classes that reach a threshold, best first."""

    labels: tuple[Label, ...]
    threshold: float


@register
class MultiLabel(Classification):
    """Options are the threshold. An answer is a `Labelled`."""

    name = "multilabel"
    parameters = ("threshold",)
    headers: ClassVar[Mapping[str, str]] = {"x-threshold": "threshold"}
    complete: ClassVar[Mapping[str, str]] = {"threshold": "0"}

    def __init__(self, card: Card) -> None:
        super().__init__(card)
        if card.probabilities != "sigmoid":
            raise CardError(f"{card.name}: multilabel needs probabilities of a sigmoid, not of a {card.probabilities}")
        self.tensors = {
            "probabilities": TensorType("FP32", (self._count,)),
            "present": TensorType("UINT8", (self._count,)),
        }

    def described(self) -> dict[str, Any]:
        """Return the names of the classes in the order of the tensors, and the threshold of a request without one."""
        return {"classes": list(self.card.classes), "threshold": _THRESHOLD}

    def options(self, parameters: Mapping[str, Any], serving: Serving | None = None) -> float:  # type: ignore[override]
        """Return the threshold."""
        return parse_threshold(parameters["threshold"]) if "threshold" in parameters else _THRESHOLD

    def size(self, options: float) -> int:
        """Return the number of classes."""
        return self._count

    def answers(self, outputs: Outputs, options: Sequence[float], placements: Sequence[Placement]) -> list[Outcome]:
        """Return the classes from the threshold on, best first, equal ones by index."""
        found = super().answers(outputs, [self._count] * len(options), placements)
        return [
            outcome
            if isinstance(outcome, Refusal)
            else Labelled(tuple(label for label in outcome if label.probability >= least), least)
            for outcome, least in zip(found, options, strict=True)
        ]

    def json(self, answer: Labelled) -> str:  # type: ignore[override]
        """Return ``{"threshold": …, "classes": [{"label": …, "index": …, "probability": …}, …]}``."""
        return f'{{"threshold": {answer.threshold!r}, "classes": {super().json(answer.labels)}}}'

    @classmethod
    def lines(cls, answer: Any) -> list[str]:
        """Return probability, number and name of each class, or a line that says that there is none."""
        return super().lines(answer["classes"]) or [f"no class has a probability of {answer['threshold']:g}"]

    def widened(self, options: float, names: Sequence[str]) -> float:  # type: ignore[override]
        """Return the threshold that all classes reach if a tensor is wanted."""
        return 0.0 if names else options

    def tensor(  # type: ignore[override]
        self, name: str, answers: Sequence[Labelled], options: float
    ) -> tuple[tuple[int, ...], list[Any]]:
        """Return a column for each class: its probability, or 1 if that reaches the threshold."""
        shape, values = super().tensor("probabilities", [answer.labels for answer in answers], self._count)
        return shape, values if name == "probabilities" else [int(value >= options) for value in values]

    @classmethod
    def compared(cls, facts: Mapping[str, Any], answer: Any) -> tuple[str, str]:
        """Compare the probability of each class with the known one."""
        return super().compared(facts, answer["classes"])

    @classmethod
    def fault(cls, reference: Any, answer: Any, tolerance: float) -> str:
        """Compare each listed probability, and check that no class is missing that surely reaches the threshold."""
        known = {entry["index"]: entry["probability"] for entry in reference["classes"]}
        found = {entry["index"]: entry["probability"] for entry in answer["classes"]}
        if len(found) != len(answer["classes"]):
            return "a class is listed twice"
        for index, value in found.items():
            if not abs(value - known[index]) <= tolerance:
                return f"class {index} has {value:.4f} instead of {known[index]:.4f}"
        least = answer["threshold"] + tolerance
        missing = next((index for index, value in known.items() if index not in found and value > least), None)
        return "" if missing is None else f"class {missing} is missing, and has {known[missing]:.4f}"


def parse_threshold(value: object) -> float:
    """Parse a threshold.

    Raises:
        RequestError: it is not a number from 0 to 1.
    """
    text = text_of(value)
    try:
        threshold = float(text) if len(text) <= 40 else math.nan
    except ValueError:
        threshold = math.nan
    if not 0 <= threshold <= 1:
        raise RequestError(f"threshold must be a number from 0 to 1, got {text[:40]!r}")
    return threshold
