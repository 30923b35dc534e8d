"""The typed rows of a report, from the measurement to the page, and the report that consists of them.

Records only: nothing here measures, judges or formats, and nothing needs torch. Accuracies and their differences are
fractions, latencies are milliseconds at batch 1, sizes are bytes, durations are seconds. A measured pair is an artifact
and its execution, named as in `serve.runtime.engines.base.pair_id`.
"""

from __future__ import annotations

import datetime
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, PlainSerializer, PlainValidator, model_validator

from optimize.measure.figures import ClassFigures, Difference, Measured, Record, Timed
from optimize.measure.timing import Timing
from optimize.store.layer_effects import Effect
from optimize.store.training_history import History
from serve.runtime.card.card import Preprocessing
from serve.runtime.card.certificate import Certificate
from serve.runtime.card.execution import Execution
from serve.runtime.display import glance
from serve.runtime.errors import CardError, UserError

#: Version of ``report.json``.
SCHEMA: Final = 5


def _execution(body: object) -> Execution:
    try:
        return body if isinstance(body, Execution) else Execution.from_json(body)
    except UserError as error:
        raise ValueError(str(error)) from None


def _certificate(body: object) -> Certificate | None:
    try:
        return body if isinstance(body, Certificate | None) else Certificate.from_json(body)
    except CardError as error:
        raise ValueError(str(error)) from None


def _certificate_json(certificate: Certificate | None) -> dict[str, Any] | None:
    return certificate.to_json() if certificate else None


#: A `Certificate` or None, as a field of a record.
Parities = Annotated[Certificate | None, PlainValidator(_certificate), PlainSerializer(_certificate_json)]

#: An `Execution` as a field of a record.
RunBy = Annotated[Execution, PlainValidator(_execution), PlainSerializer(Execution.to_json)]


class Skip(Record):
    """Why a stage was not made, or its artifact not measured.

    ``not_applicable``: the pass has nothing to do for this model. ``cannot_run_here``: this machine or device lacks a
    requirement. ``parent_skipped``: its parent was not made. ``failed``: an error.
    """

    kind: Literal["not_applicable", "cannot_run_here", "parent_skipped", "failed"]
    reason: str

    def __str__(self) -> str:
        return f"failed: {self.reason}" if self.kind == "failed" else self.reason


class Pair(Record):
    """An artifact with one execution, measured, or skipped with a reason.

    ``id`` is the pair's id (``onnx-int8@openvino``). ``provider`` is the library that executed it, or None if it was
    not opened.
    """

    id: str
    execution: RunBy
    provider: str | None = None
    measured: Measured | None = None
    skip: Skip | None = None

    @model_validator(mode="after")
    def _measured_or_skipped(self) -> Self:
        if (self.measured is None) == (self.skip is None):
            raise ValueError("a pair is either measured or skipped, with the reason")
        return self

    @property
    def runs_on(self) -> str:
        """Return the execution as it is spelled in the id: ``openvino``."""
        return self.id.rpartition("@")[2]

    def _facts(self) -> dict[str, str]:
        return {"id": self.id} | _found(self.measured, self.skip)


class ModelFile(Record):
    """The model file. ``key`` is the key of the stored object, ``precision`` the real one of weights and arithmetic."""

    path: str
    bytes: int
    key: str
    format: str
    precision: str

    @property
    def is_float(self) -> bool:
        """Return whether no part of it computes with integers."""
        return "int" not in self.precision


class Archive(Record):
    """The packed artifact."""

    path: str
    bytes: int
    sha256: str


