"""The rule that recommends one artifact, case by case."""

from __future__ import annotations

from dataclasses import dataclass

from optimize.measure.latency import Speed
from optimize.measure.rows import (
    Accuracy,
    Difference,
    Execution,
    Footprint,
    Measured,
    ModelFile,
    Recommendation,
    Row,
    Skip,
)
from optimize.run.recommendation import recommend


@dataclass(frozen=True)
class Case:
    """A row, and the milliseconds of each of its rounds (None: not measured)."""

    name: str
    rounds: list[float] | None
    bytes: int
    low: float
    skip: str

    def row(self, baseline: Speed) -> Row:
        file = ModelFile(path="model", bytes=self.bytes, key="0", format="onnx", precision="int8")
        settings = {"name": self.name, "operation": "pass", "config": {}, "parent": None, "file": file}
        if self.rounds is None:
            return Row(**settings, skip=Skip(kind="cannot_run_here", reason=self.skip))
        timed = self.speed().against(baseline)
        difference = Difference(delta=0.0, low=self.low, high=0.01, gained=0, lost=0)
        measured = Measured(
            **dict(timed),
            accuracy=Accuracy(top1=0.9, top5=1.0, images=1000, difference=difference),
            footprint=Footprint(load_ms=1.0, memory_bytes=1),
            execution=Execution(provider="torch", threads=1),
        )
        return Row(**settings, measured=measured)

    def speed(self) -> Speed:
        assert self.rounds is not None
        return Speed({1: [[ms] for ms in self.rounds]})


def choose(*cases: Case, max_drop: float = 0.02) -> Recommendation:
    speeds = {case.name: case.speed() for case in cases if case.rounds}
    baseline = speeds.get(cases[0].name, Speed({1: [[1.0]] * 7}))
    return recommend([case.row(baseline) for case in cases], speeds, max_drop)


def row(name: str, ms: float | list[float] | None, size: int, low: float = 0.0, skip: str = "") -> Case:
    """Times of seven rounds, all equal or as given."""
    return Case(name, [ms] * 7 if isinstance(ms, float | int) else ms, size, low, skip)


def test_the_fastest_is_chosen_among_accurate_ones() -> None:
    chosen = choose(row("baseline", 10, 100), row("fuse", 8, 100), row("ptq", 2, 30, low=-0.01))
    assert chosen.name == "ptq"
    assert chosen.rejected == {"baseline": "5.00 times the latency of ptq", "fuse": "4.00 times the latency of ptq"}
    assert "less than 2 points below" in chosen.rule


def test_one_that_may_lose_too_much_is_rejected_however_fast() -> None:
    chosen = choose(row("baseline", 10, 100), row("ptq", 2, 30, low=-0.021), row("qat", 3, 30, low=-0.019))
    assert chosen.name == "qat"
    assert chosen.rejected["ptq"] == "its top-1 may be 2.1 points below the baseline's"


def test_the_limit_itself_is_not_excluded_by_the_interval() -> None:
    assert choose(row("baseline", 10, 100), row("ptq", 2, 30, low=-0.02)).name == "baseline"
    assert choose(row("baseline", 10, 100), row("ptq", 2, 30, low=-0.02), max_drop=0.03).name == "ptq"


def test_of_those_level_in_speed_the_surely_more_accurate_is_chosen() -> None:
    chosen = choose(row("baseline", 10, 100), row("ptq", 2, 20), row("qat", [2.02] * 6 + [1.9], 30, low=0.06))
    assert chosen.name == "qat"
    assert chosen.rejected["ptq"].startswith("as fast as qat, and its interval of top-1 begins ")


def test_a_more_accurate_one_that_is_plainly_slower_is_not_chosen() -> None:
    chosen = choose(row("baseline", 10, 100), row("ptq", 2, 20), row("qat", 2.2, 30, low=0.06))
    assert chosen.name == "ptq"
    assert chosen.rejected["qat"] == "1.10 times the latency of ptq"


def test_of_those_level_in_speed_and_accuracy_the_smallest_file_is_chosen() -> None:
    noisy = [2.1, 1.9, 2.04, 2.0, 2.1, 1.95, 2.02]
    chosen = choose(row("baseline", 10, 100), row("ptq", 2, 30), row("onnx-int8", noisy, 20), row("onnx", 4, 10))
    assert chosen.name == "onnx-int8"
    assert chosen.rejected["ptq"] == "as fast as onnx-int8, and a larger file"
    assert chosen.rejected["onnx"] == "2.00 times the latency of ptq"


def test_the_baseline_is_chosen_where_nothing_is_better() -> None:
    chosen = choose(row("baseline", 2, 100), row("ptq", 3, 30))
    assert chosen.name == "baseline"
    assert "1.50 times the latency of baseline" in chosen.rejected["ptq"]


def test_what_was_not_measured_is_rejected_for_its_own_reason() -> None:
    chosen = choose(row("baseline", 2, 100), row("half", None, 50, skip="runs on CUDA only"))
    assert (chosen.name, chosen.rejected) == ("baseline", {"half": "runs on CUDA only"})


def test_where_nothing_was_measured_nothing_is_recommended() -> None:
    chosen = choose(row("baseline", None, 50, skip="runs on CUDA only"))
    assert (chosen.name, chosen.rejected) == (None, {"baseline": "runs on CUDA only"})
