"""Builds every key of the store from named inputs.

A key is the SHA-256 of everything that a result depends on, and of nothing else. Names, folders, dates and the device
of training are no inputs. Each kind of result has a record whose fields are its inputs. A test changes every field of
every record and expects another key.
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

#: Fields of a card that name an artifact or state its origin. No engine reads them.
PROVENANCE = frozenset(
    {"name", "model", "lineage", "data", "versions", "machine", "notes", "packed", "certificate", "schema"}
)

#: Fields of a card that belong to the run, not to the file.
_OF_THE_RUN = frozenset({"preprocessing", "classes"})


def make_key(**parts: Any) -> str:
    """Return the SHA-256 of named JSON values. Raises TypeError for a value that is not JSON."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def opening(card: Card) -> dict[str, Any]:
    """Return what determines an engine: the hashes of the files, and the card without its `PROVENANCE`.

    A new field of the card counts until it is added to `PROVENANCE`.
    """
    return {name: value for name, value in dataclasses.asdict(card).items() if name not in PROVENANCE}


def content(card: Card) -> str:
    """Return the SHA-256 of what the next pass reads of an artifact: its files, and the meaning of their numbers."""
    return make_key(**{name: value for name, value in opening(card).items() if name not in _OF_THE_RUN})


@dataclass(frozen=True, kw_only=True)
class Key:
    """The inputs of one result. Their values are JSON, tuples, mappings or records of these."""

    kind: ClassVar[str]

    @property
    def digest(self) -> str:
        """Return the key, 64 hexadecimal digits."""
        return make_key(kind=self.kind, **dataclasses.asdict(self))


