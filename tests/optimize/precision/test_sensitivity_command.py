"""The sensitivity of a finished run: opened again by its name, measured, and written beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from optimize import cli
from optimize.listener import SILENT
from optimize.measure.figures import Difference
from optimize.measure.rows import Skip
from optimize.measure.timing import Timing
from optimize.precision.precision_records import Figure, Layer, Sensitivity
from optimize.precision.precision_table import sensitivity_markdown, sensitivity_rows
from optimize.precision.quantizable_layers import layers_of
from optimize.precision.sensitivity import subject
from optimize.precision.sensitivity_chart import sensitivity_svg
from optimize.run.finished_run import artifact_of, reopen_run
from optimize.run.job import Job
from optimize.store.objects import Store
from optimize.store.store_pruning import prunable
from serve.runs.sealed_files import seal
from serve.runtime.card.execution import Execution
from serve.runtime.errors import UserError
from tests.optimize.runs_fixtures import TinyRun, copied_store, tiny_run

__all__ = ["copied_store", "tiny_run"]  # fixtures


def figure(delta: float, won: float) -> Figure:
    return Figure(
        score=0.9 + delta,
        difference=Difference(delta=delta, low=delta - 0.01, high=delta + 0.01, gained=1, lost=2),
        sqnr_db=21.25,
        p50=3.0,
        won_ms=won,
    )


FOUND = Sensitivity(
    title="net on images",
    task="classification",
    parent="fuse",
    config={},
    execution=Execution("openvino"),
    runs_on="openvino",
    images=1000,
    score=0.9,
    p50=5.0,
    whole=figure(-0.2, 2.0),
    layers=(
        Layer(name="stem", weights=1728, alone=figure(-0.015, 0.25), all_but=figure(-0.19, 0.5)),
        Layer(name="head", weights=640, alone=figure(0.0, -0.125), all_but=Skip(kind="failed", reason="no kernel")),
    ),
    timing=Timing(),
    cpu="Imaginary CPU",
)


def test_a_line_has_a_layers_figures_in_points_decibels_and_milliseconds() -> None:
    whole, stem, head = sensitivity_rows(FOUND)
    assert whole[:6] == ("all 2 layers", "2,368", "−20.00", "−21.00 to −19.00", "21.2", "+2.000")
    assert stem[:6] == ("stem", "1,728", "−1.50", "−2.50 to −0.50", "21.2", "+0.250")
    assert stem[6:] == ("−19.00", "−20.00 to −18.00", "21.2", "+0.500")
    assert head[2] == "0.00"
    assert head[5] == "−0.125"
    assert head[6] == "failed: no kernel"
    text = sensitivity_markdown(FOUND)
    assert text.count("\n| ") == 4
    assert "Imaginary CPU" in text


def test_the_chart_has_a_bar_for_each_figure_and_names_every_layer() -> None:
    drawn = sensitivity_svg(FOUND)
    root = ElementTree.fromstring(drawn)
    texts = {"".join(element.itertext()).strip() for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"stem", "head", "alone", "all but it", "SQNR of the logits, dB"} <= texts
    assert sensitivity_svg(FOUND) == drawn


def test_records_read_back_equal() -> None:
    assert Sensitivity.from_json(json.loads(json.dumps(FOUND.to_json()))) == FOUND


@pytest.mark.slow
def test_a_run_is_opened_again_with_what_its_artifacts_were_made_from(copied_store: Path, tiny_run: TinyRun) -> None:
    session, _ = reopen_run(copied_store, "tiny", SILENT, device="cpu")
    step = artifact_of(session, "tiny", "ptq")
    parent, config = subject(step.artifact, None)
    assert (parent.name, config.images) == ("fuse", 64)
    assert parent.module()  # its weights fit
    rows = {row.name: row for row in tiny_run.report.rows}
    assert rows["fuse"].file is not None
    assert parent.key == rows["fuse"].file.key
    with pytest.raises(UserError, match=r"has no artifact 'ptk' \(did you mean ptq"):
        artifact_of(session, "tiny", "ptk")
    with pytest.raises(UserError, match="qat cannot be analysed layer by layer"):
        subject(artifact_of(session, "tiny", "qat").artifact, None)
    with pytest.raises(UserError, match="a --seed different from 1"):
        reopen_run(copied_store, "tiny", SILENT, seed=1, device="cpu")


@pytest.mark.slow
def test_a_run_that_left_unreadable_images_out_is_opened_to_do_so_again(copied_store: Path) -> None:
    for wanted in (False, True):
        session, _ = reopen_run(copied_store, "tiny", SILENT, device="cpu", skip_unreadable=wanted)
        assert session.context.skip_unreadable == wanted
        session.close()
    path = copied_store / "tiny" / "report.json"
    report = json.loads(path.read_text())
    report["rows"][0]["pairs"][0]["measured"]["accuracy"]["left_out"] = 1
    path.write_text(json.dumps(report))
    seal(path.parent)
    session, _ = reopen_run(copied_store, "tiny", SILENT, device="cpu")
    assert session.context.skip_unreadable
    session.close()


def test_both_commands_take_the_option_that_the_refusal_of_an_unreadable_image_names(monkeypatch) -> None:
    seen: list[object] = []

    def reopened(*_: object, skip_unreadable: bool, **__: object) -> NoReturn:
        seen.append(skip_unreadable)
        raise UserError("enough")

    def searched(job: Job, *_: object) -> NoReturn:
        seen.append(job.skip_unreadable)
        raise UserError("enough")

    monkeypatch.setattr("optimize.run.finished_run.reopen_run", reopened)
    monkeypatch.setattr("optimize.precision.search_job.search_job", searched)
    for words in (["sensitivity", "tiny"], ["search", "resnet18"]):
        for more in ([], ["--skip-unreadable"]):
            assert CliRunner().invoke(cli.app, [*words, *more]).exit_code == 2
    assert seen == [False, True, False, True]


@pytest.mark.slow
def test_the_command_writes_figures_table_and_chart_and_keeps_its_trials(copied_store: Path, monkeypatch) -> None:
    every: list[list[str]] = []

    def two(*given: Any) -> dict[str, int]:
        """Of each layer there are two trials: the ends stand for all."""
        found = layers_of(*given)
        every.append(list(found))
        return {name: found[name] for name in (every[0][0], every[0][-1])}

    monkeypatch.setattr("optimize.precision.sensitivity.layers_of", two)
    store = copied_store
    words = ["sensitivity", "tiny", "--store", str(store), "--device", "cpu", "--measure", "cpu"]
    first = CliRunner().invoke(cli.app, [*words, "--execution", "onnxruntime"], catch_exceptions=False)
    assert first.exit_code == 0, first.output
    folder = store / "tiny.sensitivity"
    found = Sensitivity.from_json(json.loads((folder / "sensitivity.json").read_text()))
    assert every == [["0", "3", "6", "12"]]
    assert [layer.name for layer in found.layers] == ["0", "12"]
    assert found.runs_on == "onnxruntime"
    assert found.timing.rounds == 2  # as the run was measured
    assert (folder / "sensitivity.svg").read_bytes().startswith(b"<?xml")
    assert "| all 2 layers |" in (folder / "sensitivity.md").read_text()
    keys = set(json.loads((folder / "objects.json").read_text()))
    opened = Store(store)
    assert all(opened.open(key) is not None for key in keys)
    assert not keys & {path.name for path in prunable(opened).objects}
    unknown = CliRunner().invoke(cli.app, [*words, "--execution", "onnx"])
    assert unknown.exit_code == 2
