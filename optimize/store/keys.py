"""Every key of the store, made in one place from named inputs.

A key is the SHA-256 of everything that a result depends on, and of nothing else: what a thing is called, where it
lies, when it was made and on which device it was trained are no inputs. Each kind of result has a record whose
fields are its inputs; a test changes every field of every record and expects another key.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from serve.runtime.card.card import Card, Preprocessing
from serve.runtime.card.execution import Execution

#: Fields of a card that say what an artifact is called and where it comes from; no engine reads them.
PROVENANCE = frozenset(
    {"name", "model", "lineage", "data", "versions", "machine", "notes", "packed", "certificate", "schema"}
)

#: Fields of a card that are the run's and not the file's.
_OF_THE_RUN = frozenset({"preprocessing", "classes"})


def make_key(**parts: Any) -> str:
    """SHA-256 of named JSON values; anything that is not JSON is refused with TypeError."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def opening(card: Card) -> dict[str, Any]:
    """What the runtime makes an engine of: the files' hashes, and all of the card but its `PROVENANCE`.

    A field that is added to the card is part of it until somebody says that no engine reads it.
    """
    return {name: value for name, value in dataclasses.asdict(card).items() if name not in PROVENANCE}


def content(card: Card) -> str:
    """SHA-256 of what a pass reads of an artifact that it follows: its files, and what the numbers in them mean."""
    return make_key(**{name: value for name, value in opening(card).items() if name not in _OF_THE_RUN})


@dataclass(frozen=True, kw_only=True)
class Key:
    """The inputs of one result; their values are JSON, tuples, mappings or records of such."""

    kind: ClassVar[str]

    @property
    def digest(self) -> str:
        """The key, 64 hexadecimal digits."""
        return make_key(kind=self.kind, **dataclasses.asdict(self))


@dataclass(frozen=True, kw_only=True)
class Making(Key):
    """What everything depends on that is made of a model and its data: a baseline, what a pass makes, an order.

    Attributes:
        classes: how many outputs the model has.
        images: fingerprint of the training images. Even what trains nothing is traced or checked with some of them.
        augmentation: which changes of an image keep its label true.
        preprocessing: of the images.
        seed: of every random choice.
        libraries: versions of the libraries that make it.
        code: digest of the sources that make it.
    """

    classes: int
    images: str
    augmentation: str
    preprocessing: Preprocessing
    seed: int
    libraries: Mapping[str, str | None]
    code: str


@dataclass(frozen=True, kw_only=True)
class BaselineKey(Making):
    """A baseline, before it has a name.

    Attributes:
        architecture: the model's fingerprint, with the digest of what the user's own factory builds, and which
            factory of that source builds it.
        weights: SHA-256 of the checkpoint, and which of its state dicts; None if the baseline is trained.
        training: how it is trained; None if it has a checkpoint.
        processes: how many train together; 1 where nothing is trained. Dropout draws in each, and some norms see the
            images of their own process alone.
        teacher: digest of the network that it learns from; None if it has no teacher.
    """

    kind = "baseline"
    architecture: tuple[str, str]
    weights: tuple[str, str] | None
    training: Mapping[str, Any] | None
    processes: int
    teacher: str | None