@dataclass(frozen=True, kw_only=True)
class Making(Key):
    """The inputs of everything that is made from a model and its data: baselines, results of passes, rankings.

    Attributes:
        classes: the number of the model's outputs.
        images: fingerprint of the training images. Steps without training use some of them too, to trace or to check.
        augmentation: the changes of an image that keep its label true.
        preprocessing: the preprocessing of the images.
        seed: the seed of every random choice.
        libraries: versions of the libraries that make the result.
        code: digest of the sources that make the result.
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
    """A baseline without its name.

    Attributes:
        architecture: the model's fingerprint, which includes the digest of what the user's own factory builds, and the
            factory of that source that builds it.
        weights: SHA-256 of the checkpoint, and which of its state dicts is used. None if the baseline is trained.
        training: how it is trained. None if it has a checkpoint.
        processes: the number of processes that train together, 1 without training. Each process draws its own dropout,
            and some norms see only the images of their own process.
        teacher: digest of the network that it learns from. None without a teacher.
        outputs: names of the network's outputs. Empty: its only one.
    """

    kind = "baseline"
    architecture: tuple[str, str]
    weights: tuple[str, str] | None
    training: Mapping[str, Any] | None
    processes: int
    teacher: str | None
    outputs: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class StageKey(Making):
    """The result of a pass without its name.

    Attributes:
        operation: the pass.
        config: its settings.
        ancestors: `content` of each ancestor, the baseline first. A pass may read more than its parent.
        target: the kind of integers that the machine's kernels support.
        device: the run's device, for a pass whose result depends on it. None for others.
        architecture: see `BaselineKey`. Only for a pass that trains, because no file shows what a model's code does in
            training mode. None for others.
        processes: see `BaselineKey`.
        teacher: see `BaselineKey`.
        zeros: digest of the sources that count zeros, if an ancestor or this pass prunes weights: such zeros are kept
            and counted. None without pruning.
        ending: digest of the sources of the task's ending, if the pass writes a graph. None for others.
        timed: the machine, its environment and all libraries, for a pass that times networks. None for others.
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
    ending: str | None
    timed: Mapping[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class TeacherKey(Key):
    """A teacher's answers on a student's training images.

    Attributes:
        teacher: digest of the teacher.
        images: fingerprint of the images in their order.
        preprocessing: the student's preprocessing of the images.
        precision: the precision of the computation.
        libraries: versions of the libraries that compute the answers.
        code: digest of the sources that compute the answers.
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
    """Files that were saved to a folder and restored. Nothing is known about their origin.

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
        card: the card as JSON values.
    """

    kind = "artifact"
    made: str
    card: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Bench(Key):
    """The inputs of all measurements.

    Attributes:
        environment: environment variables of the processes that change the results or the speed of libraries.
        machine: processor, cores, threads, memory, GPU.
        libraries: versions of all libraries.
        code: digest of the sources that measure, including the runtime's.
    """

    environment: Mapping[str, str]
    machine: Mapping[str, Any]
    libraries: Mapping[str, str]
    code: str


@dataclass(frozen=True, kw_only=True)
class AnswersKey(Bench):
    """An artifact's answers on the validation images, from one execution.

    Attributes:
        artifact: see `opening`.
        execution: the execution that runs the artifact.
        task: name of the task, which says what is kept.
        images: fingerprint of the validation images.
        preprocessing: how the run prepares them. The card's own preprocessing is part of ``artifact``.
        skip_unreadable: whether images that cannot be read are left out.
        max_batch: the largest batch.
    """

    kind = "answers"
    artifact: Mapping[str, Any]
    execution: Mapping[str, Any]
    task: str
    images: str
    preprocessing: Preprocessing
    skip_unreadable: bool
    max_batch: int


@dataclass(frozen=True, kw_only=True)
class FootprintKey(Bench):
    """An artifact's load time and peak memory in the process of one execution.

    Attributes:
        artifact: see `opening`.
        execution: the execution that runs the artifact.
        batch: the batch size at which the peak is measured.
    """

    kind = "footprint"
    artifact: Mapping[str, Any]
    execution: Mapping[str, Any]
    batch: int


@dataclass(frozen=True, kw_only=True)
class SpeedKey(Bench):
    """Times of a set of artifacts that were measured in turns.

    Attributes:
        pairs: `paired` of each, sorted, so that neither order nor names matter.
        references: the eager references that are timed with them, and their devices.
        eager: key of the baseline or stage whose eager module the references run. None without one.
        timing: how speed is measured.
        images: fingerprint of the validation images. Their values matter too: subnormal numbers are slow.
        preprocessing: the preprocessing of the images.
        max_batch: the largest batch.
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
    """The error that each layer causes in the network's output when it alone is quantized in simulation.

    Attributes:
        config: settings of the quantization.
        ancestors: `content` of the float module and of each of its ancestors, the baseline first.
        target: the kind of integers that the machine's kernels support, which ``auto`` stands for.
        device: the device of the computation.
    """

    kind = "ranks"
    config: Mapping[str, Any]
    ancestors: tuple[str, ...]
    target: str
    device: str


@dataclass(frozen=True, kw_only=True)
class ProbeKey(Bench):
    """Whether an engine works on this machine.

    Attributes:
        engine: the engine's name.
        device: ``cpu`` or ``cuda``.
    """

    kind = "probe"
    engine: str
    device: str


@dataclass(frozen=True, kw_only=True)
class CertificateKey(Key):
    """An INT8 artifact's parity certificate.

    The artifact, engines, libraries and CPU are inputs of the answers' keys.

    Attributes:
        reference: key of the answers of the reference program, which computes what the integers mean.
        answers: keys of the executions' answers, by execution.
        absent: why other executions were not compared, by execution.
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
    """What an engine computes for each layer of an INT8 artifact alone, given the reference's integers.

    Attributes:
        artifact: see `opening`.
        reference: SHA-256 of the reference program.
        execution: the execution that runs the layers.
        images: SHA-256 of the images whose integers the layers get.
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
        model_name: the name that it is served under, which the archive contains.
        card: the artifact's card as JSON values, with the hashes of its files. The archive contains all of it.
        serving: the text of its ``serving.json``.
        known: the text of its ``known.json``. None if it has none.
        libraries: versions of the libraries that write it.
        code: digest of the sources that the archive contains or that make it.
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
        report: the parts of the report that the charts may show, as JSON values.
        libraries: versions of the libraries that draw.
        code: digest of the sources that draw.
    """

    kind = "charts"
    report: Mapping[str, Any]
    libraries: Mapping[str, str]
    code: str


@dataclass(frozen=True, kw_only=True)
class ExamplesKey(Key):
    """The pictures of two artifacts' answers to a few images.

    Attributes:
        answers: the keys of the answers.
        names: how the artifacts are called.
        captions: which images they are, and how well they are answered.
        images: fingerprint of the validation images.
        classes: the names of the classes.
        preprocessing: the preprocessing of the images.
        libraries: versions of the libraries that draw.
        code: digest of the sources that choose and draw.
    """

    kind = "examples"
    answers: tuple[str, str]
    names: tuple[str, str]
    captions: tuple[str, ...]
    images: str
    classes: tuple[str, ...]
    preprocessing: Preprocessing
    libraries: Mapping[str, str]
    code: str


def paired(card: Card, execution: Execution) -> str:
    """Return the SHA-256 of an artifact with its execution. Pairs that differ only in names have equal ones."""
    return make_key(artifact=opening(card), execution=execution.to_json())
