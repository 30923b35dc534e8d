"""The bar: nothing for short steps, the time left for long ones, in a terminal and in a real notebook."""

from __future__ import annotations

import io
import pickle
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from optimize.report.progress_display import Display
from serve.common.progress import ProgressBar, TerminalSurface, duration, here, surface
from tests.optimize.runs_fixtures import NO_GRAPHS, ONE_THREAD, UNCOMPILED

TINY = f"{Path(__file__).parents[3] / 'examples' / 'tiny_cnn.py'}:tiny"


class Drawn:
    """A surface that remembers what was drawn on it."""

    def __init__(self) -> None:
        self.texts: list[tuple[str, float, str]] = []
        self.lines: list[str] = []
        self.shown = False

    def draw(self, name: str, fraction: float, text: str) -> None:
        self.texts.append((name, fraction, text))
        self.shown = True

    def clear(self) -> None:
        self.shown = False

    def say(self, line: str) -> None:
        assert not self.shown
        self.lines.append(line)


def eventually(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_a_short_step_shows_nothing() -> None:
    drawn = Drawn()
    bar = ProgressBar(drawn, after_s=3600)
    bar.started("quick")
    timer = bar._timer
    assert timer is not None
    bar.progressed(0.5, "half")
    bar.ended("quick", 0.0, cached=False, skipped=None)
    timer.join()  # at once: the hour is called off
    assert drawn.texts == []


def test_a_long_step_that_says_nothing_is_shown_with_the_time_so_far() -> None:
    drawn = Drawn()
    bar = ProgressBar(drawn, after_s=0.05)
    bar.started("export")
    eventually(lambda: drawn.shown)
    name, fraction, text = drawn.texts[0]
    assert (name, fraction) == ("export", 0.0)
    assert re.fullmatch(r"\d+ s so far", text)
    bar.close()
    assert not drawn.shown


def test_the_time_left_is_what_the_rest_takes_at_the_same_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, now = Drawn(), [1000.0]
    monkeypatch.setattr("serve.common.progress.time.monotonic", lambda: now[0])
    bar = ProgressBar(drawn, after_s=2.0)
    bar.started("speed")
    now[0] += 30.0
    bar.progressed(0.25, "round 2/8")
    assert drawn.texts == [("speed", 0.25, "round 2/8 · 90 s left")]
    bar.close()


def test_between_two_reports_the_time_left_runs_down_and_what_takes_longer_tells_the_time_so_far(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn, now = Drawn(), [1000.0]
    monkeypatch.setattr("serve.common.progress.time.monotonic", lambda: now[0])
    bar = ProgressBar(drawn, after_s=2.0)
    bar.started("start")
    now[0] += 10.0
    bar.progressed(0.5, "1 of 2 answer")
    for seconds in (4.0, 6.0, 1.0):
        now[0] += seconds
        bar._draw()
    now[0] += 1.0
    bar.progressed(1.25, "1 of 2 answer")
    assert [text.rpartition(" · ")[2] for _, _, text in drawn.texts] == [
        "10 s left", "6 s left", "0 s left", "21 s so far", "22 s so far",
    ]  # fmt: skip
    assert drawn.texts[-1][1] == 1.0
    bar.close()


def test_a_bar_that_is_told_nothing_goes_on_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.common.progress._TICK_S", 0.02)
    drawn = Drawn()
    bar = ProgressBar(drawn, after_s=0.01)
    bar.started("export")
    eventually(lambda: len(drawn.texts) >= 3)
    bar.close()
    ended = len(drawn.texts)
    time.sleep(0.1)
    assert len(drawn.texts) == ended


def test_lines_are_written_where_no_bar_is() -> None:
    drawn = Drawn()
    bar = ProgressBar(drawn, after_s=0.0)
    bar.started("start")
    bar.progressed(0.5, "")
    shown = [drawn.shown]
    with bar.aside():
        shown.append(drawn.shown)
    bar._draw()
    shown.append(drawn.shown)
    bar.close()
    assert [*shown, drawn.shown] == [True, False, True, False]


def test_what_is_worth_a_line_stays_where_the_bar_would_be_and_a_script_is_told_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    drawn = Drawn()
    bar = ProgressBar(drawn, after_s=0.0)
    bar.started("load")
    bar.progressed(0.5, "")
    bar.said("images are [not] mirrored")
    bar.close()
    assert drawn.lines == ["images are [not] mirrored"]
    console = Console(file=io.StringIO(), force_terminal=True, width=20)
    TerminalSurface(console).say("images are [not] mirrored, nor turned")
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "images are [not] mirrored, nor turned\n"
    ProgressBar(None).said("images")
    assert capfd.readouterr() == ("", "")


def test_durations_are_short() -> None:
    assert [duration(s) for s in (0.4, 99.2, 185)] == ["0 s", "99 s", "3:05 min"]


def test_a_log_gets_lines_and_no_bar() -> None:
    console = Console(file=io.StringIO(), width=200)
    assert surface(console) is None
    with Display(console) as display:
        display.started("fuse")
        display.progressed(0.5, "x")
        display.ended("fuse", 1.25, cached=False, skipped=None)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "  + fuse             1.2 s\n"


def test_a_terminal_gets_a_bar_that_is_removed_again() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    drawn = TerminalSurface(console)
    drawn.draw("speed", 0.5, "10 s left")
    drawn.clear()
    assert isinstance(console.file, io.StringIO)
    assert "10 s left" in console.file.getvalue()


def test_a_bar_pickles_as_one_of_the_process_that_opens_it() -> None:
    assert isinstance(pickle.loads(pickle.dumps(here())), ProgressBar)


@pytest.mark.slow
def test_a_notebook_shows_the_bar_the_variant_and_none_of_torchs_deprecations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nbformat
    from nbclient import NotebookClient

    for name, value in {**UNCOMPILED, **ONE_THREAD}.items():
        monkeypatch.setenv(name, value)
    cells = [
        f"{NO_GRAPHS}\n"
        "import optimize as opt, serve.common.progress\n"
        "serve.common.progress.SHOWN_AFTER_S = 0.1\n"  # the tiny network is not trained for two seconds
        f"base = opt.load({TINY!r}, store={str(tmp_path / 'store')!r}, device='cpu', training=opt.Training(epochs=3))",
        "opt.apply(opt.apply(base, opt.Fuse()), opt.Ptq(images=32)).predict("
        "opt.Variant.predict.__globals__['_encoded'](__import__('PIL.Image').Image.new('RGB', (8, 8))))",
        "base",
        "opt.compare(base, timing=opt.Timing(rounds=1, seconds=0.01, batch_sizes=(1,)))",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": Path(__file__).parents[3]}}).execute()
    outputs: list[list[Any]] = [cell["outputs"] for cell in notebook["cells"]]
    # The bar of the training, and of all else that takes a tenth of a second on this machine; each is empty by now.
    assert {o["output_type"] for o in outputs[0]} == {"display_data"}
    bars = [o["data"]["text/html"] for o in outputs[0] if "text/html" in o["data"]]
    assert set(bars) == {""}
    lines = [o["data"]["text/plain"] for o in outputs[0] if "text/html" not in o["data"]]
    said = (r"preprocessing: resize 32", r"not mirrored", r"^training: \S+ s an epoch: ")
    assert [[bool(re.search(words, line)) for words in said].index(True) for line in lines] == [0, 1, 2]
    assert not [o for outs in outputs for o in outs if o.get("name") == "stderr"], outputs
    shown = outputs[2][0]["data"]
    assert len(shown["text/plain"]) < 400
    assert "<table" in shown["text/html"]
