"""``embeddings``: an image gets a vector of length one. Images are alike if the products of their vectors are large."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ..card import fields
from ..display import Described
from ..errors import CardError, Refusal
from .base import Outcome, Task, TensorType, register

if TYPE_CHECKING:  # see `base`
    from ..card.card import Card
    from ..card.known_answer import KnownAnswer
    from ..card.serving import Serving
    from ..images.placement import Placement
    from ..outputs import Outputs

#: Largest allowed distance of a known vector: one minus its cosine.
TOLERANCE: Final = 0.05
#: Decimals of a vector's numbers. Those of float32 vectors of length one are no more precise.
_DECIMALS: Final = 7

_NOT_FINITE = Refusal(500, "the network returned NaN or infinity for the image")
_NOTHING = Refusal(500, "the network returned only zeros for the image, which have no direction")


@dataclass(frozen=True)
class Embedded(Described):
    """An answer: a vector of length one."""

    vector: tuple[float, ...]


@register
class Embeddings(Task):
    """A request can choose nothing. An answer is an `Embedded`."""

    name = "embeddings"

    def __init__(self, card: Card) -> None:
        super().__init__(card)
        self.reading = "a vector of any length; divided by its length it can be compared with others"
        self.tensors = {"embedding": TensorType("FP32", (-1,))}

    def described(self) -> dict[str, Any]:
        """Return how vectors are compared."""
        return {"length": 1, "compare": "cosine"}

    def options(self, parameters: Mapping[str, Any], serving: Serving | None = None) -> None:
        """Return nothing: there is no choice."""

    def size(self, options: None) -> int:
        """Return about how many numbers a vector has."""
        return 512

    def answers(self, outputs: Outputs, options: Sequence[None], placements: Sequence[Placement]) -> list[Outcome]:
        """Return each row divided by its length."""
        vectors = outputs[0]
        finite = vectors.isfinite().all(dim=1).tolist()
        # Large numbers have squares beyond float32.
        largest = vectors.abs().amax(dim=1, keepdim=True)
        scaled = vectors / largest.clamp_min(1e-38)
        rows = (scaled / scaled.norm(dim=1, keepdim=True).clamp_min(1e-38)).tolist()
        some = (largest[:, 0] > 0).tolist()
        return [
            _NOT_FINITE if not good else Embedded(tuple(round(value, _DECIMALS) for value in row)) if any_ else _NOTHING
            for row, good, any_ in zip(rows, finite, some, strict=True)
        ]

    def json(self, answer: Embedded) -> str:
        """Return ``{"embedding": […]}``."""
        return json.dumps({"embedding": answer.vector}, allow_nan=False)

    @classmethod
    def lines(cls, answer: Any) -> list[str]:
        """Return the number of numbers and the first of them."""
        vector = answer["embedding"]
        return [f"{len(vector)} numbers: {' '.join(f'{value:.4f}' for value in vector[:8])}{' …' * (len(vector) > 8)}"]

    def tensor(self, name: str, answers: Sequence[Embedded], options: None) -> tuple[tuple[int, ...], list[float]]:
        """Return the vectors."""
        return (len(answers[0].vector),), [value for answer in answers for value in answer.vector]

    def known(self, outputs: Outputs, placement: Placement) -> dict[str, Any]:
        """Return the vector and the tolerance."""
        (answer,) = self.answers(outputs, [None], [placement])
        if isinstance(answer, Refusal):
            raise CardError(answer.message)
        return {"embedding": list(answer.vector), "tolerance": TOLERANCE}

    def check_known(self, known: KnownAnswer) -> None:
        """See `Task`."""
        super().check_known(known)
        _vector(known.facts)

    @classmethod
    def compared(cls, facts: Mapping[str, Any], answer: Any) -> tuple[str, str]:
        """Compare the direction of the vector with the known one."""
        tolerance = facts.get("tolerance", TOLERANCE)
        fields.number("known: tolerance", tolerance, 0.0, 2.0)
        distance = _distance(_vector(facts), answer["embedding"])
        said = f"its cosine with the known vector is {1 - distance:.4f}"
        return f"{said}, less than the allowed {1 - tolerance:.4f}" if distance > tolerance else "", (
            f"{said}, allowed {1 - tolerance:.4f}"
        )

    @classmethod
    def fault(cls, reference: Any, answer: Any, tolerance: float) -> str:
        """Compare the direction of the vectors. The tolerance is one minus their cosine."""
        distance = _distance(reference["embedding"], answer["embedding"])
        return f"its cosine with the reference is {1 - distance:.4f}" if not distance <= tolerance else ""


def _vector(facts: Mapping[str, Any]) -> list[float]:
    """Return the vector of known facts.

    Raises:
        CardError: it is none of length one.
    """
    vector = facts.get("embedding")
    if not isinstance(vector, list) or not vector:
        raise CardError("known: embedding must be a list of numbers")
    for value in vector:
        fields.number("known: a number of the embedding", value, -1.001, 1.001)
    if abs(math.hypot(*vector) - 1) > 0.01:
        raise CardError(f"known: embedding has the length {math.hypot(*vector):.3g} instead of 1")
    return vector


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Return one minus the cosine of two vectors of length one. It is 2 if they have different numbers of numbers."""
    if len(one) != len(other):
        return 2.0
    return 1 - math.fsum(a * b for a, b in zip(one, other, strict=True))
