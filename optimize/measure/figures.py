"""The figures of a report's row, which are measured for a pair of artifact and execution.

Records only, as in `optimize.measure.rows`. Accuracies and their differences are fractions, latencies are milliseconds
at batch 1, sizes are bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field

from serve.runtime.display import Described

if TYPE_CHECKING:
    from optimize.measure.statistics import PairedDifference


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


class Difference(Record):
    """Top-1 minus the baseline's on the same images, its 95 % interval, and how many images were gained and lost."""

    delta: float
    low: float
    high: float
    gained: int
    lost: int

    @classmethod
    def of(cls, found: PairedDifference) -> Self:
        """Convert a paired difference for a report. The number of images is stored elsewhere."""
        return cls(delta=found.delta, low=found.low, high=found.high, gained=found.gained, lost=found.lost)


class Accuracy(Record):
    """Accuracy on ``images`` validation images. ``difference`` is to the baseline, which itself has none.

    Another ``left_out`` images could not be read. ``answers`` is the key of the stored object with the answer to each
    image.
    """

    top1: float
    top5: float
    images: int
    left_out: int = 0
    answers: str
    difference: Difference | None = None


class OutputParity(Record):
    """How close the numbers of one output behind the logits are, on the same images as the logits."""

    output: str
    max_abs: float
    mean_abs: float
    sqnr_db: float | None


class Parity(Record):
    """How close the logits are to those of ``reference``.

    The logits are those of ``logits_of`` images. ``top1_agreement`` is the share of all ``images`` with the same best
    class.

    ``sqnr_db`` is None if they are equal to the last bit, or if the reference's logits are all zero. ``others`` are the
    outputs behind the logits.
    """

    reference: str
    max_abs: float
    mean_abs: float
    sqnr_db: float | None
    top1_agreement: float
    images: int
    logits_of: int
    others: tuple[OutputParity, ...] = Field(default=(), exclude_if=lambda others: not others)


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
        top1 = {"top-1": f"{accuracy.top1 * 100:.2f} % of {accuracy.images:,}"}
        return top1 | super()._facts() | {"memory": f"{memory:.4g} MB"}
