"""The whole pipeline on the smallest model: what it reports, what it leaves, and what it makes again."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torchvision.transforms.v2 import functional

from optimize.data.formats.base import open_data
from optimize.errors import PassError
from optimize.measure.bench import Bench, Candidate
from optimize.measure.figures import Measured
from optimize.measure.rows import Archive, ModelFile, Report, Row, Skip
from optimize.passes import onnx as onnx_pass
from optimize.report.finished_runs import faults_of
from optimize.run.pipeline import Outcome
from optimize.run.publishing import MEASUREMENTS_FILE
from optimize.store.artifact import WEIGHTS_FILE
from optimize.store.objects import Store, fault
from optimize.store.store_pruning import prunable
from serve.runtime.card.card import load_card
from serve.runtime.card.known_answer import KNOWN_FILE, read_known
from serve.runtime.errors import PipelineError, UserError
from serve.runtime.model_files.program_file import load_program
from serve.runtime.service.predictor import Predictor
from serve.runtime.tasks.classification import KnownLogits
from tests.narrow import encoded
from tests.optimize.runs_fixtures import (
    RECIPE,
    TinyRun,
    copied_store,
    run_recipe,
    start_run,
    tiny_run,
    with_stages,
    write_recipe,
)
from tests.programs import Programs

__all__ = ["copied_store", "tiny_run"]  # fixtures
pytestmark = pytest.mark.slow

FUSE = {"pass": "fuse"}
STAGES = [stage.get("name", stage["pass"]) for stage in RECIPE["stages"]]
MEASUREMENTS = {"accuracy", "memory", "speed"}
#: What is made beside the stages, and measured as a reference, where none of them is a float ONNX graph.
FLOAT_GRAPH = "float graph"


def figures(report: Report) -> list[tuple[Row, Measured]]:
    """What was measured, of which there is some: or whatever is said of all of it would hold."""
    found = [(row, row.measured) for row in report.rows if row.measured is not None]
    assert found
    return found


def path_of(row: Row) -> Path:
    assert row.file is not None
    return Path(row.file.path)


def archive_of(row: Row) -> Archive:
    assert row.archive is not None
    return row.archive


def archives(report: Report) -> dict[str, str]:
    """SHA-256 of each artifact's archive, of which there are some."""
    found = {row.name: row.archive.sha256 for row in report.rows if row.archive is not None}
    assert found
    return found


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# --- what is reported


def test_the_report_says_what_was_run_on_what_and_every_row_has_its_figures(tiny_run: TinyRun) -> None:
    report = tiny_run.report
    assert report.title == "tiny"
    assert report.data.name == "digits"
    assert (report.data.classes, report.data.train + report.data.val) == (10, 1797)
    assert report.machine.cores == len(os.sched_getaffinity(0))
    assert report.versions["torch"] == torch.__version__.split("+")[0]
    assert [row.name for row in report.rows] == ["baseline", *STAGES]
    for row, measured in figures(report):
        latency, accuracy = measured.latency_ms, measured.accuracy
        assert list(measured.throughput) == [1, 4]
        assert latency.p50 > 0
        assert latency.p95 <= latency.p99
        assert latency.samples >= 2 * 15  # two rounds of five times the minimum
        assert accuracy.score <= accuracy.scores["top5"] <= 1
        assert (accuracy.difference is None) == (row.name == "baseline")
        if accuracy.difference is not None:
            assert accuracy.difference.low <= accuracy.difference.delta <= accuracy.difference.high
        assert measured.footprint.memory_bytes > 0
        assert measured.footprint.load_ms > 0
    assert report.recommended in [row.name for row, _ in figures(report)]
    assert json.loads((tiny_run.folder / "report.json").read_text())["schema"] == 5


def test_speeds_are_multiples_of_the_fastest_float_and_the_recommended_pair_is_one_that_was_measured(
    tiny_run: TinyRun,
) -> None:
    report = tiny_run.report
    floats = {line.name: line.measured.latency_ms.p50 for line in report.references if line.measured}
    for row, _ in figures(report):
        assert row.file is not None
        if "int8" not in row.file.precision:
            floats |= {pair.id: pair.measured.latency_ms.p50 for pair in row.pairs if pair.measured}
    assert report.yardstick == min(floats, key=lambda name: floats[name])
    assert report.eager == "eager"
    fastest = report.timed(report.yardstick)
    assert fastest is not None
    assert fastest.speedup.value == 1
    chosen = report.chosen_pair
    assert chosen is not None
    assert chosen.measured is not None
    assert chosen.id.startswith(f"{report.recommended}@")
    assert report.recommendation.execution == chosen.execution


