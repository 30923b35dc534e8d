"""The table of CIFAR-10: controls that train as their cells do, cells that are kept, a page that estimates nothing."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import optimize as opt
from benchmarks.cifar import __main__ as cifar
from benchmarks.cifar.chains import chain, control, epochs, shortened, taught, told, trainings, with_epochs
from benchmarks.cifar.making import Workshop
from benchmarks.cifar.page import over_seeds, page, student
from benchmarks.cifar.provenance import changed
from benchmarks.cifar.record import Cell, Faster, Judged, Table, read, write
from benchmarks.cifar.rows import EXAMPLES, MODELS, ROWS, START, Row
from examples.cifar_resnet import CifarResNet
from optimize.data.pixels import decoded
from optimize.export.macs import total_macs
from optimize.passes.base import pass_of
from optimize.pruning.groups import group
from optimize.pruning.propagation import channels_of
from optimize.pruning.width_budget import Costs, Rounding
from optimize.run.recipe import Recipe, load_recipe
from optimize.tracing.trace import trace
from optimize.training.config import TrainingConfig
from serve.runtime.errors import UserError
from serve.runtime.images.image_preprocessing import normalise
from tests.optimize.workbench import noise_context, parent_of

CPU = torch.device("cpu")
TINY = f"{EXAMPLES / 'tiny_cnn.py'}:tiny"

RECIPE = """
stages:
  - pass: qat-lowbit
    name: first
    config: {weight_bits: 4, activation_bits: 4, epochs: 5, learning_rate: 0.03, batch_size: 32}
  - pass: qat-lowbit
    name: second
    config: {weight_bits: 3, activation_bits: 3, epochs: 7, optimizer: adamw}
  - pass: onnx-int8
  - pass: prune-channels
    from: baseline
    config: {macs: 0.5, steps: 3, sparsify: {epochs: 4, batch_size: 32}, train: {epochs: 2, batch_size: 16}}
  - pass: onnx
    name: smaller
  - pass: ptq
    from: baseline
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return load_recipe(path)


def cell(row: str = "w4a4", delta: int = -3, **fields: Any) -> Cell:
    """Of 1,000 images the control has 900 right, of which the cell loses all that it differs by."""
    judged = Judged(both=900 + min(delta, 0), gained=max(delta, 0), lost=max(-delta, 0), neither=100 - max(delta, 0))
    values: dict[str, Any] = {
        "key": f"{row} {delta} {sorted(fields)}",
        "row": row,
        "recipe": "w4a4.yaml",
        "stage": "w4a4-packed",
        "seed": 0,
        "epochs": None,
        "trained": 10,
        "short": False,
        "start": (),
        "stages": (("qat-lowbit", {"epochs": 10}),),
        "control": (("fine-tune", {"epochs": 10}),),
        "model": "resnet20",
        "checkpoint": None,
        "data": "cifar10",
        "judged": judged,
        "precision": "int8 (W4A4 packed)",
        "engines": ("onnxruntime", "exported"),
        "bytes": (170_000, 1_100_000),
        "command": "python -m benchmarks.cifar",
        "machine": {"cpu": "a processor", "cores": 2, "gpu": None},
        "versions": {"torch": "2.14"},
        "code": "c" * 64,
        "created": datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
    }
    return Cell(**(values | fields))


def lines(text: str) -> Mapping[str, list[str]]:
    found = [line for line in text.splitlines() if line.startswith("| ")]
    return {line.split(" | ")[0].strip("| `"): [part.strip() for part in line.strip("|").split("|")] for line in found}


def test_a_control_trains_as_often_as_long_and_at_the_same_rates_and_does_nothing_else(recipe: Recipe) -> None:
    links = chain(recipe, "onnx-int8")
    assert [link.name for link in links] == ["first", "second", "onnx-int8"]
    first, second = told(control(links))
    assert first == ("fine-tune", {"epochs": 5, "learning_rate": 0.03, "batch_size": 32})
    adamw = {"optimizer": "adamw", "learning_rate": 1e-4, "weight_decay": 0.05, "clip_norm": 1.0}
    assert second == ("fine-tune", {"epochs": 7, **adamw})
    pruned = chain(recipe, "smaller")
    trained = [settings.get("epochs", 3) for name, settings in told(control(pruned)) if name == "fine-tune"]
    assert trained == [4, 2, 2, 2], "before the first of three prunings, and after each"
    assert [name for name, _ in told(control(pruned))][-1] == "onnx"
    assert epochs(pruned) == epochs(control(pruned)) == 10
    assert control(chain(recipe, "ptq")) == (), "what trains nothing is held against what it was made of"


