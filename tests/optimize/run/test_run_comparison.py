"""Artifacts of several runs side by side: answers as they are stored, speeds measured anew and together."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import optimize as opt
from optimize import cli
from optimize.measure import process_pool
from optimize.measure.rows import Results, Row
from optimize.run.recommendation.rule import Recommend
from optimize.run.run_comparison import compare_runs
from optimize.statistics import paired_difference
from serve.runs.sealed_files import seal
from serve.runtime.errors import UserError
from serve.runtime.service.predictor import Predictor
from tests.optimize.runs_fixtures import RECIPE, TinyRun, made_run, run_recipe, shared_folder, tiny_run, with_stages
from tests.optimize.workbench import OtherRun

__all__ = ["tiny_run"]  # fixture
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("uncompiled")]

QUICK = opt.Timing(rounds=2, batch_sizes=(1, 4), seconds=0.01)


def compared(store: Path, *names: str, **rule: object) -> dict[str, Row]:
    table = opt.compare_runs(*names, store=store, measure="cpu", timing=QUICK, **rule)  # type: ignore[arg-type]
    return {row.name: row for row in table.rows}


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``tiny``, and ``other``: the same network, trained for less, judged by the same images."""
    baseline = {**RECIPE["baseline"], "epochs": 1}
    store = tmp_path_factory.mktemp("two-runs") / "model_store"
    shutil.copytree(made_run(shared_folder(tmp_path_factory)).store, store)
    run_recipe(store, with_stages({"pass": "fuse"}, baseline=baseline), run="other")
    return store


def right(store: Path, run: str, artifact: str) -> np.ndarray:
    """Which validation images an artifact gets right, by the runtime and numpy."""
    from optimize.data.formats.base import open_data
    from optimize.data.pixels import decoded

    predictor = Predictor(store / run / "artifacts" / artifact)
    val = open_data("digits").val
    logits = predictor.logits(decoded(val, predictor.card.preprocessing))
    return np.asarray(logits.argmax(dim=1) == val.labels)


def test_a_run_stands_for_its_baseline_and_its_recommended_artifact(tiny_run: TinyRun, two_runs: Path) -> None:
    rows = compared(two_runs, "tiny", "other/fuse")
    assert list(rows) == [*dict.fromkeys(["tiny/baseline", f"tiny/{tiny_run.report.recommended}"]), "other/fuse"]
    for name, row in rows.items():
        assert row.measured is not None
        assert row.measured.latency_ms.p50 > 0
        run, artifact = name.split("/")
        report = json.loads((two_runs / run / "report.json").read_text())
        stored = next(entry for entry in report["rows"] if entry["name"] == artifact)
        measured = [pair["measured"] for pair in stored["pairs"] if pair["measured"]]
        assert row.measured.accuracy.score in [entry["accuracy"]["top1"] for entry in measured]
        assert row.file is not None
        assert row.file.bytes == stored["file"]["bytes"]
        # Times of two sessions do not compare: these are none of the stored ones.
        assert row.measured.latency_ms.p50 not in [entry["latency_ms"]["p50"] for entry in measured]
    first = rows["tiny/baseline"].measured
    assert first is not None
    assert first.vs_eager.value == 1


def test_the_difference_between_two_models_is_paired_by_image(two_runs: Path) -> None:
    row = compared(two_runs, "tiny/fuse", "other/fuse")["other/fuse"]
    assert row.measured is not None
    found = row.measured.accuracy.difference
    assert found is not None
    expected = paired_difference(right(two_runs, "tiny", "fuse"), right(two_runs, "other", "fuse"))
    assert (found.gained, found.lost) == (expected.gained, expected.lost)
    assert (found.low, found.high) == (expected.low, expected.high)
    assert found.gained > 0  # else it would not show that they are two models


def test_runs_that_were_judged_by_different_images_do_not_compare(two_runs: Path, tmp_path: Path) -> None:
    store = tmp_path / "model_store"
    shutil.copytree(two_runs, store)
    path = store / "other" / "report.json"
    report = json.loads(path.read_text())
    report["data"] |= {"val_fingerprint": "0123456789abcdef", "name": "cifar10"}
    path.write_text(json.dumps(report))
    seal(path.parent)
    with pytest.raises(UserError, match=r"tiny by 359 of digits \(.{12}\); other by 359 of cifar10 \(0123456789ab\)"):
        compared(store, "tiny", "other")
    result = CliRunner().invoke(cli.app, ["compare", "tiny", "other", "--store", str(store)])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1