def test_parents_are_those_of_the_recipe(tiny_run: TinyRun) -> None:
    parents = {row.name: row.parent for row in tiny_run.report.rows}
    assert parents["baseline"] is None
    assert parents["fuse"] == parents["qat"] == "baseline"
    assert parents["onnx-int8"] == "ptq"
    assert parents["onnx-int8-qat"] == "qat"


def test_formats_and_precisions_are_what_the_files_are(tiny_run: TinyRun) -> None:
    files = {row.name: tiny_run.file(row.name) for row, _ in figures(tiny_run.report)}
    formats = {name: (file.format, file.precision) for name, file in files.items()}
    assert formats["baseline"] == formats["fuse"] == ("exported_program", "float32")
    assert formats["ptq"] == formats["qat"] == ("torchscript", "int8")
    assert formats["dynamic"][0] == "torchscript"
    assert formats["onnx"] == ("onnx", "float32")
    assert formats["onnx-half"] == ("onnx", "float16")
    assert formats["onnx-int8"] == formats["onnx-int8-qat"] == ("onnx", "int8")


def test_fp16_is_made_and_has_no_number_where_there_is_no_gpu(tiny_run: TinyRun) -> None:
    row = tiny_run.row("half")
    assert row.measured is None
    assert row.skip is not None
    assert row.skip.kind == "cannot_run_here"
    assert "CUDA" in row.skip.reason
    assert path_of(row).is_file()
    assert Path(archive_of(row).path).is_file()
    beside = json.loads((tiny_run.folder / "artifacts" / "half" / MEASUREMENTS_FILE).read_text())
    assert "CUDA" in beside["skip"]["reason"]
    assert "latency_ms" not in beside


def test_bytes_are_the_files(tiny_run: TinyRun) -> None:
    for row in tiny_run.report.rows:
        if row.file is not None:
            assert row.file.bytes == path_of(row).stat().st_size
            archive = archive_of(row)
            assert archive.bytes == Path(archive.path).stat().st_size
            assert archive.sha256 == sha256(Path(archive.path))


def independent_logits(file: ModelFile, pixels: torch.Tensor) -> torch.Tensor:
    """The file opened with its library alone, in batches of 64: dynamic quantization takes its scale from the batch."""
    resized = functional.resize(pixels, [32, 32], antialias=True)
    path = file.path
    if file.format == "onnx":  # the graph normalises
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        answers = [session.run(None, {"input": batch.numpy()})[0] for batch in resized.split(64)]
        return torch.cat([torch.from_numpy(logits).float() for logits in answers])
    # In this order: digits' few grey levels fall on the ties of an int8 network's rounding, and (x / 255 - mean) / std,
    # whose last bit differs, breaks them otherwise (0.6 dB of SQNR).
    factor, shift = 1 / (255 * torch.tensor(0.25)), torch.tensor(0.5) / 0.25
    batches = (resized.float() * factor - shift).split(64)
    module = load_program(Path(path)).module() if file.format == "exported_program" else torch.jit.load(path)
    dtype = torch.bfloat16 if file.precision == "bfloat16" else torch.float32
    with torch.no_grad():
        return torch.cat([module(batch.to(dtype)).float() for batch in batches])


