"""What a store holds of a run for serving: what was left by a server goes, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

from filelock import FileLock

from serve import runs


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
