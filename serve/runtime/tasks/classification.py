"""``classification``: an image gets the most probable classes, best first.

A request's parameter ``k``, or its header ``X-Top-K``, is the number of classes in an answer.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, get_args

from ..card import fields
from ..card.card import Card, Probabilities
from ..display import Described
from ..errors import CardError, Refusal, RequestError
from .base import Outcome, Task, TensorType, register, text_of

if TYPE_CHECKING:  # see `base`
    import torch

    from ..card.known_answer import KnownAnswer
    from ..card.serving import Serving
    from ..images.placement import Placement
    from ..outputs import Outputs

# NaN and infinity cannot be ranked or written as JSON. A single image may cause them: half precision overflows.
_NOT_FINITE = Refusal(500, "the network returned NaN or infinity for the image")
# Number of classes if neither the request nor the serving settings say it.
_K = 5
# Largest ``k`` of a request. An answer has as many classes as there are.
_MOST = 10**9 - 1
#: Largest allowed difference of a log-probability, relative to the range (largest minus smallest) of the known logits.
#: Each logit may then differ by half of it. Two executions of one int8 artifact (ResNet-18 by OpenVINO and by ONNX
#: Runtime) differed by a sixtieth in their logits.
TOLERANCE: Final = 0.1
# Below it a float32 softmax has no digits left. Less probable classes count as equally improbable.
_LEAST = -60.0


@dataclass(frozen=True)
class Label(Described):
    """One class of an answer. ``probability`` is in [0, 1], see `probabilities_of`."""

    label: str
    index: int
    probability: float


def probabilities_of(logits: torch.Tensor, kind: Probabilities) -> torch.Tensor:
    """Convert logits ``(N, classes)`` to probabilities that sum to one, or to independent ones for ``sigmoid``."""
    return logits.sigmoid() if kind == "sigmoid" else logits.softmax(dim=1)


def parse_k(value: object) -> int:
    """Parse the number of classes.

    Raises:
        RequestError: the value is not a whole number from 1, or has more than nine digits.
    """
    text = text_of(value)
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < 1:
        raise RequestError(f"k must be a whole number from 1 to {_MOST}, got {text[:40]!r}")
    return int(text)


@dataclass(frozen=True)
class KnownLogits:
    """The facts of a known answer.

    Attributes:
        logits: one for each class.
        tolerance: see `TOLERANCE`.
        probabilities: how answers are made from logits, as in the card.
    """

    logits: tuple[float, ...]
    tolerance: float = TOLERANCE
    probabilities: Probabilities = "softmax"

    def __post_init__(self) -> None:
        for logit in fields.sequence("known: logits", self.logits):
            fields.number("known: a logit", logit, -3.5e38, 3.5e38)
        if not self.logits:
            raise CardError("known: the list of logits is empty")
        fields.number("known: tolerance", self.tolerance, 0.0, 1.0)
        fields.one_of("known: probabilities", self.probabilities, get_args(Probabilities))

    @classmethod
    def parsed(cls, facts: Mapping[str, Any]) -> KnownLogits:
        """Return the record of parsed JSON values.

        Raises:
            CardError: a field is unknown, missing, of the wrong type or out of range.
        """
        try:
            values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in facts.items()}
            return cls(**values)
        except TypeError as error:
            raise CardError(f"known: {error}") from None

    @property
    def allowed(self) -> float:
        """Largest allowed difference of a log-probability.

        A sigmoid compares each logit with 0. A single one has a range of at least 1, because it may be near 0.
        """
        if self.probabilities == "sigmoid":
            return self.tolerance * max(1.0, max(0.0, *self.logits) - min(0.0, *self.logits))
        return self.tolerance * (max(self.logits) - min(self.logits))

    def difference(self, probabilities: Sequence[float]) -> float:
        """Return the largest difference of log-probabilities from the known ones. Classes below e^-60 count as e^-60.

        Args:
            probabilities: of each class, in order.

        Returns:
            Infinity if their number differs from the known ones, or one is not a probability.
        """
        if len(probabilities) != len(self.logits) or not all(0.0 <= value <= 1.001 for value in probabilities):
            return math.inf
        found = (math.log(value) if value > 0 else _LEAST for value in probabilities)
        return max(abs(max(a, _LEAST) - max(b, _LEAST)) for a, b in zip(found, self._logarithms(), strict=True))

    def _logarithms(self) -> Sequence[float]:
        """Return the logarithms of the known probabilities."""
        if self.probabilities == "sigmoid":
            return [min(logit, 0.0) - math.log1p(math.exp(-abs(logit))) for logit in self.logits]
        largest = max(self.logits)
        total = largest + math.log(math.fsum(math.exp(logit - largest) for logit in self.logits))
        return [logit - total for logit in self.logits]


@register
class Classification(Task):
    """Options are ``k``, at most the number of all classes. An answer is a list of `Label`, best first."""

    name = "classification"
    parameters = ("k",)
    headers: ClassVar[Mapping[str, str]] = {"x-top-k": "k"}
    complete: ClassVar[Mapping[str, str]] = {"k": str(_MOST)}

    def __init__(self, card: Card) -> None:
        super().__init__(card)
        self._count = len(card.classes)
        if not self._count:
            raise CardError(f"{card.name}: the card's list of classes is empty")
        self.reading = f"a logit for each class in the order of `labels.txt`; {card.probabilities} gives probabilities"
        self.tensors = {
            "label": TensorType("BYTES", (-1,)),
            "index": TensorType("INT64", (-1,)),
            "probability": TensorType("FP32", (-1,)),
            "probabilities": TensorType("FP32", (self._count,)),
        }

    def described(self) -> dict[str, Any]:
        """Return the number of classes, and how their probabilities are made."""
        return {"classes": self._count, "probabilities": self.card.probabilities}

    def options(self, parameters: Mapping[str, Any], serving: Serving | None = None) -> int:
        """Return ``k``. By default it is the one in the serving settings, or 5."""
        k = parse_k(parameters["k"]) if "k" in parameters else _K if serving is None else serving.k
        return min(k, self._count)

    def size(self, options: int) -> int:
        """Return ``k``."""
        return options

    def answers(self, outputs: Outputs, options: Sequence[int], placements: Sequence[Placement]) -> list[Outcome]:
        """Return the best classes of each row, best first, equal ones by index."""
        logits = outputs[0]
        finite = logits.isfinite().all(dim=1).tolist()
        probabilities = probabilities_of(logits, self.card.probabilities)
        count = probabilities.shape[1]
        # One more than wanted, to see whether it ties with the last: topk returns any of equal values. For 8 rows of
        # 1000 classes a stable sort takes 0.3 ms, this 0.02 ms (torch 2.14).
        found = probabilities.topk(min(max(options, default=0) + 1, count), dim=1)
        values, order = found.values.tolist(), found.indices.tolist()
        outcomes: list[Outcome] = []
        for number, (best, indices, k) in enumerate(zip(values, order, options, strict=True)):
            if not finite[number]:
                outcomes.append(_NOT_FINITE)
                continue
            if len(set(best)) < len(best):
                row = probabilities[number].sort(descending=True, stable=True)
                best, indices = row.values.tolist(), row.indices.tolist()  # noqa: PLW2901
            classes = self.card.classes
            outcomes.append([Label(classes[i], i, value) for value, i in zip(best[:k], indices[:k], strict=True)])
        return outcomes

    def json(self, answer: Sequence[Label]) -> str:
        """Return ``[{"label": …, "index": …, "probability": …}, …]``."""
        return f"[{', '.join(_label_json(label.label, label.index) + _number(label.probability) for label in answer)}]"

    @classmethod
    def lines(cls, answer: Any) -> list[str]:
        """Return probability, number and name of each class."""
        return [f"{entry['probability']:.4f}  {entry['index']:4d}  {entry['label']}" for entry in answer]

    def widened(self, options: int, names: Sequence[str]) -> int:
        """Return the number of all classes if the output ``probabilities`` is wanted."""
        return self._count if "probabilities" in names else options

    def tensor(self, name: str, answers: Sequence[Sequence[Label]], options: int) -> tuple[tuple[int, ...], list[Any]]:
        """Return ``k`` columns, best class first, or for ``probabilities`` a column for each class."""
        if name != "probabilities":
            return (options,), [getattr(label, name) for labels in answers for label in labels[:options]]
        rows = [[0.0] * self._count for _ in answers]
        for row, labels in zip(rows, answers, strict=True):
            for label in labels:
                row[label.index] = label.probability
        return (self._count,), [*itertools.chain.from_iterable(rows)]

    def known(self, outputs: Outputs, placement: Placement) -> dict[str, Any]:
        """Return the logits with six digits, the tolerance, and how probabilities are made."""
        logits = [round(logit, 6) for logit in outputs[0][0].tolist()]
        return {"logits": logits, "tolerance": TOLERANCE, "probabilities": self.card.probabilities}

    def check_known(self, known: KnownAnswer) -> None:
        """See `Task`. Each class must have a logit."""
        super().check_known(known)
        logits = KnownLogits.parsed(known.facts).logits
        if len(logits) != self._count:
            raise CardError(f"has {len(logits)} logits for {self._count} classes")

    @classmethod
    def compared(cls, facts: Mapping[str, Any], answer: Any) -> tuple[str, str]:
        """Compare the probability of each class with the known one."""
        known = KnownLogits.parsed(facts)
        by_class = {entry["index"]: entry["probability"] for entry in answer}
        classes = range(max(len(known.logits), len(by_class)))
        difference = known.difference([by_class.get(index, -1.0) for index in classes])
        fault = f"a log-probability is off by {difference:.3g}, more than the allowed {known.allowed:.3g}"
        within = f"log-probabilities within {difference:.2g}, allowed {known.allowed:.2g}"
        return fault if difference > known.allowed else "", within

    @classmethod
    def fault(cls, reference: Any, answer: Any, tolerance: float) -> str:
        """Compare each listed probability, and check that these classes are the most probable ones."""
        known = {entry["index"]: entry["probability"] for entry in reference}
        # TorchServe's own handlers answer {"class": probability}.
        pairs = (
            [(int(index), value) for index, value in answer.items()]
            if isinstance(answer, dict)
            else [(entry["index"], entry["probability"]) for entry in answer]
        )
        if not pairs:
            return "no classes"
        for index, value in pairs:
            if not abs(value - known[index]) <= tolerance:
                return f"class {index} has {value:.4f} instead of {known[index]:.4f}"
        values = [value for _, value in pairs]
        best = sorted(known.values(), reverse=True)[: len(pairs)]
        if any(abs(mine - theirs) > tolerance for mine, theirs in zip(values, best, strict=True)):
            return f"its classes are not the most probable ones: {pairs}"
        if len({index for index, _ in pairs}) != len(pairs):
            return f"a class is listed twice: {pairs}"
        return ""


@functools.lru_cache(maxsize=1 << 16)
def _label_json(label: str, index: int) -> str:
    """Return the JSON of a class up to its probability. It is the same in all answers, so it is cached."""
    return f'{{"label": {json.dumps(label)}, "index": {index}, "probability": '


def _number(value: float) -> str:
    if not math.isfinite(value):
        raise ValueError(f"a probability must be a finite number, got {value}")
    return f"{value!r}}}"