def test_accuracy_and_parity_are_those_of_the_files_opened_with_their_libraries(tiny_run: TinyRun) -> None:
    val = open_data("digits").val
    pictures = [np.asarray(Image.open(io.BytesIO(encoded(source))).convert("RGB")) for source in val.sources]
    pixels = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2)
    logits = {row.name: independent_logits(tiny_run.file(row.name), pixels) for row, _ in figures(tiny_run.report)}
    one_image = 1 / len(val)
    base = logits["baseline"].argmax(1) == val.labels
    libraries = {"onnx": "onnxruntime", "torchscript": "torchscript", "exported_program": "exported"}
    for row, _ in figures(tiny_run.report):
        own, engine = logits[row.name], libraries[tiny_run.file(row.name).format]
        measured = next(pair.measured for pair in row.pairs if pair.execution.engine == engine)
        assert measured is not None
        right = own.argmax(1) == val.labels
        five = ((-own).argsort(stable=True).argsort()[range(len(val)), val.labels]) < 5
        close = 0.5 * one_image
        assert measured.accuracy.score == pytest.approx(right.double().mean().item(), abs=close)
        assert measured.accuracy.scores["top5"] == pytest.approx(five.double().mean().item(), abs=close)
        assert measured.accuracy.images == len(val) == 359
        if row.parent is None:
            continue
        delta = right.double().mean() - base.double().mean()
        difference = measured.accuracy.difference
        assert difference is not None
        assert difference.delta == pytest.approx(delta.item(), abs=close)
        assert (difference.gained - difference.lost) / measured.accuracy.images == pytest.approx(difference.delta)
        parent, parity = logits[row.parent], measured.parity
        assert parity is not None
        assert parity.max_abs == pytest.approx((own - parent).abs().max().item(), rel=0.001, abs=1e-5)
        assert parity.agreement == pytest.approx((own.argmax(1) == parent.argmax(1)).double().mean().item(), abs=close)
        noise = 10 * torch.log10((parent**2).sum() / ((own - parent) ** 2).sum()).item()
        if noise < 80:  # else it is the noise of float32
            assert parity.sqnr_db == pytest.approx(noise, abs=0.05)


def test_the_model_has_learnt_and_int8_keeps_it(tiny_run: TinyRun) -> None:
    parities = {row.name: measured.parity for row, measured in figures(tiny_run.report) if measured.parity}
    assert tiny_run.measured("baseline").accuracy.score > 0.6
    assert parities["fuse"].agreement == 1
    assert parities["onnx"].max_abs < 1e-3
    assert (parities["ptq"].sqnr_db or 0.0) > 10
    assert parities["ptq"].max_abs > 0
    assert tiny_run.measured("qat").accuracy.score > 0.6


def test_throughput_is_in_images_a_second_and_latency_in_milliseconds(tiny_run: TinyRun) -> None:
    for _, measured in figures(tiny_run.report):
        latency = measured.latency_ms
        # Of a busy machine the mean has no fixed relation to the median; another unit would be a thousand times off.
        assert 0.03 < measured.throughput[1] * latency.p50 / 1e3 < 30
        assert measured.best_throughput == max(measured.throughput.values())


def test_the_references_stand_in_the_same_table(tiny_run: TinyRun) -> None:
    assert [line.name for line in tiny_run.report.references] == ["eager", "eager channels-last"]
    eager = tiny_run.report.references[0].measured
    assert eager is not None
    assert eager.latency_ms.p50 > 0


def test_every_archive_knows_what_its_best_pair_answered_to_the_sample_image(tiny_run: TinyRun) -> None:
    (sample,) = tiny_run.folder.glob("sample.*")
    measured = [row for row, _ in figures(tiny_run.report)]
    for row in measured:
        known = read_known(path_of(row).parent)
        assert known is not None
        assert known.image == sample.read_bytes()
        with zipfile.ZipFile(archive_of(row).path) as opened:
            assert opened.read(KNOWN_FILE).decode() == known.text
        best = row.best
        assert best is not None
        predictor = Predictor(path_of(row).parent, best.execution)
        logits = KnownLogits.parsed(known.facts)
        (answer,) = predictor.predict([known.image], len(logits.logits))
        assert isinstance(answer, list)
        in_order = [label.probability for label in sorted(answer, key=lambda label: label.index)]
        assert logits.difference(in_order) <= logits.allowed
        assert logits.difference(in_order[1:] + in_order[:1]) > logits.allowed
    assert len(measured) > 1


# --- what is left on disk