def test_a_control_has_the_teacher_too_unless_that_is_what_is_looked_at(tmp_path: Path) -> None:
    rows = {row.name: row for row in ROWS}
    links = chain(load_recipe(EXAMPLES / rows["w3a3"].recipe), rows["w3a3"].stage)
    beside = control(links)
    assert [config["distil"]["teacher"] for _, config in told(beside)] == ["self", "self"]
    context = noise_context()
    start, other = (parent_of(nn.Linear(2, 2), context, tmp_path / name) for name in ("start", "other"))
    for each in (links, beside):
        trained = [training for link in taught(each, start, None) for training in trainings(link.config)]
        found = [training.distil.teacher for training in trained if training.distil is not None]
        assert found == [start, start], "not what each stage starts from, which in the control would be another"
    assert rows["distilled"].teacher == "resnet56"
    links = chain(load_recipe(EXAMPLES / rows["distilled"].recipe), rows["distilled"].stage)
    (training,) = trainings(taught(links, start, other)[0].config)
    assert training.distil is not None
    assert training.distil.teacher is other
    assert training.distil.temperature == 5
    assert "distil" not in told(control(links, untaught=True))[0][1]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_each_row_is_a_stage_of_a_legal_recipe_and_its_control_has_as_many_epochs(row: Row) -> None:
    links = chain(load_recipe(EXAMPLES / row.recipe), row.stage)
    beside = control(links)
    assert epochs(links) == epochs(beside)
    assert {pass_of(link.config).name for link in beside} <= {"fine-tune", "fuse", "onnx"}
    assert pass_of(links[-1].config).name.startswith("onnx"), "judged as it would be served"
    assert epochs(with_epochs(links, 2)) == epochs(with_epochs(beside, 2))
    assert epochs(shortened(links)) <= 3
    for link in shortened(links):
        assert not isinstance(link.config, TrainingConfig) or link.config.max_steps == 2


@pytest.mark.parametrize("row", [row for row in ROWS if row.fewer is not None], ids=lambda row: row.name)
def test_a_recipe_allows_as_few_multiply_accumulates_as_its_row_aims_at(row: Row) -> None:
    (pruning,) = (
        each.config for each in chain(load_recipe(EXAMPLES / row.recipe)) if isinstance(each.config, opt.PruneChannels)
    )
    module, batch = trace(CifarResNet({"resnet20": 3, "resnet56": 9}[row.network]).eval()), torch.zeros(1, 3, 32, 32)
    grouping = group(channels_of(module, batch), {})
    rounding = Rounding(pruning.round_to, pruning.min_width)
    least = Costs(grouping).macs([rounding.nearest(0, each) for each in grouping.groups])
    assert row.fewer is not None
    assert total_macs(module, batch) / least > row.fewer
    assert pruning.macs is None or 1 / pruning.macs >= row.fewer


def test_what_rows_start_from_is_a_recipe_too() -> None:
    recipe = load_recipe(EXAMPLES / START)
    assert [name for name, _ in told(chain(recipe))] == ["fine-tune"]
    assert recipe.baseline.epochs > 8


