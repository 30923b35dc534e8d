"""What is measured of an artifact and an execution of it: the figures of a report's row.

Records only, as `optimize.measure.rows` has them. Accuracies and their differences are fractions, latencies
milliseconds at batch 1, sizes bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Self

from pydantic import BaseModel, ConfigDict

from serve.runtime.display import Described

if TYPE_CHECKING:
    from optimize.measure.statistics import PairedDifference


#: Two variants whose speeds differ by less than this factor are level.
LEVEL: Final = 0.97


class Record(Described, BaseModel):
    """What all records of a report have in common: frozen, unknown fields refused, no number that JSON cannot hold."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, populate_by_name=True)

    def to_json(self) -> dict[str, Any]:
        """As JSON values; `from_json` reads them back to an equal record."""
        return self.model_dump(mode="json", by_alias=True)

    @classmethod
    def from_json(cls, body: Any) -> Self:
        """Read what `to_json` wrote.

        Raises:
            pydantic.ValidationError: a field is unknown, missing or of another type.
        """
        return cls.model_validate(body)


class Ratio(Record):
    """How many times as fast as another: median over the rounds, its interval, and that interval's confidence.

    ``slower``: the whole interval says so, see `latency.compare`.
    """

    value: float
    low: float
    high: float
    coverage: float
    slower: bool

    @property
    def unclear(self) -> bool:
        """Whether it seems slower, and the interval does not say so."""
        return self.value < LEVEL and not self.slower


class Latency(Record):
    """Milliseconds of one image: p50 as `latency.Speed.against` has it, p95 and p99 of all ``samples``."""

    p50: float
    p95: float
    p99: float
    samples: int


class Difference(Record):
    """Top-1 minus the baseline's on the same images, its 95 % interval, and how many images changed sides."""

    delta: float
    low: float
    high: float
    gained: int
    lost: int

    @classmethod
    def of(cls, found: PairedDifference) -> Self:
        """A paired difference as a report has it; how many images it is of stands elsewhere."""
        return cls(delta=found.delta, low=found.low, high=found.high, gained=found.gained, lost=found.lost)


class Accuracy(Record):
    """Of ``images`` validation images; ``difference`` is to the baseline, which itself has none.

    ``left_out`` more could not be read. ``answers`` is the key of the stored object with the answer to each image.
    """

    top1: float
    top5: float
    images: int
    left_out: int = 0
    answers: str
    difference: Difference | None = None


class Parity(Record):
    """How close the logits are to those of ``reference``: on ``logits_of`` images, agreement of top-1 on ``images``.

    ``sqnr_db`` is None where they are equal to the last bit, or the reference's are all zero.
    """

    reference: str
    max_abs: float
    mean_abs: float
    sqnr_db: float | None
    top1_agreement: float
    images: int
    logits_of: int


class Footprint(Record):
    """Opening the artifact and its peak memory above an idle process, in a process of its own.

    On CUDA the memory is what the device has in use, by all processes, more than before.
    """

    load_ms: float
    memory_bytes: int


class Timed(Record):
    """What a measurement in turns gives of each contestant.

    ``throughput`` is images per second by batch size; ``speedup`` is to the fastest float execution
    (`Results.yardstick`), ``vs_eager`` to the model as PyTorch runs it (`Results.eager`).
    """

    latency_ms: Latency
    throughput: dict[int, float]
    speedup: Ratio
    vs_eager: Ratio

    @property
    def best_batch(self) -> int:
        """The batch size of the highest throughput."""
        return max(self.throughput, key=lambda size: self.throughput[size])

    @property
    def best_throughput(self) -> float:
        """The highest throughput, images per second."""
        return self.throughput[self.best_batch]

    def _facts(self) -> dict[str, str]:
        return {
            "p50": f"{self.latency_ms.p50:.4g} ms",
            "throughput": f"{self.best_throughput:.4g} images/s",
            "speed": f"{self.speedup.value:.3g}×",
            "to eager": f"{self.vs_eager.value:.3g}×",
        }


class Measured(Timed):
    """All that is measured of a pair; what is compared with a parent is None where that was not measured."""

    accuracy: Accuracy
    footprint: Footprint
    parity: Parity | None = None
    vs_parent: Ratio | None = None

    def _facts(self) -> dict[str, str]:
        accuracy, memory = self.accuracy, self.footprint.memory_bytes / 1e6
        top1 = {"top-1": f"{accuracy.top1 * 100:.2f} % of {accuracy.images:,}"}
        return top1 | super()._facts() | {"memory": f"{memory:.4g} MB"}
