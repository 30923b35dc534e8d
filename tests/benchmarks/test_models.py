"""The page of models of several kinds: its cells are the reports', and a run is made once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.models import CASES, Case, Finished, main, page, take
from tests.optimize.synthetic import synthetic

DEEP = Case("a user's own", "net.py:deep", ("--image-size", "64"), {"epochs": 12, "optimizer": "sgd"})


def cells(text: str, start: str) -> list[list[str]]:
    """The cells of each line of a table that begins like this."""
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith(f"| `{start}`")]


def test_a_line_says_what_each_int8_stage_did_to_its_baseline_and_what_is_recommended() -> None:
    text = page([Finished(DEEP, synthetic())], "python -m benchmarks.models")
    accuracy, speed = cells(text, "net.py:deep")
    assert accuracy[:4] == ["`net.py:deep`", "a user's own", "`--image-size 64`, epochs: 12, optimizer: sgd", "91.11"]
    assert [cell.split(" ")[0] for cell in accuracy[4:]] == ["−0.23", "−0.34", "+0.22", "+0.11"]
    assert speed[:4] == ["`net.py:deep`", "qat@torchscript", "4.55 ms", "onnx@openvino"]
    assert speed[5:] == ["11.1 MB", "44.4 MB"]
    assert "`ptq` and `onnx-int8` are 0.11 points of top-1 apart" in text
    assert "`net.py:deep`, onnx-half: " in text


def test_each_page_asks_the_store_what_is_made_and_may_have_all_timed_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No copy of a run's report is taken for what the present code, libraries and settings make."""
    told = tmp_path / "told.json"
    told.write_text(json.dumps(synthetic().to_json()))
    program = tmp_path / "optimize-stand-in"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\ncat {told}\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert take(DEEP, tmp_path / "store") == Finished(DEEP, synthetic())
    take(DEEP, tmp_path / "store", remeasure=True)
    first, second = (tmp_path / "asked").read_text().splitlines()
    assert "--remeasure" not in first
    assert "--remeasure" in second
    program.write_text("#!/bin/sh\nexit 7\n")
    with pytest.raises(subprocess.CalledProcessError) as refused:
        take(DEEP, tmp_path / "store")
    assert refused.value.returncode == 7
    assert main(["--only", "mobilenet_v2"]) == 7
    with pytest.raises(SystemExit, match="2"):
        main(["--only", "mobilenet_v3"])


def test_the_page_says_on_which_day_it_was_timed_and_not_when_it_was_written() -> None:
    (said,) = [line for line in page([Finished(DEEP, synthetic())], "a command").splitlines() if "a command" in line]
    assert f"timed on {synthetic().measurement.taken:%Y-%m-%d}:" in said


def test_the_models_are_of_every_kind_that_can_be_brought() -> None:
    names = [case.model for case in CASES]
    assert {"mobilenet_v2", "convnext_tiny", "vit_b_16"} < set(names)
    assert any(name.startswith("timm:") for name in names)
    (own,) = [name.partition(":")[0] for name in names if ".py:" in name]
    assert "from .blocks import" in Path(own).read_text(encoding="utf-8")
