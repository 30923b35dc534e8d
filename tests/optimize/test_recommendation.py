"""The rule that recommends one artifact, case by case."""

from __future__ import annotations

from typing import Any

from optimize.measure.latency import Speed
from optimize.run.recommendation import Recommendation, recommend


def choose(*rows: dict[str, Any], max_drop: float = 0.02) -> Recommendation:
    """Rows are (name, ms, bytes, low); the times of seven rounds are all equal or as given."""
    speeds = {row["name"]: Speed({1: [[ms] for ms in row.pop("rounds")]}) for row in rows if row.get("rounds")}
    return recommend(rows, speeds, max_drop)


def row(name: str, ms: float | list[float], size: int, low: float = 0.0, skipped: str | None = None) -> dict[str, Any]:
    rounds = ms if isinstance(ms, list) else [ms] * 7
    return {
        "name": name,
        "rounds": rounds,
        "latency_ms": {"p50": sorted(rounds)[len(rounds) // 2]},
        "bytes": size,
        "top1_delta_ci95": [low, 0.01],
        "skipped": skipped,
    }


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
    skipped = {**row("half", 1, 50, skipped="runs on CUDA only"), "latency_ms": None, "rounds": None}
    chosen = choose(row("baseline", 2, 100), skipped)
    assert (chosen.name, chosen.rejected) == ("baseline", {"half": "runs on CUDA only"})


def test_where_nothing_was_measured_nothing_is_recommended() -> None:
    skipped = {**row("baseline", 1, 50), "latency_ms": None, "rounds": None}
    chosen = choose(skipped)
    assert (chosen.name, chosen.rejected) == (None, {"baseline": "not measured"})