def test_the_run_folder_holds_what_the_report_names_and_nothing_else(tiny_run: TinyRun) -> None:
    made = {row.name for row in tiny_run.report.rows if row.file}
    assert made >= {"baseline", *STAGES} - {"half-bf16"}
    assert {path.name for path in tiny_run.folder.iterdir()} == {
        "artifacts", "archives", "files.json", "objects.json", "pareto.svg", "report.json", "report.html", "run.json",
        "sample.png",
    }  # fmt: skip
    assert {path.name for path in (tiny_run.folder / "artifacts").iterdir()} == made
    assert {path.name for path in (tiny_run.folder / "archives").glob("*.mar")} == {f"tiny-{name}.mar" for name in made}
    assert faults_of(tiny_run.store, "tiny") == (2 * len(made), [])
    assert list((tiny_run.store / ".store" / "tmp").iterdir()) == []


def test_what_was_measured_lies_beside_each_artifact(tiny_run: TinyRun) -> None:
    for row, measured in figures(tiny_run.report):
        folder = tiny_run.folder / "artifacts" / row.name
        beside = json.loads((folder / MEASUREMENTS_FILE).read_text())
        assert measured.to_json() in [pair["measured"] for pair in beside["pairs"]]
        assert beside["machine"]["cpu"] == tiny_run.report.machine.cpu
        assert load_card(folder).name == row.name


def test_archives_hold_the_artifacts_file_and_card(tiny_run: TinyRun) -> None:
    for row, _ in figures(tiny_run.report):
        with zipfile.ZipFile(archive_of(row).path) as archive:
            assert archive.read(path_of(row).name) == path_of(row).read_bytes()
            card = json.loads(archive.read("card.json"))
            assert [entry["name"] for entry in card["lineage"]][-1] == row.name
            assert {"handler.py", "index_to_name.json", "model-config.yaml"} <= set(archive.namelist())


def test_the_page_names_every_artifact_and_refers_to_nothing_outside(tiny_run: TinyRun) -> None:
    page = (tiny_run.folder / "report.html").read_text()
    for name in STAGES:
        assert name in page
    assert "<script src" not in page
    assert 'href="http' not in page


def test_prune_keeps_all_that_the_run_uses(copied_store: Path) -> None:
    outcome, _ = run_recipe(copied_store, with_stages(FUSE), run="other")
    assert outcome.failed == ()
    assert not prunable(Store(copied_store)).objects
    _, heard = run_recipe(copied_store, RECIPE)
    assert heard.made() == set()


# --- what is made again


def keys(outcome: Outcome | TinyRun) -> dict[str, str]:
    return {row.name: row.file.key for row in outcome.report.rows if row.file}


def accuracies(report: Report) -> dict[str, float]:
    """Top-1 of each pair that was measured; which of a row's is the fastest may differ from one run to the next."""
    return {pair.id: pair.measured.accuracy.score for row in report.rows for pair in row.pairs if pair.measured}


def changed(stage: str, **config: Any) -> dict[str, Any]:
    stages = [{**s, "config": {**s.get("config", {}), **config}} if s["pass"] == stage else s for s in RECIPE["stages"]]
    return {**RECIPE, "stages": stages}


def test_a_second_run_takes_everything_from_the_cache(tiny_run: TinyRun, copied_store: Path) -> None:
    started = time.process_time()  # of this machine's other work it knows nothing
    outcome, heard = run_recipe(copied_store, RECIPE)
    assert time.process_time() - started < 10
    assert heard.made() == set()
    assert {name for name, cached, _ in heard.steps if cached} >= MEASUREMENTS
    assert keys(outcome) == keys(tiny_run)
    for mine, first in zip(outcome.report.rows, tiny_run.report.rows, strict=True):
        assert mine.measured == first.measured
    assert archives(outcome.report) == archives(tiny_run.report)


def renamed(names: dict[str, str]) -> dict[str, Any]:
    """The recipe with other names for its stages."""
    stages = []
    for stage in RECIPE["stages"]:
        name = stage.get("name", stage["pass"])
        parent = stage.get("from", "baseline")
        stages.append({**stage, "name": names[name], "from": names.get(parent, parent)})
    return {**RECIPE, "stages": stages}