class Row(Record):
    """A stage of a recipe with its artifact, or with the reason why there is none or why it was not measured.

    ``operation`` is the pass (``baseline`` for the first). ``made`` is when the artifact was made, ``seconds`` how long
    that took, ``cached`` whether an earlier run made it. ``pairs`` has an entry for each execution to measure. ``skip``
    says why the artifact was not made, or why no pair was measured. ``effects`` are figures of single layers, before
    and after the pass. ``certificate`` says for an INT8 artifact how near each engine's answers are to the meaning of
    its integers. ``training`` is the history of each training behind it.
    """

    name: str
    operation: str
    config: dict[str, Any]
    parent: str | None
    cached: bool = False
    made: datetime.datetime | None = None
    seconds: float | None = None
    file: ModelFile | None = None
    archive: Archive | None = None
    pairs: tuple[Pair, ...] = ()
    skip: Skip | None = None
    notes: tuple[str, ...] = ()
    effects: tuple[Effect, ...] = ()
    certificate: Parities = None
    training: tuple[History, ...] = ()

    @model_validator(mode="after")
    def _measured_or_skipped(self) -> Self:
        if (self.best is None) == (self.skip is None):
            raise ValueError("a row is either measured or skipped, with the reason")
        if self.best is not None and self.file is None:
            raise ValueError("a measured row needs a file")
        return self

    @property
    def best(self) -> Pair | None:
        """Return the measured pair of the lowest p50. None if none was measured."""
        measured = [(pair.measured.latency_ms.p50, pair) for pair in self.pairs if pair.measured]
        return min(measured, key=lambda entry: entry[0])[1] if measured else None

    @property
    def measured(self) -> Measured | None:
        """Return the figures of the best pair."""
        return self.best.measured if self.best else None

    def _facts(self) -> dict[str, str]:
        parent = {"made from": self.parent} if self.parent else {}
        file = {"precision": self.file.precision, "size": f"{self.file.bytes / 1e6:.4g} MB"} if self.file else {}
        best = {"best": self.best.id} if self.best else {}
        return {"name": self.name, "pass": self.operation} | parent | file | best | _found(self.measured, self.skip)

    def _more(self) -> dict[str, str]:
        return {"executions": ", ".join(pair.runs_on for pair in self.pairs), "notes": "; ".join(self.notes)}

    def measurements(self) -> dict[str, Any]:
        """Return the measurements, or the reason for their absence, as JSON values. An artifact's card repeats them."""
        return {
            "pairs": [pair.to_json() for pair in self.pairs],
            "skip": self.skip.to_json() if self.skip else None,
        }


#: The engines of those references that are the float graph, by name. PyTorch runs the others.
FLOAT_GRAPHS: Final = {"onnxruntime FP32": "onnxruntime", "openvino FP32": "openvino"}


class Reference(Record):
    """A reference: the baseline's weights, run in another way in the same rounds."""

    name: str
    measured: Timed | None = None
    skip: Skip | None = None

    @model_validator(mode="after")
    def _measured_or_skipped(self) -> Self:
        if (self.measured is None) == (self.skip is None):
            raise ValueError("a reference is either measured or skipped, with the reason")
        return self

    def _facts(self) -> dict[str, str]:
        return {"name": self.name} | _found(self.measured, self.skip)


def _found(measured: Timed | None, skip: Skip | None) -> dict[str, str]:
    """Summarise the measurement, or the reason for its absence."""
    return measured._facts() if measured else {"skipped": glance(str(skip))}


class Judgement(Record):
    """The chosen pair's score on the ``images`` that had no part in the choice.

    The difference is to the baseline on the same images, with its 95 % interval. It is None for the baseline itself.
    """

    images: int
    score: float
    difference: Difference | None


class Proof(Record):
    """The proof that the chosen pair loses less than the rule allows, on all images.

    ``tested`` pairs were tested together by the procedure of `optimize.run.recommendation.non_inferiority`. The chosen
    one was tested at the one-sided ``level``, where the lower bound of its difference to the baseline is ``low``.
    """

    tested: int
    level: float
    low: float


class Recommendation(Record):
    """The chosen pair (None if none was measured), the rule, and the reason against each other pair.

    ``name`` is its artifact's name, ``pair`` its id, ``execution`` the execution to serve with. ``rejected`` maps a
    pair's id to the reason, or a row's name if none of its pairs was measured. ``unproven`` is the id of the pair that
    would be chosen if more images confirmed the present result. ``remarks`` are sentences about facts that the rule
    ignores. ``selection`` says how it was chosen among how many, and ``proof`` how its accuracy was shown. The baseline
    needs no proof.
    """

    name: str | None
    pair: str | None = None
    execution: RunBy | None = None
    rule: str
    rejected: dict[str, str] = Field(default_factory=dict)
    unproven: str | None = None
    remarks: tuple[str, ...] = ()
    selection: str | None = None
    proof: Proof | None = None

    def _facts(self) -> dict[str, str]:
        unproven = {"unproven best": self.unproven} if self.unproven else {}
        return {"pair": self.pair or "none"} | unproven | {"against": f"{len(self.rejected)} others"}

    def _more(self) -> dict[str, str]:
        said = {"rule": self.rule, "selection": self.selection or "", "remarks": " ".join(self.remarks)}
        return said | {f"not {name}": reason for name, reason in self.rejected.items()}


