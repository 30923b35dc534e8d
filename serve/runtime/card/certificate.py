"""The parity certificate: how close each engine's answers are to the exact result of an INT8 artifact's integers.

It is a part of the artifact's card. Nothing is measured here, and no engine reads it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from ..display import Described
from ..errors import CardError
from . import fields

#: Least share of the images, or of their parts, that must be answered as the reference answers them.
LEAST_AGREEMENT: Final = 0.995

_MOST_IMAGES = 1 << 40
_LARGEST = 1e30

_T = TypeVar("_T")


@dataclass(frozen=True)
class OutputAgreement(Described):
    """How close one execution's numbers are to the reference's, in one of the outputs behind the logits.

    Attributes:
        output: the output's name.
        sqnr_db: as in `Agreement`.
        max_abs: largest difference of two numbers.
        steps: the same in steps of the output's quantizer. None if there is none.
    """

    output: str
    sqnr_db: float | None
    max_abs: float
    steps: float | None

    def __post_init__(self) -> None:
        fields.text("certificate: an output", self.output)
        _check_closeness("certificate: an output", self)


@dataclass(frozen=True)
class Agreement(Described):
    """How close one execution's answers are to the reference's, on the same images.

    Attributes:
        execution: name of the execution, for example ``openvino``. In a graph's certificate ``torchscript`` ran the
            packed program from which the graph was made, with the same integers. All others ran the graph.
        agreements: shares of all images, or of their parts, with the reference's answer, 0 to 1, by the task's names.
            JSON has them beside the other fields. The first one decides.
        sqnr_db: 10 log10 of the energy of the reference's logits over that of the difference. None: the two are equal
            to the last bit, or the reference's are all zero.
        max_abs: largest difference of two logits.
        steps: the same in steps of the answer's quantizer, see `Certificate.step`. None if there is none.
        delta: the task's score minus the reference's, a fraction.
        low: lower end of its paired 95 % interval.
        high: upper end.
        gained: images that this execution answers better than the reference: of labels, those that only it has right.
        lost: images that the reference answers better.
        others: the outputs behind the logits, in the card's order.
    """

    execution: str
    agreements: Mapping[str, float]
    sqnr_db: float | None
    max_abs: float
    steps: float | None
    delta: float
    low: float
    high: float
    gained: int
    lost: int
    others: tuple[OutputAgreement, ...] = ()

    def __post_init__(self) -> None:
        where = "certificate: an agreement"
        fields.text(f"{where}'s execution", self.execution)
        if not self.agreements:
            raise CardError(f"{where} must have a share of equal answers")
        for name, share in self.agreements.items():
            fields.text(f"{where}'s name of a share", name)
            fields.number(f"{where}'s {name[:40]}", share, 0.0, 1.0)
        _check_closeness(where, self)
        for name in ("delta", "low", "high"):
            fields.number(f"{where}'s {name}", getattr(self, name), -1.0, 1.0)
        if not self.low <= self.delta <= self.high:
            raise CardError(f"{where}'s delta must lie in its interval, found {self.low} {self.delta} {self.high}")
        for name in ("gained", "lost"):
            fields.whole(f"{where}'s {name}", getattr(self, name), 0, _MOST_IMAGES)
        for entry in fields.sequence(f"{where}'s others", self.others):
            if not isinstance(entry, OutputAgreement):
                raise CardError(f"{where}'s others must be JSON objects, found {fields.shown(entry)}")

    @property
    def agreement(self) -> float:
        """The first of the agreements."""
        return next(iter(self.agreements.values()))

    @property
    def holds(self) -> bool:
        """Whether enough answers are the reference's, and the interval of the score's difference contains 0."""
        return self.agreement >= LEAST_AGREEMENT and self.low <= 0 <= self.high


@dataclass(frozen=True, repr=False)
class Certificate(Described):
    """Answers of every execution of an artifact's integers, compared with those of the reference.

    The reference is torch's program of explicit quantizers around float operators, with the same integers as the
    artifact. It defines their meaning. Answers are compared over the whole evaluation set. Logits (``sqnr_db``,
    ``max_abs``, ``steps``) are compared on ``logits_of`` of its images, at equal distances.

    Attributes:
        reference: SHA-256 of the reference program.
        step: scale of the last quantizer before the answer, with only operators that move numbers in between. None if
            the last operator computes in float.
        images: number of images.
        logits_of: number of images whose logits were compared.
        data: fingerprint of the images.
        agreements: the comparisons, by execution.
        absent: executions that were not compared, with the reason.
        cpu: the processor on which all of them ran.
        versions: versions of the libraries.
        key: key of the object in the store that holds it.
    """

    reference: str
    step: float | None
    images: int
    logits_of: int
    data: str
    agreements: tuple[Agreement, ...]
    absent: Mapping[str, str] = field(default_factory=dict)
    cpu: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    key: str = ""

    def __post_init__(self) -> None:
        for name in ("reference", "data", "cpu", "key"):
            fields.text(f"certificate: {name}", getattr(self, name))
        if self.step is not None:
            fields.number("certificate: step", self.step, 0.0, _LARGEST)
        fields.whole("certificate: images", self.images, 1, _MOST_IMAGES)
        fields.whole("certificate: logits_of", self.logits_of, 1, self.images)
        for entry in fields.sequence("certificate: agreements", self.agreements):
            if not isinstance(entry, Agreement):
                raise CardError(f"certificate: agreements must be JSON objects, found {fields.shown(entry)}")
        for name in ("absent", "versions"):
            for key, value in fields.mapping(f"certificate: {name}", getattr(self, name)).items():
                fields.text(f"certificate: {name}: {key[:40]}", value, longest=10_000)

    @property
    def holds(self) -> bool:
        """Whether at least one execution was compared, and all of them agree."""
        return bool(self.agreements) and all(entry.holds for entry in self.agreements)

    def to_json(self) -> dict[str, Any]:
        """Return JSON values. `from_json` reads them back to an equal record."""
        return {**dataclasses.asdict(self), "agreements": [_as_json(entry) for entry in self.agreements]}

    @classmethod
    def from_json(cls, body: object) -> Certificate:
        """Read the result of `to_json`.

        Raises:
            CardError: a field is missing, unknown or out of range.
        """
        found = dict(_known_fields(cls, body))
        agreements = found.get("agreements")
        if not isinstance(agreements, list | tuple):
            raise CardError(f"certificate: agreements must be a list, found {fields.shown(agreements)}")
        made = tuple(_agreement(entry) for entry in agreements)
        return _made(cls, {**found, "agreements": made})


def _check_closeness(where: str, found: Agreement | OutputAgreement) -> None:
    if found.sqnr_db is not None:
        fields.number(f"{where}'s sqnr_db", found.sqnr_db, -1000.0, 1000.0)
    fields.number(f"{where}'s max_abs", found.max_abs, 0.0, _LARGEST)
    if found.steps is not None:
        fields.number(f"{where}'s steps", found.steps, 0.0, _LARGEST)


def _as_json(agreement: Agreement) -> dict[str, Any]:
    """Return JSON values. The most usual network has no other output, and no field for it."""
    body: dict[str, Any] = {}
    for name, value in dataclasses.asdict(agreement).items():
        body |= value if name == "agreements" else {name: value}
    others = list(body.pop("others"))
    return {**body, "others": others} if others else body


def _agreement(body: object) -> Agreement:
    if not isinstance(body, Mapping):
        raise CardError(f"certificate: an agreement must be a JSON object, not {fields.shown(body)}")
    own = {entry.name for entry in dataclasses.fields(Agreement)} - {"agreements"}
    found = {name: value for name, value in body.items() if name in own}
    found["agreements"] = {name: value for name, value in body.items() if name not in own}
    others = found.get("others", ())
    if not isinstance(others, list | tuple):
        raise CardError(f"certificate: others must be a list, found {fields.shown(others)}")
    found["others"] = tuple(_made(OutputAgreement, _known_fields(OutputAgreement, entry)) for entry in others)
    return _made(Agreement, found)


def _known_fields(kind: type[Any], body: object) -> Mapping[str, Any]:
    names = {entry.name for entry in dataclasses.fields(kind)}
    if not isinstance(body, Mapping) or not set(body) <= names:
        raise CardError(
            f"certificate: {kind.__name__} has the fields {', '.join(sorted(names))}, not {fields.shown(body)}"
        )
    return body


def _made(kind: type[_T], body: Mapping[str, Any]) -> _T:
    try:
        return kind(**body)
    except TypeError as error:
        raise CardError(f"certificate: {kind.__name__} is incomplete ({error})") from None