def test_renamed_stages_are_neither_made_nor_measured_again(tiny_run: TinyRun, copied_store: Path) -> None:
    names = {name: f"my-{name}" for name in STAGES}
    outcome, heard = run_recipe(copied_store, renamed(names))
    assert heard.made() == set()
    rows = {row.name: row for row in outcome.report.rows}
    assert list(rows) == ["baseline", *names.values()]
    for old, measured in figures(tiny_run.report):
        new = rows[names.get(old.name, old.name)]
        assert new.file is not None
        assert new.measured is not None
        assert new.file.key == tiny_run.file(old.name).key
        assert (new.measured.accuracy, new.measured.latency_ms) == (measured.accuracy, measured.latency_ms)
        assert load_card(copied_store / "tiny" / "artifacts" / new.name).name == new.name
    assert faults_of(copied_store, "tiny")[1] == []
    pruned = {folder.name for folder in prunable(Store(copied_store)).objects}
    assert pruned  # the old names and their archives
    assert not pruned & set(keys(outcome).values())


def test_timing_anew_makes_another_archive_only_where_another_execution_comes_out_best(
    tiny_run: TinyRun, copied_store: Path
) -> None:
    recipe = {**RECIPE, "measure": {"rounds": 1, "batch_sizes": [1], "seconds": 0.001}}
    outcome, heard = run_recipe(copied_store, recipe)
    assert "speed" in heard.made()
    same = {name for name in archives(outcome.report) if served(outcome.folder, name) == served(tiny_run.folder, name)}
    assert same >= {"baseline", "fuse", "ptq"}, "there is one execution of each"
    before = archives(tiny_run.report)
    assert {name for name, digest in archives(outcome.report).items() if digest == before[name]} == same


def served(folder: Path, artifact: str) -> str:
    return (folder / "artifacts" / artifact / "serving.json").read_text()


def test_a_changed_stage_is_made_again_with_its_descendants_and_nothing_else(
    tiny_run: TinyRun, copied_store: Path
) -> None:
    outcome, heard = run_recipe(copied_store, changed("ptq", images=48))
    assert heard.made() == {"ptq", "onnx-int8", *MEASUREMENTS, "certificates"}
    before = keys(tiny_run)
    assert {name for name, key in keys(outcome).items() if key != before[name]} == {"ptq", "onnx-int8"}


def test_a_checkpoint_is_the_baseline_and_another_one_makes_everything_anew(
    tiny_run: TinyRun, copied_store: Path, tmp_path: Path
) -> None:
    weights = load_file(tiny_run.folder / "artifacts" / "baseline" / WEIGHTS_FILE)
    save_file(weights, tmp_path / "same.safetensors")
    outcome, heard = run_recipe(copied_store, with_stages(FUSE), run="c", checkpoint=tmp_path / "same.safetensors")
    assert "baseline" in heard.made()
    assert "fuse" not in heard.made()  # its parent's files are the same, wherever they came from
    assert accuracies(outcome.report)["baseline@exported"] == tiny_run.measured("baseline").accuracy.score
    weights["12.bias"] = weights["12.bias"] + torch.eye(10)[3] * 100
    save_file(weights, tmp_path / "other.safetensors")
    recipe, checkpoint = with_stages(FUSE), tmp_path / "other.safetensors"
    outcome, heard = run_recipe(copied_store, recipe, run="c", checkpoint=checkpoint, graphs=True)
    assert heard.made() == {"baseline", "fuse", FLOAT_GRAPH, *MEASUREMENTS}
    assert accuracies(outcome.report)["baseline@exported"] < 0.2  # it says 3 to everything


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 255
    path.write_bytes(data)


def test_damage_is_noticed_and_repaired(tiny_run: TinyRun, copied_store: Path) -> None:
    folder = copied_store / "tiny"
    victim = copied_store / ".store" / "objects" / tiny_run.file("ptq").key / "model.pt"
    flip_last_byte(victim)
    flip_last_byte(folder / "artifacts" / "fuse" / "model.pt2")
    flip_last_byte(folder / "archives" / "tiny-onnx.mar")
    (folder / "artifacts" / "onnx" / "card.json").write_text("{}")
    (folder / "artifacts" / "qat" / "model.pt").unlink()
    (folder / "artifacts" / "qat" / "stray").mkdir()
    (folder / f".report.json.{'0' * 32}").write_text("of a process that was killed")
    (folder / "sample.jpg").write_text("of other data")
    _, faults = faults_of(copied_store, "tiny")
    assert len(faults) == 5  # the object in the store is not the run's copy here
    outcome, heard = run_recipe(copied_store, RECIPE)
    assert "ptq" in heard.made()
    # A rebuilt TorchScript file may differ in its mangled names, and then its child is made again too.
    assert heard.made() - MEASUREMENTS <= {"ptq", "onnx-int8", "certificates"}
    assert faults_of(copied_store, "tiny")[1] == []
    assert accuracies(outcome.report) == accuracies(tiny_run.report)
    assert {path.name for path in folder.iterdir()} == {path.name for path in tiny_run.folder.iterdir()}
    assert not (folder / "artifacts" / "qat" / "stray").exists()
    with zipfile.ZipFile(folder / "archives" / "tiny-onnx.mar") as archive:
        assert archive.testzip() is None


