"""What a store holds of a run for serving: what was left by a server goes, and nothing else."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

from filelock import FileLock

from serve import runs
from serve.options import ServingOptions
from serve.runtime.execution import Execution
from serve.runtime.serving import Serving
from tests.serve import artifacts


def left_by_a_server(store: Path) -> Path:
    """A run of ``fuse`` alone, with the archive of an artifact that it had before; returns the archives' folder."""
    (store / ".store" / "locks").mkdir(parents=True)
    folder = store / "small" / "archives"
    folder.mkdir(parents=True)
    for name in ("small-fuse.mar", "small-onnx.mar"):
        (folder / name).write_bytes(b"an archive")
    rows = [{"name": "fuse", "archive": {"path": "x"}}, {"name": "ptq", "archive": None}]
    (store / "small" / "report.json").write_text(json.dumps({"rows": rows, "recommended": "fuse"}))
    return folder


def test_archives_that_were_kept_for_a_server_go_when_it_has_stopped(tmp_path: Path) -> None:
    folder = left_by_a_server(tmp_path)
    runs.remove_left(tmp_path, "small")
    assert [path.name for path in folder.iterdir()] == ["small-fuse.mar"]


def test_nothing_goes_while_the_run_is_being_made_again(tmp_path: Path) -> None:
    folder = left_by_a_server(tmp_path)
    with FileLock(tmp_path / ".store" / "locks" / "run-small"):
        runs.remove_left(tmp_path, "small")
    assert len(list(folder.iterdir())) == 2


def test_without_a_report_nothing_is_known_to_be_left(tmp_path: Path) -> None:
    folder = left_by_a_server(tmp_path)
    (tmp_path / "small" / "report.json").write_text("{}")
    runs.remove_left(tmp_path, "small")
    assert len(list(folder.iterdir())) == 2


def test_who_asks_for_cuda_is_served_by_it_first_and_who_asks_for_nothing_as_it_was_packed(tmp_path: Path) -> None:
    folder = artifacts.torchscript(tmp_path / "small" / "artifacts" / "script")
    (folder / "serving.json").write_text(Serving((Execution("torchscript"), Execution("torchscript", "cuda"))).text)
    selection = runs.Selection({"small-script": tmp_path / "small" / "archives" / "small-script.mar"}, {}, "")
    assert runs.repacking(tmp_path, selection, ServingOptions()) is None
    pack = runs.repacking(tmp_path, selection, ServingOptions(k=2), "cuda")
    assert pack is not None
    pack("small-script", tmp_path / "own.mar")
    with zipfile.ZipFile(tmp_path / "own.mar") as archive:
        served = json.loads(archive.read("serving.json"))
    assert [entry["device"] for entry in served["executions"]] == ["cuda", "cpu"]
    assert served["k"] == 2
