"""The figures of a report's row, which are measured for a pair of artifact and execution.

Records only, as in `optimize.measure.rows`. Accuracies and their differences are fractions, latencies are milliseconds
at batch 1, sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from serve.runtime.display import Described

if TYPE_CHECKING:
    from optimize.statistics import PairedDifference


#: Two variants count as equally fast if the slower one has at least this share of the other's speed.
LEVEL: Final = 0.97


class Record(Described, BaseModel):
    """The base of all records of a report: frozen, without unknown fields, without numbers that JSON cannot hold."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True)

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON values. `from_json` reads them back to an equal record."""
        return self.model_dump(mode="json", by_alias=True)

    @classmethod
    def from_json(cls, body: Any) -> Self:
        """Read what `to_json` wrote.

        Raises:
            pydantic.ValidationError: a field is unknown, missing or of another type.
        """
        return cls.model_validate(body)


class Ratio(Record):
    """A ratio of speeds: median over the rounds, its interval, and the interval's confidence.

    ``slower`` is true only if the whole interval says so, see `latency.compare`.
    """

    value: float
    low: float
    high: float
    coverage: float
    slower: bool

    @property
    def unclear(self) -> bool:
        """Return whether it seems slower although the interval does not show it."""
        return self.value < LEVEL and not self.slower


class Latency(Record):
    """Milliseconds of one image: p50 as in `latency.Speed.against`, p95 and p99 of all ``samples``."""

    p50: float
    p95: float
    p99: float
    samples: int


class TaskFigures(Record):
    """A record with figures under names of the task's own. JSON and data frames have them beside its other fields.

    Each subclass names the field that holds them, in the task's order.
    """

    of_task: ClassVar[str]

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, body: Any) -> Any:
        if not isinstance(body, Mapping) or cls.of_task in body:
            return body
        own = {name: value for name, value in body.items() if name in cls.model_fields}
        return own | {cls.of_task: {name: value for name, value in body.items() if name not in own}}

    @model_serializer(mode="wrap")
    def _spread(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in write(self).items():
            found |= value if name == self.of_task else {name: value}
        return found


class Difference(Record):
    """The score minus the baseline's on the same images, and its 95 % interval.

    ``gained`` counts the images that are answered better than by the baseline, ``lost`` those that are answered worse.
    """

    delta: float
    low: float
    high: float
    gained: int
    lost: int

    @classmethod
    def of(cls, found: PairedDifference) -> Self:
        """Convert a paired difference for a report. The number of images is stored elsewhere."""
        return cls(delta=found.delta, low=found.low, high=found.high, gained=found.gained, lost=found.lost)


class Accuracy(TaskFigures):
    """The task's scores on ``images`` validation images, by their keys.

    ``interval`` is the 95 % interval of the first score, and ``difference`` its difference to the baseline, which
    itself has none. Another ``left_out`` images could not be read. ``answers`` is the key of the stored object with the
    evidence of each image.
    """

    of_task = "scores"

    scores: dict[str, float] = Field(min_length=1)
    interval: tuple[float, float]
    images: int
    left_out: int = 0
    answers: str
    difference: Difference | None = None

    @property
    def score(self) -> float:
        """Return the first score, by which everything is judged."""
        return next(iter(self.scores.values()))


class ClassDifference(Record):
    """A class's score minus the baseline's on the same images, and its 95 % interval.

    ``worse``: it is below the baseline's with 95 % confidence for all classes together, so not only because one of many
    is the lowest by chance.
    """

    delta: float
    low: float
    high: float
    worse: bool

    @classmethod
    def of(cls, found: PairedDifference, classes: int) -> Self:
        """Convert a paired difference of one of so many classes."""
        together = found.at(1 - 0.05 / classes)
        return cls(delta=found.delta, low=found.low, high=found.high, worse=together.high < 0)


class ClassFigures(Record):
    """The scores of one class, called ``name``.

    ``count`` targets have it: images, or parts of images such as pixels. They are in ``images`` images. ``scores`` has
    its score by pair's id, for each artifact's main execution. It is empty if no target has the class. ``differences``
    has the differences to the baseline by pair's id, for the pairs that are compared class by class.
    """

    name: str
    count: int
    images: int
    scores: dict[str, float]
    differences: dict[str, ClassDifference]


class OutputParity(Record):
    """How close the numbers of one output behind the logits are, on the same images as the logits."""

    output: str
    max_abs: float
    mean_abs: float
    sqnr_db: float | None


class Parity(TaskFigures):
    """How close the first output is to that of ``reference``.

    Its numbers are compared on ``logits_of`` images. ``agreements`` are shares of all ``images`` or of their parts that
    are answered alike, by the task's keys.

    ``sqnr_db`` is None if they are equal to the last bit, or if the reference's are all zero. ``others`` are the
    outputs behind the first.
    """

    of_task = "agreements"

    reference: str
    max_abs: float
    mean_abs: float
    sqnr_db: float | None
    agreements: dict[str, float] = Field(min_length=1)
    images: int
    logits_of: int
    others: tuple[OutputParity, ...] = Field(default=(), exclude_if=lambda others: not others)

    @property
    def agreement(self) -> float:
        """Return the first agreement."""
        return next(iter(self.agreements.values()))


class Footprint(Record):
    """Load time of the artifact and its peak memory above an idle process, in its own process.

    On CUDA the memory is the increase of the device's used memory, by all processes.
    """

    load_ms: float
    memory_bytes: int


class Timed(Record):
    """The result of a measurement in turns for each contestant.

    ``throughput`` is images per second by batch size. ``speedup`` is relative to the fastest float execution
    (`Results.yardstick`), ``vs_eager`` to the model as PyTorch runs it (`Results.eager`).
    """

    latency_ms: Latency
    throughput: dict[int, float]
    speedup: Ratio
    vs_eager: Ratio

    @property
    def best_batch(self) -> int:
        """Return the batch size of the highest throughput."""
        return max(self.throughput, key=lambda size: self.throughput[size])

    @property
    def best_throughput(self) -> float:
        """Return the highest throughput, images per second."""
        return self.throughput[self.best_batch]

    def _facts(self) -> dict[str, str]:
        return {
            "p50": f"{self.latency_ms.p50:.4g} ms",
            "throughput": f"{self.best_throughput:.4g} images/s",
            "speed": f"{self.speedup.value:.3g}×",
            "to eager": f"{self.vs_eager.value:.3g}×",
        }


class Measured(Timed):
    """All measurements of a pair. A comparison with a parent is None if it was not measured."""

    accuracy: Accuracy
    footprint: Footprint
    parity: Parity | None = None
    vs_parent: Ratio | None = None

    def _facts(self) -> dict[str, str]:
        accuracy, memory = self.accuracy, self.footprint.memory_bytes / 1e6
        key, score = next(iter(accuracy.scores.items()))
        return {key: f"{score * 100:.2f} % of {accuracy.images:,}"} | super()._facts() | {"memory": f"{memory:.4g} MB"}