def test_what_another_recipe_left_under_the_name_is_removed(copied_store: Path) -> None:
    outcome, _ = run_recipe(copied_store, with_stages(FUSE))
    folder = copied_store / "tiny"
    assert [row.name for row in outcome.report.rows] == ["baseline", "fuse"]
    assert sorted(path.name for path in (folder / "artifacts").iterdir()) == ["baseline", "fuse"]
    assert sorted(path.name for path in (folder / "archives").glob("*.mar")) == ["tiny-baseline.mar", "tiny-fuse.mar"]


# --- what fails


def test_a_stage_that_fails_costs_only_its_descendants(copied_store: Path, monkeypatch) -> None:
    known = PassError("an operator cannot be translated")
    known.__cause__ = KeyError("which")
    errors = iter([RuntimeError("first line\nsecond line"), known])

    def broken(*args: object, **options: object) -> None:
        raise next(errors)

    monkeypatch.setattr(onnx_pass, "export_onnx", broken)
    recipe = with_stages(
        {"pass": "fuse", "name": "strict", "config": {"tolerance": 1e-30}},
        {"pass": "ptq", "from": "strict"},
        {"pass": "onnx-int8", "from": "ptq"},
        {"pass": "onnx", "from": "baseline", "config": {"tolerance": 0.5}},
        {"pass": "onnx", "name": "foreign", "from": "baseline", "config": {"tolerance": 0.25}},
        {"pass": "dynamic", "from": "baseline"},
    )
    outcome, heard = run_recipe(copied_store, recipe)
    assert outcome.failed == ("strict", "onnx", "foreign")
    skips = {row.name: row.skip or Skip(kind="failed", reason="") for row in outcome.report.rows}
    assert skips["strict"].kind == "failed"
    assert skips["strict"].reason.startswith("fuse: logits differ")
    assert skips["ptq"] == Skip(kind="parent_skipped", reason="its parent strict was skipped")
    assert skips["onnx-int8"] == Skip(kind="parent_skipped", reason="its parent ptq was skipped")
    assert skips["onnx"].kind == "failed"
    assert skips["onnx"].reason.startswith("RuntimeError: first line (traceback in ")
    log = copied_store / "tiny" / "onnx-error.txt"
    assert str(log) in skips["onnx"].reason
    assert "second line" in log.read_text()
    assert skips["foreign"].reason.startswith("an operator cannot be translated (traceback in ")
    assert "KeyError: 'which'" in (copied_store / "tiny" / "foreign-error.txt").read_text()
    assert outcome.report.rows[-1].measured is not None
    assert {name for name, _, reason in heard.steps if reason} == {"strict", "ptq", "onnx-int8", "onnx", "foreign"}
    monkeypatch.undo()
    assert run_recipe(copied_store, with_stages({"pass": "onnx"}))[0].failed == ()
    assert not log.exists()


def test_an_artifact_that_cannot_be_measured_costs_only_itself(copied_store: Path, monkeypatch) -> None:
    real = Bench.answers

    def answers(self: Bench, candidate: Candidate) -> Any:
        if candidate.artifact.name == "fuse":
            raise RuntimeError("the file does not open\nat all")
        return real(self, candidate)

    monkeypatch.setattr(Bench, "answers", answers)
    outcome, _ = run_recipe(copied_store, with_stages(FUSE, {"pass": "dynamic"}))
    rows = {row.name: row for row in outcome.report.rows}
    assert outcome.failed == ("fuse",)
    reason = "measuring its accuracy failed: RuntimeError: the file does not open"
    assert rows["fuse"].skip == Skip(kind="failed", reason=reason)
    assert rows["fuse"].measured is None
    measured = rows["dynamic"].measured
    assert measured is not None
    assert measured.latency_ms.p50 > 0
    assert measured.parity is None
    assert outcome.report.recommended in ("baseline", "dynamic")


