"""The typed row of a report, one shape from the measurement to the page; and the report that is made of rows.

Records only: nothing is measured, judged or worded here, and nothing here needs torch. Accuracies and their
differences are fractions, latencies milliseconds at batch 1, sizes bytes, durations seconds. What was measured is
always a pair: an artifact and an execution of it, called as `serve.runtime.engines.base.pair_id` spells it.
"""

from __future__ import annotations

import datetime
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, PlainSerializer, PlainValidator, model_validator

from optimize.measure.figures import Difference, Measured, Record, Timed
from optimize.measure.timing import Timing
from optimize.store.layer_effects import Effect
from optimize.store.training_history import History
from serve.runtime.card.card import Preprocessing
from serve.runtime.card.certificate import Certificate
from serve.runtime.card.execution import Execution
from serve.runtime.display import glance
from serve.runtime.errors import CardError, UserError

#: Version of ``report.json``.
SCHEMA: Final = 4


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


#: A `Certificate`, or none, as a field of a record.
Parities = Annotated[Certificate | None, PlainValidator(_certificate), PlainSerializer(_certificate_json)]

#: An `Execution` as a field of a record.
RunBy = Annotated[Execution, PlainValidator(_execution), PlainSerializer(Execution.to_json)]


class Skip(Record):
    """Why a stage was not made, or its artifact not measured.

    ``not_applicable``: the pass has nothing to do for this model. ``cannot_run_here``: this machine or device
    lacks what it needs. ``parent_skipped``: there is nothing to make it from. ``failed``: it should have worked.
    """

    kind: Literal["not_applicable", "cannot_run_here", "parent_skipped", "failed"]
    reason: str

    def __str__(self) -> str:
        return f"failed: {self.reason}" if self.kind == "failed" else self.reason


class Pair(Record):
    """An artifact as one execution runs it, measured or not, and the reason if not.

    ``id`` is the pair's (``onnx-int8@openvino``), ``provider`` what really executed it, None where it was not opened.
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
        """The execution in one word, as the id has it: ``openvino``."""
        return self.id.rpartition("@")[2]

    def _facts(self) -> dict[str, str]:
        return {"id": self.id} | _found(self.measured, self.skip)


class ModelFile(Record):
    """The model file: ``key`` is that of the stored object, ``precision`` what weights and arithmetic really are."""

    path: str
    bytes: int
    key: str
    format: str
    precision: str

    @property
    def is_float(self) -> bool:
        """Whether no part of it computes with integers."""
        return "int" not in self.precision


class Archive(Record):
    """The packed artifact."""

    path: str
    bytes: int
    sha256: str


class Row(Record):
    """A stage of a recipe and what became of it: an artifact or none, measured or not, and the reason if not.

    ``operation`` is the pass (``baseline`` for the first), ``made`` when the artifact was made, ``seconds`` how
    long that took, ``cached`` whether it was at an earlier run. ``pairs`` has an entry for each execution that the
    artifact was to be measured with; ``skip`` says why it was not made, or with none of them measured.
    ``effects`` are figures of single layers, before the pass and after it; ``certificate`` says of an INT8 artifact how
    near each engine's answers are to what its integers mean; ``training`` how each training went that made it.
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
            raise ValueError("what was measured has a file")
        return self

    @property
    def best(self) -> Pair | None:
        """The measured pair of the lowest p50; None if none was measured."""
        measured = [(pair.measured.latency_ms.p50, pair) for pair in self.pairs if pair.measured]
        return min(measured, key=lambda entry: entry[0])[1] if measured else None

    @property
    def measured(self) -> Measured | None:
        """What was measured of the best pair."""
        return self.best.measured if self.best else None

    def _facts(self) -> dict[str, str]:
        parent = {"made from": self.parent} if self.parent else {}
        file = {"precision": self.file.precision, "size": f"{self.file.bytes / 1e6:.4g} MB"} if self.file else {}
        best = {"best": self.best.id} if self.best else {}
        return {"name": self.name, "pass": self.operation} | parent | file | best | _found(self.measured, self.skip)

    def _more(self) -> dict[str, str]:
        return {"executions": ", ".join(pair.runs_on for pair in self.pairs), "notes": "; ".join(self.notes)}

    def measurements(self) -> dict[str, Any]:
        """What was measured, or why nothing was, as JSON values: what an artifact's card repeats of its row."""
        return {
            "pairs": [pair.to_json() for pair in self.pairs],
            "skip": self.skip.to_json() if self.skip else None,
        }


