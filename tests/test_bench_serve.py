"""The bench of serving: its ratios and verdicts are those of the rounds, and its subjects really answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import serve_page as page
from benchmarks.serve import PHOTOS
from benchmarks.serve_subjects import Shot, Stage, Subject
from serve.load import known
from serve.load.histogram import Histogram
from serve.load.pictures import make_pictures
from serve.load.workload import Workload
from serve.runtime.card import load_card
from serve.runtime.stages import STAGES
from serve.torchserve.archive import serving_of
from tests.serve import artifacts


def shot(throughput: float, milliseconds: float = 1.0, **fields: object) -> Shot:
    latency = Histogram()
    for _ in range(10):
        latency.add(milliseconds)
    return Shot(throughput, latency, 1.0, 0.1, **fields)  # type: ignore[arg-type]


# Two rounds of one client and of eight; the machine was half as fast in the second.
SHOTS = {
    ("own", PHOTOS, 1): [shot(150, 4), shot(75, 8)],
    ("own", PHOTOS, 8): [shot(360, 20), shot(190, 40)],
    ("pipelined", PHOTOS, 1): [shot(200, 4), shot(100, 8)],
    ("pipelined", PHOTOS, 8): [shot(400, 20), shot(200, 40)],
    ("serial", PHOTOS, 1): [shot(250, 3.5), shot(125, 7)],
    ("serial", PHOTOS, 8): [shot(250, 3.5), shot(125, 7)],
}


def test_aims_are_judged_by_the_median_of_ratios_within_a_round() -> None:
    ratio, extra = page.aims(SHOTS, ["own", "pipelined", "serial"], PHOTOS)
    assert ratio.values == (360 / 400, 190 / 200)
    assert ratio.value == pytest.approx(0.925)
    assert ratio.met
    assert extra.value == pytest.approx(0.75, abs=0.05)
    assert not extra.met
    assert "**fail**" in extra.line
    assert "pass" in ratio.line


def test_aims_without_what_they_are_judged_by_are_not_told() -> None:
    assert page.aims(SHOTS, ["own"], PHOTOS) == []


def test_tables_have_a_line_for_each_subject_that_was_measured_and_the_plot_is_drawn(tmp_path: Path) -> None:
    def never(workload: str, clients: int, seconds: float) -> Shot:
        raise AssertionError

    subjects = [Subject(key, key.upper(), never) for key in ("own", "pipelined", "serial")]
    lines = page.speed_table(SHOTS, [*subjects, Subject("stock", "STOCK", left_out="no captum")], PHOTOS, (1, 8))
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| OWN", "| PIPELINED", "| SERIAL"]
    assert "| 112/s | 275/s | 6.00 ms" in lines[2].replace("5.99", "6.00").replace("6.01", "6.00")
    page.plot(SHOTS, subjects, PHOTOS, tmp_path / "plot.svg")
    assert "<svg" in (tmp_path / "plot.svg").read_text()


def test_the_rest_of_a_request_is_what_the_stages_do_not_tell() -> None:
    told = {("own", PHOTOS, 1): [shot(1, 10, stages={"decode": 3.0, "infer": 4.5})]}
    line = page.stage_table(told, [Subject("own", "OWN")], PHOTOS, 1)[2]
    assert [float(cell) for cell in line.split("|")[2:-1]] == pytest.approx([0, 3, 0, 4.5, 0, 2.5, 10], abs=0.06)


@pytest.mark.slow
def test_subjects_answer_and_are_stopped(tmp_path: Path) -> None:
    artifact = artifacts.onnx(tmp_path / "artifact")
    serving = serving_of(artifact, load_card(artifact))
    items = known.items(known.opened(artifact, serving), make_pictures(4))
    with Stage(tmp_path, artifact, {"": serving}, {PHOTOS: Workload(items)}) as stage:
        subjects = stage.start(tmp_path, 5, ("echo-uvicorn", "own", "serial", "pipelined"))
        found = {
            subject.key: subject.ask(PHOTOS, clients, 0.3)
            for subject in subjects
            if subject.ask is not None
            for clients in (2,)
        }
    assert list(found) == ["echo-uvicorn", "own", "serial", "pipelined"]
    assert all(one.bad == 0 and one.throughput > 0 and one.server_ms > 0 for one in found.values())
    assert set(found["pipelined"].stages) == set(STAGES)
    assert set(found["own"].stages) >= set(STAGES)