def test_a_checkpoint_that_answers_nan_is_refused_in_one_line(
    tiny_run: TinyRun, copied_store: Path, tmp_path: Path
) -> None:
    weights = load_file(tiny_run.folder / "artifacts" / "baseline" / WEIGHTS_FILE)
    weights["12.bias"] = torch.full((10,), float("nan"))
    save_file(weights, tmp_path / "nan.safetensors")
    with pytest.raises(PipelineError, match="NaN") as caught:
        run_recipe(copied_store, with_stages(FUSE), checkpoint=tmp_path / "nan.safetensors", run="nan")
    assert "\n" not in str(caught.value)


def test_a_model_that_cannot_be_trained_ends_in_one_line(tmp_path: Path, monkeypatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("CUDA out of memory\nTried to allocate")

    monkeypatch.setattr("optimize.training.baseline.train", broken)
    with pytest.raises(PipelineError, match="the baseline cannot be made: RuntimeError: CUDA out of memory") as caught:
        run_recipe(tmp_path / "store", with_stages(FUSE))
    assert "\n" not in str(caught.value)
    assert not isinstance(caught.value, UserError)


# --- what is interrupted, and what runs beside it

#: Where it matters that there is a baseline, and not how good it is.
BRIEF = {"baseline": {**RECIPE["baseline"], "epochs": 1}}
ENDLESS = with_stages(FUSE, {"pass": "qat", "from": "baseline", "config": {"epochs": 5000}}, **BRIEF)


def interrupt_in_training(
    programs: Programs, store: Path, folder: Path, number: signal.Signals
) -> tuple[int, list[str]]:
    """Start a run whose third stage trains for hours, end it there, and return its exit code and last lines."""
    started = start_run(programs, store, write_recipe(folder, ENDLESS))
    assert any("+ fuse" in line for line in started.stderr)
    time.sleep(1.5)
    started.send_signal(number)
    ended = started.end()
    return ended.returncode, ended.stderr.splitlines()


def test_ctrl_c_ends_in_one_line_and_the_next_run_goes_on(programs: Programs, tmp_path: Path) -> None:
    store = tmp_path / "store"
    code, last = interrupt_in_training(programs, store, tmp_path, signal.SIGINT)
    assert code == 130
    assert last == ["interrupted; finished steps are kept, and the same command continues"]
    assert list((store / ".store" / "tmp").iterdir()) == []
    _, heard = run_recipe(store, with_stages(FUSE, **BRIEF))
    assert heard.made() == MEASUREMENTS


def test_after_sigkill_nothing_half_written_is_used_and_the_next_run_goes_on(
    programs: Programs, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    code, _ = interrupt_in_training(programs, store, tmp_path, signal.SIGKILL)
    assert code == -signal.SIGKILL
    whole = list((store / ".store" / "objects").iterdir())
    assert len(whole) == 4  # two steps, each with its name
    assert [fault(folder) for folder in whole] == [None] * 4
    _, heard = run_recipe(store, with_stages(FUSE, **BRIEF))
    assert heard.made() == MEASUREMENTS
    assert faults_of(store, "tiny")[1] == []


def test_two_runs_at_once_share_one_store_and_build_each_object_once(programs: Programs, tmp_path: Path) -> None:
    store, recipe = tmp_path / "store", write_recipe(tmp_path, with_stages(FUSE, **BRIEF))
    started = [start_run(programs, store, recipe, "--json") for _ in range(2)]
    ended = [program.end() for program in started]
    assert [run.returncode for run in ended] == [0, 0], ended
    reports = [json.loads(run.stdout) for run in ended]
    for position in range(2):
        first, second = (report["rows"][position] for report in reports)
        assert first["file"]["key"] == second["file"]["key"]
        assert sorted((first["cached"], second["cached"])) == [False, True]
    assert faults_of(store, "tiny")[1] == []