#: What runs the references that are the float graph, by their names; the others are run by PyTorch.
FLOAT_GRAPHS: Final = {"onnxruntime FP32": "onnxruntime", "openvino FP32": "openvino"}


class Reference(Record):
    """An eager reference: the baseline's weights, run in another way in the same rounds."""

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
    """What was measured at a glance, or why nothing was."""
    return measured._facts() if measured else {"skipped": glance(str(skip))}


class Judgement(Record):
    """The chosen pair's top-1 on the ``images`` that had no part in the choice; the baseline itself has no difference.

    The difference is to the baseline on the same images, with its 95 % interval.
    """

    images: int
    top1: float
    difference: Difference | None


class Proof(Record):
    """How it was shown that the chosen pair loses less than the rule allows, on all images.

    ``tested`` pairs were tested together, by the procedure of `optimize.run.recommendation.non_inferiority`. The chosen
    one was tested at the one-sided ``level``, where the lower bound of its difference to the baseline is ``low``.
    """

    tested: int
    level: float
    low: float


class Recommendation(Record):
    """The chosen pair (None if none was measured), the rule, and the reason against each other one.

    ``name`` is its artifact's, ``pair`` its id, ``execution`` what is to run it. ``rejected`` is by pair's id, and by
    row's name where no pair of it was measured. ``unproven`` is the id of the pair that would be chosen if more images
    showed what these suggest; ``remarks`` are sentences about what the rule does not see. ``selection`` says by what it
    was chosen of how many, and ``proof`` how it was shown to be accurate; the baseline needs none.
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
    """How and when the speeds were taken; ``cached``: they are those of an earlier run of the same set.

    ``others`` is the share of the cores that other processes took meanwhile, on average, and ``busiest`` that of the
    turn in which they took most; ``clocks`` are the slowest and the fastest clock of the cores behind a turn, in MHz.
    None where the system does not tell. ``warning`` says that the speeds are provisional,
    and why; empty: they are not.
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
    """Artifacts and references that were measured in turns, the first row being the baseline of all differences.

    ``references_of`` is the artifact whose eager module the references run. Speeds are multiples of those of two pairs
    or references: ``yardstick`` is the fastest float execution (the baseline's best, where no float was measured),
    ``eager`` the reference of that name (the baseline's best pair, where it was not measured).
    """

    title: str
    rows: tuple[Row, ...]
    references: tuple[Reference, ...] = ()
    references_of: str | None = None
    yardstick: str | None = None
    eager: str | None = None
    recommendation: Recommendation
    measurement: Measurement

    def timed(self, name: str | None) -> Timed | None:
        """The times of a pair, by its id, or of a reference; None if there is none or it was not measured."""
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
        """Whether ``yardstick`` is a float execution, and not the baseline for want of one."""
        holders = [row.file for row in self.rows for pair in row.pairs if pair.id == self.yardstick]
        return all(file is not None and file.is_float for file in holders)

    @property
    def baseline(self) -> Row:
        """The row that the others are compared with."""
        return self.rows[0]

    @property
    def chosen(self) -> Row | None:
        """The row of the recommended pair."""
        return next((row for row in self.rows if row.name == self.recommendation.name), None)

    @property
    def chosen_pair(self) -> Pair | None:
        """The recommended pair."""
        pairs = self.chosen.pairs if self.chosen else ()
        return next((pair for pair in pairs if pair.id == self.recommendation.pair), None)


class Gpu(Record):
    """The GPU that was measured on."""

    name: str
    memory_bytes: int
    cuda: str | None
    cudnn: int | None
    capability: str


class Machine(Record):
    """What a reader needs to judge a time; ``quota`` is the processor time that a container had, in cores."""

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

    ``val_of`` is how many there are to judge with, where ``val`` is a part of them; ``val_fingerprint`` is that of
    these, in their order; ``preprocessing_origin`` says of each part of the preprocessing where it came from.
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
    """A finished run, as ``report.json`` holds it; ``title`` is its name, ``recommended`` the artifact to serve."""

    schema_version: Literal[4] = Field(default=SCHEMA, alias="schema")
    model: str
    created: datetime.datetime
    seconds: float
    device: str
    data: Data
    machine: Machine
    versions: dict[str, str]
    recommended: str | None

    @model_validator(mode="after")
    def _recommended_once(self) -> Self:
        if self.recommended != self.recommendation.name:
            raise ValueError(f"recommended is {self.recommended!r}, and by the rule {self.recommendation.name!r}")
        return self