def test_ends_of_epochs_move_with_them(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("stages: [{pass: qat, config: {epochs: 9, freeze_observers_at: 6, freeze_norms_at: 1}}]")
    (link,) = with_epochs(chain(load_recipe(path)), 2)
    assert isinstance(link.config, opt.Qat)
    assert (link.config.epochs, link.config.freeze_observers_at, link.config.freeze_norms_at) == (2, 2, 1)


def test_an_interval_over_seeds_is_students() -> None:
    # Tables of t, two-sided, 95 %.
    for freedom, quantile in ((1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (30, 2.042)):
        assert student(freedom) == pytest.approx(quantile, abs=5e-4)
    spread = over_seeds([-0.003, -0.001, -0.002])
    assert spread is not None
    assert spread.mean == pytest.approx(-0.002)
    assert spread.high - spread.mean == pytest.approx(4.3027 * 0.001 / 3**0.5, rel=1e-4)
    assert over_seeds([0.1]) is None


def test_rows_stand_in_their_order_and_what_is_not_finished_is_empty() -> None:
    table = Table(cells=(cell(), cell("binary", -20, trained=20), cell("pruned-56", 1)))
    text = page(table)
    titles = [line.split(" | ")[0].strip("| ") for line in text.splitlines() if line.startswith("| ")]
    assert titles[1 : len(ROWS) + 1] == [row.title for row in ROWS]
    found = lines(text)
    epochs_and_seeds, (control_top1, top1, difference, aim, said) = (
        found["W4A4, LSQ, self-distilled"][2:4],
        found["W4A4, LSQ, self-distilled"][4:9],
    )
    assert epochs_and_seeds == ["10", "1"]
    assert (control_top1, top1, aim, said) == ("90.00", "89.70", "−0.40", "reached")
    assert difference.startswith("−0.30 [−")
    assert difference.endswith("] of images"), "one seed has no interval of its own"
    assert found["binary weights, A8"][7:9] == ["−1.50", "missed"]
    assert found["ResNet-56, 2.1 times fewer MACs, 1.6 times as fast"][8] == "missed", "it was not timed"
    empty = found["ternary weights, A8"]
    assert empty[2:7] == [""] * 5
    assert empty[7:10] == ["−0.60", "", "TTQ −0.64"]
    assert "These rows are empty, because they are not finished:\n\n- W8A8, calibrated\n" in text


def test_seeds_are_averaged_and_another_schedule_is_a_line_of_its_own() -> None:
    seeds = [cell(delta=delta, seed=seed) for seed, delta in enumerate((-3, -1, -2))]
    longer = cell(delta=-5, trained=100, stages=(("qat-lowbit", {"epochs": 100}),))
    text = page(Table(cells=(*seeds, longer)))
    rows = [line for line in text.splitlines() if line.startswith("| W4A4, LSQ, self-distilled ")]
    assert [row.split(" | ")[2:4] for row in rows] == [["100", "1"], ["10", "3"]], "the longest first"
    assert "| −0.20 [−0.45, +0.05] |" in rows[1]
    assert "| missed |" in rows[0]
    assert text.count("| `w4a4` |") == 4


def test_a_row_that_aims_at_a_speed_needs_that_too() -> None:
    fast = Faster(ratio=1.7, low=1.65, high=1.72, engine="openvino", control_engine="openvino", running=0.1)
    for ratio, said in ((1.7, "reached"), (1.5, "missed")):
        made = cell("pruned-56", 1, faster=fast.model_copy(update={"ratio": ratio}), macs=2.1)
        text = page(Table(cells=(made,)))
        assert lines(text)["ResNet-56, 2.1 times fewer MACs, 1.6 times as fast"][8] == said
        assert "2.10× fewer MACs" in text


def test_a_row_that_aims_at_less_arithmetic_needs_that_too() -> None:
    for macs, said in ((1.35, "reached"), (1.3, "missed"), (None, "missed")):
        text = page(Table(cells=(cell("pruned", 0, macs=macs),)))
        assert lines(text)["1.35 times fewer MACs"][8] == said


def test_what_could_not_be_made_says_why_and_what_has_changed_stands_beside_its_cell() -> None:
    table = Table(cells=(cell("ternary", judged=None, reason="training diverged"), cell()))
    text = page(table, lambda each: ["the code has changed since"])
    assert "These cells could not be made:\n\n- ternary weights, A8, seed 0: `training diverged`" in text
    assert lines(text)["w4a4"][8] == "the code has changed since"
    assert "W4A4, LSQ, self-distilled, by another recipe than now" in lines(
        page(table, lambda each: ["the recipe has changed since"])
    )
    recipe = load_recipe(EXAMPLES / "w4a4.yaml")
    links = chain(recipe, "w4a4-packed")
    as_it_is = cell(stages=tuple(told(links)))
    assert list(changed(as_it_is)) == ["the code has changed since"]
    assert list(changed(cell())) == ["the recipe has changed since", "the code has changed since"]
    assert list(changed(cell("gone"))) == ["the table has no such row any more"]


def test_cells_survive_being_written_and_another_file_is_refused_in_a_line(tmp_path: Path) -> None:
    table = Table().with_cell(cell("w4a4"), ["w8a8-ptq", "w4a4"]).with_cell(cell("w8a8-ptq"), ["w8a8-ptq", "w4a4"])
    write(table, tmp_path / "cells.json")
    again = read(tmp_path / "cells.json")
    assert again == table
    assert [each.row for each in again.cells] == ["w8a8-ptq", "w4a4"]
    assert read(tmp_path / "none.json") == Table()
    (tmp_path / "cells.json").write_text('{"cells": [{"key": 1}]}')
    with pytest.raises(UserError, match="is no table of cells"):
        read(tmp_path / "cells.json")


def test_a_cell_says_that_a_training_left_what_it_began_with() -> None:
    text = page(Table(cells=(cell("acnet", unimproved=True), cell("pruned"))))
    said = [line.split("|")[1].strip() for line in text.splitlines() if "what it began with was kept" in line]
    assert said == ["`acnet`"]


def test_the_committed_page_is_that_of_the_committed_cells() -> None:
    root = EXAMPLES.parent
    found = lines((root / "docs" / "benchmarks" / "cifar.md").read_text(encoding="utf-8"))
    for title, cells in lines(page(read(root / "benchmarks" / "records" / "cifar.json"))).items():
        assert found[title][:8] == cells[:8], title


def test_a_cell_that_could_not_be_made_is_an_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = iter([cell("w8a8-ptq"), cell("w8a8-qat", judged=None, reason="no engine here runs qat-onnx")])
    monkeypatch.setattr(Workshop, "key", lambda self, row: row.name)
    monkeypatch.setattr(Workshop, "make", lambda self, row: next(made))
    words = ["--short", "--only", "w8a8-ptq", "w8a8-qat", "--records", str(tmp_path / "cells.json")]
    assert cifar.main(words) == 1
    assert "w8a8-qat, seed 0: not made: no engine here runs qat-onnx" in capsys.readouterr().out


def test_a_short_run_makes_a_cell_through_the_store_and_another_makes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(MODELS, "resnet20", TINY)  # in the place of a network of minutes
    (row,) = (row for row in ROWS if row.name == "w8a8-qat")
    monkeypatch.setattr(cifar, "ROWS", (dataclasses.replace(row, stage="qat"),))  # without writing a graph, for seconds
    store, records, written = tmp_path / "store", tmp_path / "cells.json", tmp_path / "page.md"
    words = ["--short", "--only", "w8a8-qat", "--store", str(store), "--records", str(records), "--write", str(written)]
    assert cifar.main(words) == 0
    assert "w8a8-qat, seed 0: top-1 " in capsys.readouterr().out
    (made,) = read(records).cells
    assert made.judged is not None
    assert made.judged.images == 32
    assert made.command == "python -m benchmarks.cifar --short"
    assert made.unimproved == any(note.startswith("no better after any of 1 epochs") for note in made.notes)
    text = written.read_text()
    assert "the figures mean nothing" in text
    assert lines(text)["W8A8, trained"][4:6] == [f"{100 * made.judged.control:.2f}", f"{100 * made.judged.top1:.2f}"]
    # The control, by hand: the same stages are in the store.
    quick: dict[str, Any] = {"epochs": 1, "max_steps": 2, "batch_size": 8}
    start = load_recipe(EXAMPLES / START).baseline
    base = opt.load(
        TINY,
        augment="shift+flip",
        val_images=32,
        store=store,
        training=start.model_copy(update=quick),
    )
    assert base.step.cached
    (qat,) = [stage.config for stage in load_recipe(EXAMPLES / "w8a8.yaml").stages if stage.name == "qat"]
    assert isinstance(qat, opt.Qat)
    tuned = opt.apply(base, opt.FineTune(**quick, learning_rate=qat.learning_rate, precision=qat.precision))
    assert tuned.step.cached
    context = base.session.context
    with torch.no_grad():
        pixels = normalise(decoded(context.data.val, context.preprocessing), context.preprocessing, CPU, torch.float32)
        right = tuned.artifact.module()(pixels).argmax(1) == context.data.val.labels
    assert right.double().mean().item() == made.judged.control
    before = records.read_bytes()
    assert cifar.main(words) == 0
    assert records.read_bytes() == before
    assert capsys.readouterr().out == "", "nothing was made"
    body = json.loads(before)
    body["cells"][0]["key"] = "of another recipe"
    records.write_text(json.dumps(body))
    assert cifar.main(words) == 0
    assert [each.judged for each in read(records).cells] == [made.judged] * 2, "by the store, the same again"