def test_a_baseline_that_guesses_and_answers_of_another_machine_are_told(two_runs: Path, tmp_path: Path) -> None:
    def remarks(store: Path) -> list[str]:
        found = opt.compare_runs("tiny/baseline", "other/fuse", store=store, measure="cpu", timing=QUICK)
        return [remark for remark in found.recommendation.remarks if "guessing" in remark or "machine" in remark]

    assert remarks(two_runs) == []
    store = tmp_path / "model_store"
    shutil.copytree(two_runs, store)
    path = store / "tiny" / "report.json"
    report = json.loads(path.read_text())
    report["data"]["classes"] = 1  # among which every answer is a guess
    report["machine"]["cpu"] = "Imaginary CPU"
    path.write_text(json.dumps(report))
    seal(path.parent)
    guesses, elsewhere = remarks(store)
    assert "guessing among 1 classes gives (100.00 %)" in guesses
    assert elsewhere.startswith(
        "The answers of tiny come from another machine (Imaginary CPU), but speed and memory from "
    )


def test_each_is_run_by_the_execution_that_its_report_has_as_the_best(tiny_run: TinyRun, two_runs: Path) -> None:
    best = {name: tiny_run.row(name).best for name in ("baseline", "onnx-int8")}
    rows = compared(two_runs, *(f"tiny/{name}" for name in best))
    for name, pair in best.items():
        assert pair is not None
        (own,) = rows[f"tiny/{name}"].pairs
        assert own.execution == pair.execution
        assert own.id == f"tiny/{pair.id}"


def test_runs_are_compared_while_no_other_run_measures(
    two_runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Beginning(OtherRun):
        def started(self, name: str) -> None:
            if name == "speed":  # all are open by now
                self.measure()

    monkeypatch.setattr(process_pool, "LOCK_FILE", tmp_path / "lock")
    other = Beginning(tmp_path / "lock")
    names = ("tiny/baseline", "other/fuse")
    compare_runs(two_runs, names, timing=QUICK, rule=Recommend(), devices=("cpu",), listener=other)
    assert other.waited_for


def test_what_cannot_be_compared_is_named(two_runs: Path) -> None:
    for names, words in {
        ("tiny/ptq",): "at least two",
        ("tiny", "othr"): "did you mean other",
        ("tiny/pqt", "other"): "no artifact 'pqt' .did you mean qat or ptq",
        ("tiny/half", "other"): "tiny/half was not measured: runs on CUDA only",
    }.items():
        with pytest.raises(UserError, match=words):
            compared(two_runs, *names)


def test_the_command_prints_the_whole_table_or_json(two_runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optimize.measure.timing.Timing", lambda: QUICK)  # its default takes eight seconds
    words = ["compare", "tiny/baseline", "other/fuse", "--store", str(two_runs), "--measure", "cpu"]
    result = CliRunner().invoke(cli.app, [*words, "--objective", "size", "--json"])
    assert result.exit_code == 0, result.output
    results = Results.from_json(json.loads(result.stdout))
    assert [row.name for row in results.rows] == ["tiny/baseline", "other/fuse"]
    assert all(row.measured is not None and list(row.measured.throughput) == [1, 4] for row in results.rows)
    assert "the smallest file" in results.recommendation.rule


def test_a_list_of_runs_has_no_latencies_side_by_side(two_runs: Path) -> None:
    result = CliRunner().invoke(cli.app, ["list", "--store", str(two_runs)])
    head, *lines = result.stdout.splitlines()
    assert "ms" not in head
    assert [line.split()[0] for line in lines[:2]] == ["other", "tiny"]
    assert "speed is relative to the fastest float execution of each run" in lines[-1]


def test_a_report_of_another_version_is_left_out_of_the_list_and_named(two_runs: Path, tmp_path: Path) -> None:
    store = tmp_path / "model_store"
    shutil.copytree(two_runs, store)
    (store / "other" / "report.json").write_text('{"schema": 1, "artifacts": []}')
    result = CliRunner().invoke(cli.app, ["list", "--store", str(store)])
    assert result.exit_code == 0
    assert "other" not in result.stdout
    assert "tiny" in result.stdout
    (line,) = result.stderr.splitlines()
    assert "other/report.json is of an older version (schema 1, not 5)" in line
    assert line.endswith("run the model again")
