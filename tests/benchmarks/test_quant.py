"""Quantization side by side: rows that are kept and not made twice, paired figures, a page of all that is known."""

from __future__ import annotations

import datetime
import importlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock, Timeout
from torch import nn

from optimize.context import Context
from optimize.errors import NotApplicableError
from optimize.listener import SILENT
from tests.benchmarked import benchmark
from tests.optimize.workbench import noise_context

NET = """
from torch import nn

PREPROCESSING = {"resize": 8, "crop": [8, 8]}


def net(num_classes):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, num_classes)
    )
"""

ANSWERS = {
    "float": "1111111100",
    "ort-static": "1110000000",
    "nncf": "0111111111",
    "minmax": "1111111100",
    "mse": "1111111111",
    "entropy": "0000000000",
}


@pytest.fixture(scope="module")
def quant() -> Iterator[Any]:
    """The benchmark; the peers' passes that it brings go when these tests are over: the project does not have them."""
    with benchmark("benchmarks.quant.__main__") as quant:
        yield quant


def parts(name: str) -> Any:
    return importlib.import_module(f"benchmarks.quant.{name}")


def row(name: str, answers: str, **fields: Any) -> Any:
    record = parts("record")
    right = np.array([answer == "1" for answer in answers])
    engine = "openvino" if name == "nncf" else "onnxruntime"
    fields = {"bytes": 2_500_000, "answered": {engine: record.Answered.of(right)}} | fields
    return record.RowRecord(name=name, ours=name in ("minmax", "mse", "entropy", "histogram"), inputs="", **fields)


def subject(rows: Sequence[Any], title: str = "Net on data") -> Any:
    return parts("record").SubjectRecord(
        title=title,
        words="python -m benchmarks.quant net",
        model="net",
        data="data",
        calibration=16,
        cpu="a processor",
        cores=2,
        isa=("avx2",),
        versions={"torch": "2.14"},
        created=datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
        rows=tuple(rows),
    )


@pytest.fixture
def made(quant: Any) -> Any:
    return subject([row(name, answers) for name, answers in ANSWERS.items()])


def test_which_images_were_right_survives_being_written(quant: Any, made: Any, tmp_path: Path) -> None:
    record = parts("record")
    record.write(made, tmp_path / "a.json")
    (read,) = record.read_all(tmp_path)
    assert read == made
    assert read.row("nncf").answers.right.tolist() == [False] + [True] * 9
    assert read.row("minmax").answers.top1 == 0.8


def test_ours_is_compared_image_by_image_with_the_most_accurate_peer_and_with_float(quant: Any, made: Any) -> None:
    lines = {
        line.split("|")[1].strip(" *"): [c.strip() for c in line.split("|")[2:-1]] for line in parts("page").table(made)
    }
    assert lines[""][:4] == ["top-1, ONNX Runtime", "top-1, OpenVINO", "against float, points", "against nncf, points"]
    # 8 and 9 right of 10: one is gained and two are lost
    assert lines["minmax"][0] == "80.00"
    assert lines["minmax"][2].startswith("0.00 [")
    assert lines["minmax"][3].startswith("−10.00 [")
    assert lines["mse"][3].startswith("+10.00 [")
    assert lines["nncf"][:2] == ["", "90.00"]
    assert lines["nncf"][3] == "", "peers are not compared among themselves"
    assert lines["float"][2:4] == ["", ""]
    assert lines["minmax"][4:] == ["2.50", "", "", ""], "nothing was timed"


def test_the_verdict_names_who_is_below_the_best_peer_beyond_the_interval(quant: Any, made: Any) -> None:
    (said,) = parts("page").verdict(made)
    assert said == (
        "Of the peers, nncf has the highest top-1. Each of ours is compared with it on the same images. "
        "The interval holds 0 for minmax, mse. The interval lies below 0 for entropy."
    )
    assert list(parts("page").verdict(subject([row("mse", "11")]))) == ["There is nothing to compare."]


