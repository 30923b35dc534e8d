"""Tuning a small artifact on a real server: what is written, what is kept, and what a mistake is told."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from serve.cli import app
from serve.runtime.card import load_card
from serve.runtime.serving import read_serving
from serve.torchserve.archive import build_archive, serving_of
from serve.tune.search import Goal
from serve.tune.servers import ServerKind
from serve.tune.space import Stage
from serve.tune.space import told as told_in_words
from serve.tune.tuning import Settings, tune
from tests.serve import artifacts


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["own"])
def test_what_is_chosen_is_written_beside_the_card_with_what_was_measured(tmp_path: Path, kind: ServerKind) -> None:
    artifact = artifacts.onnx(tmp_path / "artifact")
    usual = serving_of(artifact, load_card(artifact))
    (artifact / "serving.json").write_text(usual.text)
    os.link(artifact / "serving.json", tmp_path / "linked")  # as a store links its objects
    archive = build_archive(artifact, tmp_path / "small.mar", model_name="small")
    before = archive.read_bytes()
    said: list[str] = []
    goal = Goal(p99_ms=500)  # on a machine that others use too
    stage = Stage("batch size", lambda base: [dataclasses.replace(base, batch_size=2)])
    settings = Settings(kind, seconds=0.5, warm_s=0.1, images=4)
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
    assert told["chosen"]["serving"]["batch_size"] == max(held, key=lambda size: held[size])
    assert all(point["bad"] == 0 and point["memory_bytes"] > 0 for trial in told["trials"] for point in trial["points"])
    assert len(told["curves"]["chosen"]) == 7
    assert said[0].startswith(f"{told_in_words(usual)}: ")
    assert re.search(r"; at most \d+ s left$", said[0])
    load_card(artifact)  # it is whole as before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--p99", "20"], "--p99 must be a number above 0 and a unit"),
        (["--p99", "0ms"], "--p99 must be a number above 0"),
        (["--memory", "2"], "--memory must be a number above 0 and a unit"),
        (["--objective", "fast"], "--objective must be throughput or latency, got 'fast'"),
        (["--server", "nginx"], "--server must be own or torchserve, got 'nginx'"),
        (["--rate", "-1"], "--rate must be above 0"),
        ([], "there is no run 'none'"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, words: list[str], said: str) -> None:
    outcome = CliRunner().invoke(app, ["tune", "none", "--store", str(tmp_path), *words])
    assert outcome.exit_code == 2
    assert said in outcome.output
    assert len(outcome.output.strip().splitlines()) == 1