@dataclass(frozen=True, kw_only=True)
class StageKey(Making):
    """What a pass makes, before it has a name.

    Attributes:
        operation: the pass.
        config: its settings.
        ancestors: `content` of each ancestor, the baseline first: a pass may read more than its parent.
        target: which integers the machine's kernels speak.
        device: the run's, for a pass whose result depends on it; None for others.
        architecture: see `BaselineKey`, for a pass that trains: what a model's code does in training alone is in no
            file. None for others.
        processes: see `BaselineKey`.
        teacher: see `BaselineKey`.
        zeros: digest of the sources that count the zeros of what it makes, where zeros are meant in its lineage: these
            are kept and counted. None where they are not.
        timed: the machine, its environment and all libraries, for a pass that times networks; None for others.
    """

    kind = "stage"
    operation: str
    config: Mapping[str, Any]
    ancestors: tuple[str, ...]
    target: str
    device: str | None
    architecture: tuple[str, str] | None
    processes: int
    teacher: str | None
    zeros: str | None
    timed: Mapping[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class TeacherKey(Key):
    """A teacher's answers on the images that a student is trained on.

    Attributes:
        teacher: its digest.
        images: fingerprint of the images, in their order.
        preprocessing: of the images, as the student has them.
        precision: that the answers are computed with.
        libraries: versions of the libraries that compute them.
        code: digest of the sources that do.
    """

    kind = "teacher"
    teacher: str
    images: str
    preprocessing: Preprocessing
    precision: str
    libraries: Mapping[str, str]
    code: str


@dataclass(frozen=True, kw_only=True)
class TakenKey(Key):
    """Files that were saved to a folder and taken back: nothing is known of them but what they are.

    Attributes:
        artifact: see `opening`.
    """

    kind = "taken"
    artifact: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class NamedKey(Key):
    """An artifact's folder: the files of a baseline or a stage under a name, with a card.

    Attributes:
        made: key of the baseline or stage.
        card: the card, as JSON values.
    """

    kind = "artifact"
    made: str
    card: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Bench(Key):
    """What all measurements depend on.

    Attributes:
        environment: variables of the processes that change how, or how fast, libraries compute.
        machine: processor, cores, threads, memory, GPU.
        libraries: versions of all libraries.
        code: digest of the sources that measure, the runtime's among them.
    """

    environment: Mapping[str, str]
    machine: Mapping[str, Any]
    libraries: Mapping[str, str]
    code: str


@dataclass(frozen=True, kw_only=True)
class AnswersKey(Bench):
    """An artifact's answers on the validation images, as an execution gives them.

    Attributes:
        artifact: see `opening`.
        execution: what runs it.
        images: fingerprint of the validation images.
        preprocessing: how the run prepares them; the card's own is part of ``artifact``.
        skip_unreadable: whether images that cannot be read are left out.
        max_batch: most images that are run together.
    """

    kind = "answers"
    artifact: Mapping[str, Any]
    execution: Mapping[str, Any]
    images: str
    preprocessing: Preprocessing
    skip_unreadable: bool
    max_batch: int


@dataclass(frozen=True, kw_only=True)
class FootprintKey(Bench):
    """An artifact's load time and peak memory, in the process of an execution.

    Attributes:
        artifact: see `opening`.
        execution: what runs it.
        batch: images in the batch that the peak is taken with.
    """

    kind = "footprint"
    artifact: Mapping[str, Any]
    execution: Mapping[str, Any]
    batch: int


@dataclass(frozen=True, kw_only=True)
class SpeedKey(Bench):
    """Times of a set that was measured in turns.

    Attributes:
        pairs: `paired` of each, sorted: the set has no order, and its members no names.
        references: the eager references that are timed beside them, and where.
        eager: key of the baseline or stage whose eager module these run; None if there is none.
        timing: how speed is measured.
        images: fingerprint of the validation images: their values matter too (subnormal numbers are slow).
        preprocessing: of the images.
        max_batch: most images that are run together.
    """

    kind = "speed"
    pairs: tuple[str, ...]
    references: tuple[tuple[str, str], ...]
    eager: str | None
    timing: Mapping[str, Any]
    images: str
    preprocessing: Preprocessing
    max_batch: int


@dataclass(frozen=True, kw_only=True)
class RanksKey(Making):
    """How far each layer alone, quantized in simulation, takes a network from what it answers.

    Attributes:
        config: settings of the quantization.
        ancestors: `content` of the float module and of each of its ancestors, the baseline first.
        target: which integers the machine's kernels speak, which is what ``auto`` means.
        device: that it is computed on.
    """

    kind = "ranks"
    config: Mapping[str, Any]
    ancestors: tuple[str, ...]
    target: str
    device: str


@dataclass(frozen=True, kw_only=True)
class ProbeKey(Bench):
    """That an engine works on this machine.

    Attributes:
        engine: its name.
        device: ``cpu`` or ``cuda``.
    """

    kind = "probe"
    engine: str
    device: str


@dataclass(frozen=True, kw_only=True)
class CertificateKey(Key):
    """An INT8 artifact's parity certificate. Artifact, engines, libraries and CPU are inputs of the answers' keys.

    Attributes:
        reference: key of the answers of what the integers mean.
        answers: keys of the executions' answers, by execution.
        absent: why others were not compared, by execution.
        file: SHA-256 of the reference program.
        code: digest of the sources that compare.
    """

    kind = "certificate"
    reference: str
    answers: Mapping[str, str]
    absent: Mapping[str, str]
    file: str
    code: str


@dataclass(frozen=True, kw_only=True)
class LayersKey(Bench):
    """What an engine computes for each layer of an INT8 artifact alone, on the reference's integers.

    Attributes:
        artifact: see `opening`.
        reference: SHA-256 of the reference program.
        execution: what runs the layers.
        images: SHA-256 of the images whose integers they are given.
    """

    kind = "layers"
    artifact: Mapping[str, Any]
    reference: str
    execution: Mapping[str, Any]
    images: str


@dataclass(frozen=True, kw_only=True)
class ArchiveKey(Key):
    """A TorchServe archive.

    Attributes:
        model_name: what it is served by; it stands in the archive.
        card: the artifact's card as JSON values, with the hashes of its files; it travels whole.
        serving: the text of its ``serving.json``.
        known: the text of its ``known.json``; None: it has none.
        libraries: versions of the libraries that write it.
        code: digest of the sources that travel in the archive or make it.
    """

    kind = "archive"
    model_name: str
    card: Mapping[str, Any]
    serving: str
    known: str | None
    libraries: Mapping[str, str]
    code: str


@dataclass(frozen=True, kw_only=True)
class ChartsKey(Key):
    """The charts of a report.

    Attributes:
        report: what they may show of it, as JSON values.
        libraries: versions of the libraries that draw.
        code: digest of the sources that draw.
    """

    kind = "charts"
    report: Mapping[str, Any]
    libraries: Mapping[str, str]
    code: str


def paired(card: Card, execution: Execution) -> str:
    """SHA-256 of an artifact with what runs it: equal for two pairs that nothing but their names tells apart."""
    return make_key(artifact=opening(card), execution=execution.to_json())
