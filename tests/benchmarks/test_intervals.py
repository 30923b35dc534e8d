"""The benchmark of intervals: each is held against the other comparisons, and its page has its record's figures."""

from __future__ import annotations

import pytest

from benchmarks import intervals
from benchmarks.intervals import Comparison, Told, held

TOLD = [Told(2.0, 1.9, 2.1), Told(2.0, 1.5, 2.5), Told(4.0, 3.9, 4.1)]


def test_an_interval_is_held_against_the_ratio_of_the_others() -> None:
    # Of the others: the square roots of 8, of 8, and of 4.
    assert held(TOLD) == [False, False, False]
    assert held([TOLD[0], Told(2.0, 1.5, 3.0), TOLD[2]]) == [False, True, False]
    assert held([Told(2.0, 1.9, 2.1)] * 3) == [True] * 3


def test_the_page_has_the_figures_and_the_command() -> None:
    found = [
        Comparison(0.01 * n, {"int8 against float": told, "other": Told(1.0, 0.5, 2.0)}) for n, told in enumerate(TOLD)
    ]
    found.append(Comparison(None, {"once": Told(1.0, 1.0, 1.0)}))
    text = intervals.page(found, ["resnet18/ptq", "--repeats", "3", "--write", "docs/x.md"], "2026-11-28")
    assert "`python -m benchmarks.intervals resnet18/ptq --repeats 3`" in text
    assert "| int8 against float | 3 | 2.000 … 4.000 | 2.520 | 1.105 | 0 of 3 |" in text
    assert "| other | 3 | 1.000 … 1.000 | 1.000 | 4.000 | 3 of 3 |" in text
    assert "once" not in text
    assert "3 of 6 intervals hold the ratio of the others, 50.0%." in text
    assert "Other processes took 0.0% to 2.0% of the cores (median: 1.0%)." in text


def test_two_comparisons_are_the_least(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        intervals.main(["a/b", "--repeats", "1"])
    assert ended.value.code == 2
    assert "--repeats must be at least 2, got 1" in capsys.readouterr().err
