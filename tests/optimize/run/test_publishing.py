"""What a run decides of how its artifacts are served: which execution comes first; and that it packs again alike."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from optimize.measure.rows import Row
from optimize.run.publishing import evidence_of, preferred_executions
from optimize.tasks.classification import CLASSIFICATION
from serve.common.options import ServingOptions
from serve.packing.pack import package_run
from serve.runtime.card.card import Card, Preprocessing
from serve.runtime.card.execution import Execution
from serve.runtime.engines.base import pair_id
from tests.optimize import synthetic
from tests.optimize.runs_fixtures import TinyRun, copied_store, run_recipe, tiny_run, with_stages

__all__ = ["copied_store", "tiny_run"]  # fixtures

ONNX = Card(
    name="onnx",
    model="toynet",
    task="classification",
    format="onnx",
    file="model.onnx",
    precision="float32",
    input_dtype="float32",
    device="any",
    preprocessing=Preprocessing(8, (8, 8)),
    classes=("a", "b"),
    files={"model.onnx": "0" * 64},
)


def row(*pairs: tuple[str, str, int | None, float | None]) -> Row:
    """A row of ``onnx`` with pairs of engine, device, threads and p50; None: it failed."""
    body = synthetic.row("onnx", "fuse", "float32", (0.9, 1.0, 4.0))
    body["pairs"] = []
    for engine, device, threads, ms in pairs:
        execution = Execution(engine, device, threads)
        pair: dict[str, Any] = {"id": pair_id("onnx", execution), "execution": execution.to_json()}
        if ms is None:
            pair["skip"] = {"kind": "failed", "reason": "it fell over"}
        else:
            pair["measured"] = synthetic.measured(0.9, ms, 4.0, "fuse")
        body["pairs"].append(pair)
    return Row.from_json(body)


@pytest.mark.parametrize(
    ("pairs", "order"),
    [
        pytest.param(
            [("openvino", "cpu", None, 3.0), ("onnxruntime", "cpu", None, 2.0)],
            [("onnxruntime", "cpu"), ("openvino", "cpu"), ("onnxruntime-cuda", "cuda")],
            id="the measured ones by their p50, what was not measured after them",
        ),
        pytest.param(
            [("openvino", "cpu", None, None), ("onnxruntime", "cpu", None, 9.0)],
            [("onnxruntime", "cpu"), ("onnxruntime-cuda", "cuda"), ("openvino", "cpu")],
            id="what failed comes last, as the engines rank",
        ),
        pytest.param(
            [("openvino", "cpu", None, 3.0), ("onnxruntime-cuda", "cuda:1", None, 0.5)],
            [("onnxruntime-cuda", "cuda"), ("openvino", "cpu"), ("onnxruntime", "cpu")],
            id="which GPU it was measured on is not kept",
        ),
    ],
)
def test_the_executions_of_an_archive_stand_best_first(pairs: Any, order: list[tuple[str, str]]) -> None:
    found = [(entry.engine, entry.device) for entry in preferred_executions(row(*pairs), ONNX)]
    first = [entry for entry in found if entry in order]
    assert first == order


def test_an_execution_keeps_the_threads_that_it_was_measured_with() -> None:
    measured = row(("openvino", "cpu", 1, 3.0), ("openvino", "cpu", None, 4.0))
    found = [entry for entry in preferred_executions(measured, ONNX) if entry.engine == "openvino"]
    assert found == [Execution("openvino", threads=1), Execution("openvino")]


def test_an_archive_carries_the_accuracy_of_what_was_measured_with_its_interval() -> None:
    measured = row(
        ("openvino", "cpu", 1, 3.0), ("onnxruntime-cuda", "cuda:1", None, 0.5), ("onnxruntime", "cpu", None, None)
    )
    found = evidence_of(measured, CLASSIFICATION)
    assert [entry.execution for entry in found] == [
        Execution("openvino", threads=1),
        Execution("onnxruntime-cuda", "cuda"),
    ]
    accuracy = measured.pairs[0].measured.accuracy  # type: ignore[union-attr]
    assert (found[0].metric, found[0].score, found[0].images) == ("top1", accuracy.score, accuracy.images)
    assert 0 < found[0].low < accuracy.score < found[0].high < 1


def test_the_recommended_pair_is_served_first_though_a_less_accurate_one_is_faster() -> None:
    measured = row(("openvino", "cpu", None, 3.0), ("onnxruntime", "cpu", None, 2.0))
    first = preferred_executions(measured, ONNX, "onnx@openvino")[:2]
    assert first == (Execution("openvino"), Execution("onnxruntime"))
    assert preferred_executions(measured, ONNX, "ptq@torchscript")[0] == Execution("onnxruntime")


def contents(archive: Path, name: str) -> Any:
    with zipfile.ZipFile(archive) as opened:
        return json.loads(opened.read(name))


def test_an_archive_names_first_what_the_report_recommends_or_found_fastest(tiny_run: TinyRun) -> None:
    checked = 0
    for entry in tiny_run.report.rows:
        if entry.best is None:
            continue
        beside = tiny_run.folder / "artifacts" / entry.name / "serving.json"
        (first, *_) = json.loads(beside.read_text())["executions"]
        chosen = tiny_run.report.chosen_pair if entry == tiny_run.report.chosen else None
        assert first == (chosen or entry.best).execution.to_json()
        assert contents(tiny_run.folder / "archives" / f"tiny-{entry.name}.mar", "serving.json") == json.loads(
            beside.read_text()
        )
        checked += 1
    assert checked > 5


def test_a_run_packed_again_gives_the_same_bytes_and_options_change_what_they_name(copied_store: Path) -> None:
    folder = copied_store / "tiny" / "archives"
    before = {path.name: path.read_bytes() for path in folder.glob("*.mar")}
    assert {path.name for path in folder.iterdir()} == before.keys() | {f"{name}.cdx.json" for name in before}
    again = package_run(copied_store, "tiny")
    assert {path.name: path.read_bytes() for path in again} == before
    (changed,) = [
        path for path in package_run(copied_store, "tiny", ServingOptions(threads=1)) if "onnx.mar" in path.name
    ]
    assert {
        entry["threads"] for entry in contents(changed, "serving.json")["executions"] if entry["device"] == "cpu"
    } == {1}
    package_run(copied_store, "tiny")
    assert {path.name: path.read_bytes() for path in again} == before, "the run's own choice is kept"


def test_what_a_recipe_says_of_serving_is_in_its_archives_and_makes_nothing_else_anew(copied_store: Path) -> None:
    stages = ({"pass": "fuse"}, {"pass": "onnx", "from": "fuse"})
    run_recipe(copied_store, with_stages(*stages))
    serving = {"workers": 2, "engines": ["onnxruntime"], "k": 3}
    outcome, heard = run_recipe(copied_store, with_stages(*stages, serving=serving))
    assert heard.made() == set()
    archive = outcome.folder / "archives" / "tiny-onnx.mar"
    served = contents(archive, "serving.json")
    assert (served["workers"], served["k"], served["executions"][0]["engine"]) == (2, 3, "onnxruntime")
    with zipfile.ZipFile(archive) as opened:
        assert b"minWorkers: 2" in opened.read("model-config.yaml")
