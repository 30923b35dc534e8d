"""The bench of the search's methods: who was sooner is counted of searches that had something to look for."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.below import write_below
from benchmarks.search import HEADS, Case, Effort, main, row, sooner
from optimize.measure.figures import Difference
from optimize.measure.rows import Judgement
from optimize.measure.timing import Timing
from optimize.precision.precision_records import Budget, Found, Trial

CASE = Case("ResNet-20", "per tensor", 0.5)


def found(*trials: tuple[int, bool]) -> Found:
    """A search of five layers, whose trials left so many of them in float and held or did not."""
    return Found(
        title="net on images",
        task="classification",
        budget=Budget(max_drop=0.005, max_latency_ms=None, bits=(8, 32)),
        method="greedy",
        layers=5,
        chose=500,
        trials=tuple(
            Trial(number=number, bits=dict.fromkeys("abcde"[:wide], 32), delta=0.0, holds=holds)
            for number, (wide, holds) in enumerate(trials, start=1)
        ),
        pair="onnx-int8@openvino",
        execution=None,
        bits={},
        p50=2.0,
        judged=Judgement(
            images=500, score=0.9, difference=Difference(delta=-0.002, low=-0.01, high=0.01, gained=1, lost=2)
        ),
        fastest_float="onnx@openvino",
        fastest_float_p50=4.0,
        why=(),
        stages=(),
        timing=Timing(),
        cpu="Imaginary CPU",
    )


def test_an_effort_is_the_first_trial_that_holds_all_of_them_and_the_smallest_set_that_does() -> None:
    assert Effort.of(found((0, False), (4, True), (2, True), (1, False))) == Effort(2, 4, 2, 5)
    assert Effort.of(found((0, False), (1, False))) == Effort(None, 2, 5, 5)


def test_a_line_has_them_and_what_was_returned() -> None:
    cells = row(CASE, "greedy", found((0, False), (1, False), (2, True)))
    assert cells[:6] == ("ResNet-20, per tensor", "0.5", "greedy", "3", "3", "2 of 5")
    assert cells[6:] == ("onnx-int8@openvino", "90.00 %", "−0.20 (−1.00 to +1.00)", "2.00", "4.00")
    assert len(cells) == len(HEADS)
    assert row(CASE, "greedy", found((0, False)))[3] == "not reached"


def test_searches_that_ended_with_their_first_trial_are_not_counted() -> None:
    easy = {"greedy": Effort(1, 1, 0, 5), "halving": Effort(1, 1, 0, 5)}
    hard = {"greedy": Effort(3, 6, 2, 5), "halving": Effort(4, 9, 1, 5)}
    never = {"greedy": Effort(2, 9, 3, 5), "halving": Effort(None, 9, 5, 5)}
    said = sooner({CASE: easy, Case("a", "b", 1.0): hard, Case("c", "d", 1.0): never})  # type: ignore[dict-item]
    assert said == (
        "Of 3 cases 2 needed more than one trial. "
        "`greedy` reached the target in 2 of these, with 5 trials (before the other in 2), made 15 trials in all, and "
        "left 5 of 10 layers in float. "
        "`halving` reached the target in 1 of these, with 4 trials (before the other in 0), made 18 trials in all, and "
        "left 6 of 10 layers in float."
    )
    assert "In none of 1 cases" in sooner({CASE: easy})  # type: ignore[dict-item]


def test_the_table_takes_the_place_of_the_one_before_and_a_page_is_made_where_there_is_none(tmp_path: Path) -> None:
    page = tmp_path / "search.md"
    for text in ("first\n", "second\n"):
        write_below(page, text)
        assert page.read_text() == f"<!-- measured -->\n\n{text}"
    page.write_text("# Search\n\n<!-- measured -->\n\nNo table stands here yet.\n")
    write_below(page, "third\n")
    assert page.read_text() == "# Search\n\n<!-- measured -->\n\nthird\n"


def test_a_page_that_cannot_be_written_is_refused_before_hours_of_searches(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--data", "digits", "--write", str(tmp_path / "none" / "page.md")])
    assert ended.value.code == 2
