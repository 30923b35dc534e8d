"""The benchmark of costly images: its bounds are stated and kept to, and its page has its record's figures."""

from __future__ import annotations

import pytest

from benchmarks import decoding
from benchmarks.decoding import BOUNDS, Cost
from benchmarks.hostile.costly import costly
from serve.runtime.images.headers import FORMATS

FOUND = (
    Cost("BMP", "16x16 pixels, run-length", 8_000_000, 0, 413, 0.0004),
    Cost("PNG", "large", 1_000_000, 10_000_000, 200, 0.3 + 0.15 + 0.8),
)


def test_every_format_that_is_accepted_has_a_bound_and_files_that_try_it() -> None:
    assert set(BOUNDS) == set(FORMATS) == {kind for kind, _, _ in costly()}


def test_a_bound_grows_with_bytes_and_with_pixels() -> None:
    assert FOUND[1].share == pytest.approx(1)
    assert Cost("PNG", "", 0, 0, 200, 0.3).share == pytest.approx(1)
    assert Cost("PNG", "", 0, 1_000_000, 200, 0.76).share == pytest.approx(2)


def test_the_page_has_the_figures_and_the_command() -> None:
    text = decoding.page(FOUND, ["--repeats", "2", "--write", "docs/benchmarks/decoding.md"])
    assert "`python -m benchmarks.decoding --repeats 2`" in text
    assert "| PNG | 0.3 | 0.15 | 0.08 | large | 100% |" in text
    assert "| GIF | 0.1 | 0.02 | 0.04 | – | – |" in text
    assert "| BMP | 16x16 pixels, run-length | 8.00 | – | 413 | 0.000 | 0.86 |" in text
    assert "| PNG | large | 1.00 | 10.0 | 200 | 1.250 | 1.25 |" in text


def test_a_file_that_takes_longer_than_its_bound_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = [entry for entry in costly() if entry[1] == "4,000 comments"]
    monkeypatch.setattr(decoding, "costly", lambda: few)
    assert decoding.main(["--repeats", "1"]) == 0
    monkeypatch.setitem(BOUNDS, "JPEG", decoding.Bound(1e-9, 0, 0))
    assert decoding.main(["--repeats", "1"]) == 1
    assert "JPEG, 4,000 comments: " in capsys.readouterr().err
