"""Tuning a small artifact on a real server: what is written, what is kept, and what a mistake is told."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from serve.cli import app
from serve.runtime.card.card import load_card
from serve.runtime.card.serving import read_serving
from serve.torchserve.archive_builder import build_archive, serving_of
from serve.tune import search
from serve.tune.search import Goal
from serve.tune.space import Stage, describe
from serve.tune.tuning import Settings, tune
from tests.serve import artifacts


@pytest.mark.slow
def test_what_is_chosen_is_written_beside_the_card_with_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two turns, both of which must be won, and not six of seven, as `test_tune_search` has it: each starts two servers.
    monkeypatch.setattr(search, "_TURNS", 2)
    monkeypatch.setattr(search, "_WINS_NEEDED", 2)
    artifact = artifacts.onnx(tmp_path / "artifact")
    usual = dataclasses.replace(serving_of(artifact, load_card(artifact)), batch_size=8)
    (artifact / "serving.json").write_text(usual.text)
    os.link(artifact / "serving.json", tmp_path / "linked")  # as a store links its objects
    archive = build_archive(artifact, tmp_path / "small.mar", model_name="small")
    before = archive.read_bytes()
    said: list[str] = []
    goal = Goal(p99_ms=500)  # on a machine that others use too
    stage = Stage("batch size", lambda base: [dataclasses.replace(base, batch_size=2)])
    settings = Settings("own", seconds=0.2, arrivals=5, warm_s=0.1, images=4)
    found = tune(artifact, goal, settings, said.append, [stage])

    assert read_serving(artifact) == found.chosen.way
    assert found.chosen.way in (usual, dataclasses.replace(usual, batch_size=2))
    assert (tmp_path / "linked").read_text() == usual.text
    assert archive.read_bytes() == before
    assert not (artifact / "tuning.journal").exists()
    assert "<svg" in (artifact / "tuning.svg").read_text()
    told = json.loads((artifact / "tuning.json").read_text())
    assert [trial["serving"]["batch_size"] for trial in told["trials"]] == [8, 2]
    held = {
        trial["serving"]["batch_size"]: max(
            (
                point["rate"]
                for point in trial["points"]
                if point["rate"] and not point["bad"] and not point["rejected"] and not point["gave_up"]
                if point["p99"] is not None and point["p99"] <= 500
            ),
            default=0.0,
        )
        for trial in told["trials"]
    }
    turns = [(turn["best"]["p99"], turn["usual"]["p99"]) for turn in told["turns"]]
    stays = turns and sum(best < usual_ms for best, usual_ms in turns) < 2
    assert told["chosen"]["serving"]["batch_size"] == (8 if stays else max(held, key=lambda size: held[size]))
    assert all(point["bad"] == 0 and point["memory_bytes"] > 0 for trial in told["trials"] for point in trial["points"])
    asked = [point for trial in told["trials"] for point in trial["points"]]
    asked += [point for curve in told["curves"].values() for point in curve]
    assert all(point["seconds"] >= max(0.2, 5 / (point["rate"] or math.inf)) for point in asked)
    assert len(told["curves"]["chosen"]) == 7
    first, second, *asking, last = said
    assert len(asking) == bool(turns)
    for line in asking:
        assert re.fullmatch(r"comparing the best and the present settings in turns …; about \d+ s left", line)
    assert re.fullmatch(rf"{re.escape(describe(usual))}: {re.escape(found.usual.outcome)}; about \d+ s left", first)
    assert second.startswith(f"{describe(dataclasses.replace(usual, batch_size=2))}: ")
    assert last == "measuring the curve …"
    load_card(artifact)  # it is whole as before


@pytest.mark.slow
def test_torchserve_is_started_as_each_way_says_and_asked(tmp_path: Path) -> None:
    artifact = artifacts.onnx(tmp_path / "artifact")
    usual = serving_of(artifact, load_card(artifact))
    settings = Settings("torchserve", seconds=0.3, arrivals=5, warm_s=0.1, images=4, curve=False)
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    found = tune(artifact, Goal(p99_ms=1000), settings, lambda line: None, [])

    assert found.chosen.way == usual == read_serving(artifact)
    told = json.loads((artifact / "tuning.json").read_text())
    assert told["server"] == "torchserve"
    (trial,) = told["trials"]
    saturated, *at_rates = trial["points"]
    assert saturated["rate"] is None
    assert at_rates, "it was asked at stated rates too"
    for point in trial["points"]:
        assert point["throughput"] > 0
        assert point["bad"] == 0
        assert point["memory_bytes"] > 150e6, "Java's, and a worker's"
    assert {process.pid for process in psutil.Process().children(recursive=True)} <= before, "it is stopped"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--p99", "20"], "--p99 must be a number above 0 and a unit"),
        (["--p99", "0ms"], "--p99 must be a number above 0"),
        (["--memory", "2"], "--memory must be a number above 0 and a unit"),
        (["--objective", "fast"], "--objective must be throughput or latency, got 'fast'"),
        (["--server", "nginx"], "--server must be own or torchserve, got 'nginx'"),
        (["--rate", "-1"], "--rate must be above 0"),
        (["--rate", "50"], "--rate 50 needs --objective latency"),
        (["--short", "--seconds", "8"], "--seconds 8 cannot be used with --short"),
        ([], "there is no run 'none'"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, words: list[str], said: str) -> None:
    outcome = CliRunner().invoke(app, ["tune", "none", "--store", str(tmp_path), *words])
    assert outcome.exit_code == 2
    assert said in outcome.output
    assert len(outcome.output.strip().splitlines()) == 1