class Measurement(Record):
    """How and when the speeds were measured. ``cached``: they come from an earlier run of the same set.

    ``others`` is the share of the cores that other processes took, on average. ``busiest`` is the largest share in one
    turn. ``clocks`` are the slowest and the fastest clock of the cores after a turn, in MHz. These are None if the
    system does not report them. ``warning`` says why the speeds are provisional. It is empty if they are not.
    """

    timing: Timing
    taken: datetime.datetime
    seconds: float
    cached: bool
    others: float | None = None
    busiest: float | None = None
    clocks: tuple[int, int] | None = None
    warning: str = ""


class Results(Record):
    """Artifacts and references that were measured in turns. All differences are to the first row, the baseline.

    ``task`` is the name of what the network is for. ``references_of`` is the artifact whose eager module the references
    run. Speeds are relative to two pairs or references. ``yardstick`` is the fastest float execution, or the baseline's
    best pair if no float was measured. ``eager`` is the reference of that name, or the baseline's best pair if it was
    not measured. ``classes`` are the figures of the single classes, in the data's order.
    """

    title: str
    task: str
    rows: tuple[Row, ...]
    classes: tuple[ClassFigures, ...] = Field(default=(), exclude_if=lambda classes: not classes)
    references: tuple[Reference, ...] = ()
    references_of: str | None = None
    yardstick: str | None = None
    eager: str | None = None
    recommendation: Recommendation
    measurement: Measurement

    def timed(self, name: str | None) -> Timed | None:
        """Return the times of a pair by its id, or of a reference. None if it does not exist or was not measured."""
        found = {pair.id: pair.measured for row in self.rows for pair in row.pairs}
        return {**found, **{reference.name: reference.measured for reference in self.references}}.get(name or "")

    def _facts(self) -> dict[str, str]:
        taken = self.measurement.taken.isoformat()
        return {
            "title": self.title,
            "artifacts": str(len(self.rows)),
            "recommended": self.recommendation.pair or "none",
            "measured": taken,
        }

    @property
    def float_yardstick(self) -> bool:
        """Return whether ``yardstick`` is a float execution rather than the baseline in its place."""
        holders = [row.file for row in self.rows for pair in row.pairs if pair.id == self.yardstick]
        return all(file is not None and file.is_float for file in holders)

    @property
    def baseline(self) -> Row:
        """Return the row that the others are compared with."""
        return self.rows[0]

    @property
    def chosen(self) -> Row | None:
        """Return the row of the recommended pair."""
        return next((row for row in self.rows if row.name == self.recommendation.name), None)

    @property
    def chosen_pair(self) -> Pair | None:
        """Return the recommended pair."""
        pairs = self.chosen.pairs if self.chosen else ()
        return next((pair for pair in pairs if pair.id == self.recommendation.pair), None)


class Gpu(Record):
    """The GPU of the measurement."""

    name: str
    memory_bytes: int
    cuda: str | None
    cudnn: int | None
    capability: str


class Machine(Record):
    """The facts about a machine that a reader needs to judge a time. ``quota`` is a container's CPU limit, in cores."""

    cpu: str
    cores: int
    quota: float | None = None
    threads: int
    memory_bytes: int
    os: str
    python: str
    isa: tuple[str, ...]
    gpu: Gpu | None


class Data(Record):
    """The images: how many to train and to judge with, and how they become the network's input.

    ``val`` counts the images to judge with. If these are a part of the split, ``val_of`` is the split's size.
    ``val_fingerprint`` is the fingerprint of these images in their order. ``preprocessing_origin`` says where each part
    of the preprocessing comes from.
    """

    name: str
    fingerprint: str
    fingerprint_kind: str
    val_fingerprint: str
    classes: int
    train: int
    val: int
    val_of: int | None = None
    preprocessing: Preprocessing
    preprocessing_origin: dict[str, str] = Field(default_factory=dict)


class Report(Results):
    """A finished run, as in ``report.json``.

    ``title`` is its name, ``recommended`` the artifact to serve. ``examples`` is the key of the stored object with
    pictures of answers, or None if the task draws none.
    """

    schema_version: Literal[5] = Field(default=SCHEMA, alias="schema")
    model: str
    created: datetime.datetime
    seconds: float
    device: str
    data: Data
    machine: Machine
    versions: dict[str, str]
    recommended: str | None
    examples: str | None = Field(default=None, exclude_if=lambda key: key is None)

    @model_validator(mode="after")
    def _recommended_once(self) -> Self:
        if self.recommended != self.recommendation.name:
            raise ValueError(f"recommended is {self.recommended!r}, but the rule gives {self.recommendation.name!r}")
        return self