def test_times_are_medians_of_rounds_and_the_default_is_held_against_the_fastest_peer_in_one_engine(quant: Any) -> None:
    timed = subject(
        [
            row("float", "11", medians={"onnxruntime": (9.0,) * 7}),
            row("minmax", "11", made_s=3.25, medians={"onnxruntime": (2.0, 1.0, 3.0, 2.0, 2.0, 2.0, 2.0)}),
            row("histogram", "11", medians={"onnxruntime": (3.0, 1.5, 4.5, 3.0, 3.0, 3.0, 3.0)}),
            row("ort-static", "11", medians={"onnxruntime": (4.0, 2.0, 6.0, 4.0, 4.0, 4.0, 4.0)}),
            row("nncf", "11", medians={"openvino": (1.0,) * 7}),
        ]
    )
    page = parts("page")
    assert "| **minmax** | 100.00 |  |" in "\n".join(page.table(timed))
    assert next(line for line in page.table(timed) if "minmax" in line).endswith("| 2.50 | 3.2 | 2.000 |  |")
    assert [line for line in page.verdict(timed) if "times as fast" in line] == [
        "In ONNX Runtime the default of `ptq` is histogram. It is 1.33 times as fast [1.33, 1.33] as ort-static, the "
        "fastest peer."
    ], "no other engine ran both"


def test_rows_of_other_images_or_another_machine_stand_in_no_table_together(quant: Any, made: Any) -> None:
    assert made.same_bed(made.model_copy(update={"title": "Other", "versions": {}}))
    for change in ({"calibration": 32}, {"cpu": "another"}, {"cores": 4}, {"isa": ("avx512f",)}, {"model": "other"}):
        assert not made.same_bed(made.model_copy(update=change)), change


def test_times_from_the_store_are_not_told_with_what_runs_now(quant: Any, made: Any) -> None:
    taken = datetime.datetime(2026, 1, 3, tzinfo=datetime.UTC)

    class Measured:
        """A bench that has nothing to measure any more."""

        timing = SimpleNamespace(rounds=7, seconds=0.2)

        def speed(self, candidates: Any, beside_eager: bool) -> Any:
            return SimpleNamespace(value=SimpleNamespace(speeds={}), cached=True, created=taken.isoformat())

    timed = importlib.import_module("benchmarks.quant.speed").timed
    again = timed(None, [], made, Measured())
    assert again.timed.taken == taken
    assert again.timed.running is None
    assert list(parts("page").facts(again))[1] == "Timed on 2026-01-03, 7 rounds of 0.2 s in turns."
    known = made.model_copy(update={"timed": again.timed.model_copy(update={"running": 1.5})})
    assert timed(None, [], known, Measured()).timed.running == 1.5


