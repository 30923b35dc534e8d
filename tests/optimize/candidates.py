"""Measured pairs that no machine measured, for the rule that recommends one of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from optimize.measure.figures import Accuracy, Difference, Footprint, Measured
from optimize.measure.latency import Speed
from optimize.measure.rows import ModelFile, Pair, Row, Skip
from optimize.statistics import PairedDifference, paired_interval, wilson_interval
from serve.runtime.card.execution import Execution


@dataclass(frozen=True)
class Case:
    """A pair: the milliseconds of each of its rounds (None: not measured), its size, images gained and lost.

    Cases of one name are executions of one artifact.
    """

    name: str
    rounds: list[list[float]] | None
    bytes: int
    gained: int = 0
    lost: int = 0
    images: int = 1000
    batch8: float = 8.0
    skip: str = ""
    engine: str = "e"

    @property
    def id(self) -> str:
        return f"{self.name}@{self.engine}"

    def row(self, baseline: Speed) -> Row:
        file = ModelFile(path="model", bytes=self.bytes, key="0", format="onnx", precision="int8")
        known: dict[str, Any] = {"name": self.name, "operation": "pass", "config": {}, "parent": None, "file": file}
        if self.rounds is None:
            return Row(**known, skip=Skip(kind="cannot_run_here", reason=self.skip))
        timed = self.speed().against(baseline, baseline)
        # The table's interval is not what the rule goes by: it takes `differences`, at its own confidence.
        delta = (self.gained - self.lost) / self.images
        difference = Difference(delta=delta, low=-1, high=1, gained=self.gained, lost=self.lost)
        measured = Measured(
            **dict(timed),
            accuracy=Accuracy(
                scores={"top1": 0.9, "top5": 1.0},
                interval=wilson_interval(0.9, self.images),
                images=self.images,
                answers="a",
                difference=difference,
            ),
            footprint=Footprint(load_ms=1.0, memory_bytes=1),
        )
        return Row(**known, pairs=(Pair(id=self.id, execution=Execution(self.engine), measured=measured),))

    def speed(self) -> Speed:
        assert self.rounds is not None
        return Speed({1: self.rounds, 8: [[self.batch8]] * len(self.rounds)})


def differences(*cases: Case) -> dict[str, PairedDifference]:
    """The differences to the baseline that the rule goes by, of the pairs that were measured."""
    return {case.id: paired_interval(case.gained, case.lost, case.images) for case in cases if case.rounds}
