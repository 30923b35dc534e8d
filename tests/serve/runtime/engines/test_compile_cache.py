"""Compiled code lies where only the user can write, and is opened only as it was made."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from serve.runtime.card.card import Card, Preprocessing
from serve.runtime.card.execution import Execution
from serve.runtime.engines.onnxruntime_tensorrt import compile_options, engine_key
from serve.runtime.errors import EngineError
from serve.runtime.model_files.compile_cache import cache_folder, device_key, kept
from tests.programs import Programs

KEY = {"model": "abc", "torch": "2.14"}
TENSORRT_CARD = Card(
    name="x",
    model="small",
    task="classification",
    format="onnx",
    file="model.onnx",
    precision="int8",
    input_dtype="float32",
    device="cuda",
    preprocessing=Preprocessing(36, (32, 32)),
    classes=("a", "b"),
    files={"model.onnx": "a" * 64},
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_folder_is_private_and_of_its_key(cache: Path) -> None:
    folder = cache_folder("inductor", KEY)
    assert folder.is_relative_to(cache / "optimize-and-serve-compiled" / "inductor")
    for part in (folder, folder.parent, folder.parent.parent):
        assert part.stat().st_mode & 0o777 == 0o700
    assert json.loads((folder / "key.json").read_text()) == KEY
    assert cache_folder("inductor", dict(reversed(KEY.items()))) == folder
    assert cache_folder("inductor", {**KEY, "torch": "2.13"}) != folder
    assert cache_folder("tensorrt", KEY) != folder


def test_a_cache_that_is_named_by_a_relative_path_is_the_usual_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder("inductor", KEY).is_relative_to(tmp_path / "home" / ".cache")


@pytest.mark.parametrize(("place", "mode"), [("", 0o755), ("", 0o720), ("inductor", 0o704)])
def test_a_folder_that_is_open_to_others_is_refused(cache: Path, place: str, mode: int) -> None:
    cache_folder("inductor", KEY)
    (cache / "optimize-and-serve-compiled" / place).chmod(mode)
    with pytest.raises(EngineError, match=rf"is writable or readable by others \(mode {mode:o}\)"):
        cache_folder("inductor", KEY)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_somebody_else_is_refused(cache: Path) -> None:
    folder = cache_folder("inductor", KEY)
    os.chown(folder, 12345, -1)
    with pytest.raises(EngineError, match="belongs to user 12345"):
        cache_folder("inductor", KEY)


def test_a_link_is_no_folder_of_its_own(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (cache / "optimize-and-serve-compiled").mkdir(parents=True, mode=0o700)
    (cache / "optimize-and-serve-compiled" / "inductor").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EngineError, match="is not a folder"):
        cache_folder("inductor", KEY)


def test_where_nothing_can_be_written_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(EngineError, match="set XDG_CACHE_HOME to a folder of yours"):
        cache_folder("inductor", KEY)


def test_what_is_kept_is_made_once_and_again_when_it_was_changed() -> None:
    folder, made = cache_folder("inductor", KEY), []

    def make(path: Path) -> None:
        assert path.suffix == ".pt2"
        made.append(path)
        path.write_bytes(b"code")

    path = kept(folder, "model.pt2", make)
    assert kept(folder, "model.pt2", make) == path
    assert (len(made), path.read_bytes()) == (1, b"code")
    assert (folder / "model.pt2.sha256").read_text() == hashlib.sha256(b"code").hexdigest()
    path.write_bytes(b"changed")
    assert kept(folder, "model.pt2", make).read_bytes() == b"code"
    assert len(made) == 2


def test_what_could_not_be_made_is_not_kept() -> None:
    folder = cache_folder("inductor", KEY)

    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise EngineError("no compiler")

    with pytest.raises(EngineError, match="no compiler"):
        kept(folder, "model.pt2", fail)
    assert {path.name for path in folder.iterdir()} <= {"key.json", "lock"}


SLOW_MAKER = """
import sys, time
from pathlib import Path
from serve.runtime.model_files.compile_cache import cache_folder, kept

def make(path):
    time.sleep(0.5)
    with open(sys.argv[1], "a") as log:
        log.write("made ")
    path.write_bytes(b"code")

kept(cache_folder("inductor", {"one": 1}), "model.pt2", make)
"""


def test_two_processes_do_not_compile_the_same_at_once(torch_begun: Programs, tmp_path: Path) -> None:
    log = tmp_path / "log"
    running = [torch_begun.start("-c", SLOW_MAKER, log) for _ in range(2)]
    assert [program.end().returncode for program in running] == [0, 0]
    assert log.read_text() == "made "


@pytest.mark.parametrize(
    "change",
    [
        {"machine": {"tensorrt": "101401"}},
        {"machine": {"onnxruntime": "1.32"}},
        {"machine": {"name": "another GPU"}},
        {"machine": {"cuda": "13.1"}},
        {"card": {"files": {"model.onnx": "b" * 64}}},
        {"card": {"files": {"model.onnx": "a" * 64, "model.onnx.data": "c" * 64}}},
        {"card": {"precision": "float16"}},
        {"card": {"preprocessing": Preprocessing(36, (24, 24))}},
        {"execution": {"buckets": (1, 16)}},
        {"execution": {"options": {"optimum": 4}}},
        {"execution": {"options": {"half": True}}},
        {"execution": {"options": {"level": 5}}},
        {"input": "pixels"},
    ],
    ids=str,
)
def test_what_tensorrt_compiles_is_kept_by_all_that_it_depends_on(change: dict[str, Any]) -> None:
    def folder(change: Mapping[str, Any]) -> Path:
        card = dataclasses.replace(TENSORRT_CARD, **change.get("card", {}))
        execution = dataclasses.replace(Execution("onnxruntime-tensorrt", "cuda"), **change.get("execution", {}))
        machine = {"tensorrt": "101400", "onnxruntime": "1.31", "name": "a GPU", "cuda": "13.0"}
        options = compile_options(card, execution, change.get("input", "input"))
        return cache_folder("tensorrt", engine_key(card, options, machine | change.get("machine", {})))

    assert folder({}) == folder({"card": {"name": "what it is called", "classes": ("one",)}})
    assert folder(change) != folder({})


def test_the_key_of_a_processor_has_its_instruction_sets() -> None:
    found = device_key(torch.device("cpu"))
    assert found == device_key(torch.device("cpu"))
    assert found["capability"] == torch.backends.cpu.get_cpu_capability()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next(line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features")))
    assert found["flags"] == hashlib.sha256(" ".join(sorted(flags)).encode()).hexdigest()