def test_nobody_measures_while_quantizing_is_timed(quant: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, held = tmp_path / "lock", []
    monkeypatch.setattr("optimize.measure.process_pool.LOCK_FILE", lock)

    def is_held() -> bool:
        try:
            with FileLock(lock, timeout=0):
                return False
        except Timeout:
            return True

    def apply(parent: object, config: str, context: object, folder: Path) -> None:
        held.append((config, is_held(), list(folder.iterdir())))
        (folder / "file").touch()

    speed = parts("speed")
    monkeypatch.setattr(speed, "pass_of", lambda config: SimpleNamespace(apply=apply))
    started = SimpleNamespace(artifact=None)
    session = SimpleNamespace(context=SimpleNamespace(seed=0, listener=SILENT))
    bed = SimpleNamespace(made=lambda way: 3 * [started], base=SimpleNamespace(session=session))
    assert speed.seconds_of(bed, SimpleNamespace(stages=("ptq", "onnx-int8"))) > 0
    assert held == [("ptq", True, []), ("onnx-int8", True, [])]
    assert not is_held()


def test_accuracy_control_judges_by_images_that_found_no_range(quant: Any) -> None:
    peers, context = importlib.import_module("benchmarks.peers"), noise_context()
    images = len(context.data.train) // 2
    config = peers.NncfAccuracy(images=images, judged=images)

    def seen(context: Context) -> set[bytes]:
        return {image.numpy().tobytes() for batch, _ in context.calibration(images) for image in batch}

    ranges, judged = seen(context), seen(peers.judging(context, config))
    assert len(ranges) == len(judged) == images
    assert not ranges & judged
    with pytest.raises(NotApplicableError, match="none is left to judge by"):
        peers.judging(context, peers.NncfAccuracy(images=2 * images))


def test_a_page_keeps_its_words_and_is_made_of_all_subjects(quant: Any, made: Any, tmp_path: Path) -> None:
    record, page = parts("record"), tmp_path / "page.md"
    other = subject(
        [row("float", "11"), parts("record").RowRecord(name="nncf", ours=False, inputs="", reason="not here")]
    )
    record.write(made, tmp_path / "r" / "b.json")
    record.write(other.model_copy(update={"title": "A net"}), tmp_path / "r" / "a.json")
    page.write_text("# A heading\n\nWords.\n\n<!-- measured -->\n\nold figures\n")
    for _ in range(2):
        assert quant.main(["--records", str(tmp_path / "r"), "--write", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("# A heading\n\nWords.\n\n<!-- measured -->\n\n![")
    assert "old figures" not in text
    assert text.index("## A net") < text.index("## Net on data")
    assert "- nncf: not here" in text
    assert text.count("Nothing was timed yet.") == 2
    assert (tmp_path / "page.svg").stat().st_size > 1000


def test_an_unknown_way_is_refused_in_a_line(quant: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        quant.main(["resnet18", "--only", "minmaxx"])
    assert "there is no way 'minmaxx'; there are float, minmax," in capsys.readouterr().err


@pytest.mark.slow
def test_the_smallest_comparison_is_made_once_goes_on_and_is_timed_apart(
    quant: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.py").write_text(NET)
    torch.manual_seed(0)
    weights = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)
    )
    torch.save(weights.state_dict(), tmp_path / "net.pth")
    words = [
        *(f"{tmp_path}/net.py:net", "--checkpoint", f"{tmp_path}/net.pth", "--data", "digits", "--images", "32"),
        *("--only", "minmax", "ort-static", "--title", "Tiny", "--rounds", "2", "--seconds", "0.01"),
        *("--store", f"{tmp_path}/store", "--records", f"{tmp_path}/records"),
    ]
    assert quant.main([*words, "--no-speed", "--limit", "0"]) == 3, "the limit left all to the next call"
    assert quant.main([*words, "--no-speed"]) == 0
    said = capfd.readouterr().out
    assert [line.partition(":")[0] for line in said.splitlines()] == ["float", "minmax", "ort-static"]
    known = json.loads((tmp_path / "records" / "tiny.json").read_text())
    assert [row["name"] for row in known["rows"]] == ["float", "minmax", "ort-static"]
    assert [list(row["answered"]) for row in known["rows"]] == 3 * [["onnxruntime", "openvino"]]
    assert {row["made_s"] for row in known["rows"]} == {None}
    assert quant.main([*words, "--write", f"{tmp_path}/page.md"]) == 0
    assert [line.partition(":")[0] for line in capfd.readouterr().out.splitlines()] == ["minmax", "ort-static"]
    timed = {row["name"]: row for row in json.loads((tmp_path / "records" / "tiny.json").read_text())["rows"]}
    assert all(len(row["medians"]["openvino"]) == 2 for row in timed.values())
    assert [timed[name]["made_s"] is None for name in ("float", "minmax", "ort-static")] == [True, False, False]
    for row in known["rows"]:
        assert timed[row["name"]]["answered"] == row["answered"], "rows were not made again"
    text = (tmp_path / "page.md").read_text()
    assert "`python -m benchmarks.quant net.py:net --checkpoint net.pth --data digits --images 32 --title Tiny" in text
    assert str(tmp_path) not in text
    assert "| **minmax** |" in text
    failed = parts("record").RowRecord(**(timed["minmax"] | {"answered": {}, "reason": "nothing runs it"}))
    record = parts("record").read(tmp_path / "records" / "tiny.json")
    parts("record").write(
        record.with_row(failed, ["float", "minmax", "ort-static"]), tmp_path / "records" / "tiny.json"
    )
    assert quant.main([*words, "--no-speed"]) == 0
    assert [line.partition(":")[0] for line in capfd.readouterr().out.splitlines()] == ["minmax"], "it is tried again"
