"""What commands show while they pack and write: a bar on a terminal, with how far they are; elsewhere nothing."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from serve.cli import app
from serve.common import progress
from serve.common.progress import ProgressBar
from serve.torchserve.state import locked
from tests.serve import artifacts


class Drawn:
    """A surface that remembers what was drawn on it, and whether lines were written over it."""

    def __init__(self) -> None:
        self.drawn: list[tuple[str, float, str]] = []
        self.shown = False

    def draw(self, name: str, fraction: float, text: str) -> None:
        self.drawn.append((name, fraction, text.partition(" · ")[0]))
        self.shown = True

    def clear(self) -> None:
        self.shown = False

    def say(self, line: str) -> None: ...


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Drawn:
    """Where the bar is drawn, at once."""
    surface = Drawn()
    monkeypatch.setattr(progress, "here", lambda: ProgressBar(surface, after_s=0.0))
    monkeypatch.setattr(progress, "_EVERY_S", -60.0)  # each: the timer may have drawn since the clock was read
    return surface


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two artifacts, of which one is ten times as large as the other."""
    root = tmp_path_factory.mktemp("shown")
    for name in ("one", "two"):
        folder = artifacts.torchscript(root / "small" / "artifacts" / name, name)
        size = sum(file.stat().st_size for file in folder.iterdir())
    (folder / "notes").write_bytes(b"\0" * 9 * size)
    return root


def test_packing_shows_which_share_of_the_run_is_packed(store: Path, drawn: Drawn) -> None:
    result = CliRunner().invoke(app, ["package", "small", "--store", str(store)])
    assert result.exit_code == 0, result.output
    told = list(dict.fromkeys(entry for entry in drawn.drawn if entry[1] > 0))
    assert told == [("package", pytest.approx(1 / 11, rel=0.02), "small-one"), ("package", 1.0, "small-two")]
    assert not drawn.shown
    archives = store / "small" / "archives"
    assert [line.split("  ")[0] for line in result.stdout.splitlines()] == [
        str(archives / f"small-{name}") for name in ("one.mar", "one.mar.cdx.json", "two.mar", "two.mar.cdx.json")
    ]


def test_an_export_shows_that_it_is_under_way_and_nothing_when_it_has_ended(
    store: Path, tmp_path: Path, drawn: Drawn
) -> None:
    words = ["export", "small", "--artifact", "one", "--store", str(store), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, [*words, "--to", "kubernetes"])
    assert result.exit_code == 0, result.output
    assert {name for name, *_ in drawn.drawn} == {"export to kubernetes"}
    assert not drawn.shown
    drawn.drawn.clear()
    refused = CliRunner().invoke(app, [*words, "--to", "kubernetes"])  # the folder is not empty any more
    assert refused.exit_code == 2
    assert not drawn.shown


def test_in_a_script_nothing_is_shown(store: Path) -> None:
    result = CliRunner().invoke(app, ["package", "small", "--store", str(store)])
    assert result.stderr == ""


def test_a_stop_that_waits_shows_for_how_long(store: Path, drawn: Drawn) -> None:
    with contextlib.ExitStack() as starting:
        starting.enter_context(locked(store))
        done = threading.Timer(0.5, starting.pop_all().close)
        done.start()
        result = CliRunner().invoke(app, ["stop", "--store", str(store)])
        done.join()
    assert result.exit_code == 0, result.output
    assert "waiting until it ends" in result.stdout
    assert "stop" in {name for name, _, _ in drawn.drawn}
    assert not drawn.shown
