"""The page of models of several kinds: its cells are the reports', and a run is made once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.models import CASES, Case, Finished, page, take
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


def test_what_a_run_said_is_kept_until_the_case_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "optimize-stand-in"
    program.write_text("#!/bin/sh\nexit 7\n")
    program.chmod(0o755)
    kept = tmp_path / "net.py-deep.json"
    told = {"kind": DEEP.kind, "model": DEEP.model, "options": list(DEEP.options), "baseline": dict(DEEP.baseline)}
    told["qat"] = dict(DEEP.qat)
    kept.write_text(json.dumps({"case": told, "report": synthetic().to_json()}))
    monkeypatch.setattr(sys, "executable", str(program))
    assert take(DEEP, tmp_path / "store", tmp_path) == Finished(DEEP, synthetic())
    with pytest.raises(subprocess.CalledProcessError) as refused:
        take(Case(DEEP.kind, DEEP.model, DEEP.options), tmp_path / "store", tmp_path)
    assert refused.value.returncode == 7


def test_the_models_are_of_every_kind_that_can_be_brought() -> None:
    names = [case.model for case in CASES]
    assert {"mobilenet_v2", "convnext_tiny", "vit_b_16"} < set(names)
    assert any(name.startswith("timm:") for name in names)
    (own,) = [name.partition(":")[0] for name in names if ".py:" in name]
    assert "from .blocks import" in Path(own).read_text(encoding="utf-8")
