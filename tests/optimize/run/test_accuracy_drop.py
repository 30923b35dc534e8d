"""A loss of accuracy on the command line: half a point is never taken for half of all answers, nor the other way."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from optimize import cli
from optimize.run.recommendation.accuracy_drop import drop_of, within
from serve.runtime.errors import UserError
from tests.optimize.runs_fixtures import TINY


@pytest.mark.parametrize("words", ["0.5pp", "0.5 pp", ".5points", "0.50 points", "5e-1pp", " +0.5pp "])
@pytest.mark.parametrize("plain", ["fraction", "points"])
def test_with_its_unit_it_means_the_same_everywhere(words: str, plain) -> None:
    assert drop_of(words, plain=plain) == 0.005


@given(images=st.integers(1, 100_000), data=st.data())
def test_a_loss_of_as_many_images_as_are_allowed_is_within_and_of_one_more_is_not(images: int, data) -> None:
    lost = data.draw(st.integers(0, images - 1))
    for limit in (lost / images, drop_of(f"{100 * lost / images!r}pp", plain="points")):
        assert within(-lost / images, limit)
        assert not within(-(lost + 1) / images, limit)
    assert within(1 / images, 0.0)


def test_seven_images_of_a_thousand_are_seven_tenths_of_a_point() -> None:
    limit = drop_of("0.7pp", plain="points")
    assert -limit > -7 / 1000, "in binary it is not so"
    assert within(-7 / 1000, limit)


def test_a_bare_number_is_what_the_command_says() -> None:
    assert drop_of("0.02", plain="fraction") == 0.02
    assert drop_of("0.5", plain="points") == 0.005
    assert drop_of("0", plain="fraction") == drop_of("0", plain="points") == 0


def understood(words: str, plain: Any) -> float | str:
    """The fraction, or the line that refuses it."""
    try:
        return drop_of(words, plain=plain)
    except UserError as error:
        return str(error)


@given(st.floats(min_value=0, max_value=100, exclude_min=True).map(repr))
def test_no_bare_number_but_0_is_taken_for_either(words: str) -> None:
    found = {plain: understood(words, plain) for plain in ("fraction", "points")}
    (refusal,) = [said for said in found.values() if isinstance(said, str)]
    assert "write " in refusal
    assert "pp" in refusal


@example("1\x1e")  # is a space to `str.strip` and an end of line to `str.splitlines`
@given(st.text() | st.floats().map(repr) | st.from_regex(r"[0-9.eE+ -]{0,6}(pp|points|%)?", fullmatch=True))
def test_any_words_are_a_fraction_or_one_line(words: str) -> None:
    for plain in ("fraction", "points"):
        found = understood(words, plain)
        if isinstance(found, str):
            assert found.startswith("--max-drop ")
            assert len(found.splitlines()) == 1
        else:
            assert 0 <= found <= 1


def refused(*words: str) -> str:
    found = CliRunner().invoke(cli.app, list(words), env={"COLUMNS": "200"})
    assert found.exit_code == 2, found.output
    return found.stderr


@pytest.mark.parametrize("command", [("run", TINY), ("compare", "a", "b")])
def test_half_a_point_without_its_unit_is_no_fraction(command: tuple[str, ...], tmp_path) -> None:
    said = refused(*command, "--max-drop", "0.5", "--store", str(tmp_path / "store"))
    assert said == (
        "error: --max-drop 0.5 is a fraction here, which must be at most 0.05; write 0.5pp for 0.5 percentage "
        "points, or 50pp for the fraction 0.5\n"
    )
    assert refused(*command, "--max-drop", "2").endswith("write 2pp for 2 percentage points\n")
    assert not (tmp_path / "store").exists()


def test_a_fraction_is_no_half_point(tmp_path) -> None:
    said = refused("search", TINY, "--max-drop", "0.005", "--store", str(tmp_path / "store"))
    assert said == (
        "error: --max-drop 0.005 is 0.005 percentage points here; write 0.005pp if you want that, or 0.5pp for the "
        "fraction 0.005\n"
    )
    assert "at most 100 percentage points" in refused("search", TINY, "--max-drop", "101")
    assert "such as 0.5pp (half a percentage point), not '0.5%'" in refused("search", TINY, "--max-drop", "0.5%")
    assert not (tmp_path / "store").exists()
