"""Hashes that are remembered: only of files that nobody has touched, whatever was done to their times."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimize.store import hashes as module
from optimize.store.hashes import Hashes
from optimize.store.objects import Store
from serve.runtime.card.card import sha256_file
from tests.optimize.workbench import noting


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def write_numbers(folder: Path) -> None:
    (folder / "weights").write_bytes(b"numbers")


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are read through, from then on."""
    found: list[str] = []
    monkeypatch.setattr(module, "sha256_file", noting(found, sha256_file, lambda path: path.name))
    return found


def test_a_file_is_read_once_and_not_again_by_the_next_process(tmp_path: Path, read: list[str]) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"numbers")
    hashes = Hashes(tmp_path / "known.json")
    assert hashes.of(path) == hashes.of(path) == sha256(b"numbers")
    hashes.save()
    assert Hashes(tmp_path / "known.json").of(path) == sha256(b"numbers")
    assert read == ["weights"]


@given(old=st.binary(min_size=1, max_size=8), new=st.binary(min_size=1, max_size=8), replaced=st.booleans())
def test_a_file_that_was_changed_is_read_again_though_its_time_is_set_back(
    tmp_path_factory: pytest.TempPathFactory, old: bytes, new: bytes, replaced: bool
) -> None:
    folder = tmp_path_factory.mktemp("h")
    path = folder / "weights"
    path.write_bytes(old)
    before = path.stat()
    hashes = Hashes(folder / "known.json")
    assert hashes.of(path) == sha256(old)
    if replaced:
        (folder / "other").write_bytes(new)
        (folder / "other").replace(path)
    else:
        path.write_bytes(new)  # at once: the kernel's clock may stand still
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert hashes.of(path) == sha256(new)


def test_a_hard_link_changes_no_bytes_and_is_no_reason_to_read(tmp_path: Path, read: list[str]) -> None:
    store = Store(tmp_path / "store")
    made = store.obtain("k" * 64, write_numbers)
    store.link(made.folder / "weights", tmp_path / "store" / "run" / "weights")
    assert store.open("k" * 64) is not None
    del store
    assert Store(tmp_path / "store").open("k" * 64) is not None
    assert read == ["weights"]


def test_an_object_whose_file_was_changed_through_its_link_is_made_again(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    made = store.obtain("k" * 64, write_numbers)
    linked = tmp_path / "store" / "run" / "weights"
    store.link(made.folder / "weights", linked)
    before = linked.stat()
    linked.write_bytes(b"NUMBERS")
    os.utime(linked, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert store.open("k" * 64) is None


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"files": {}}', "x", '{"files": {"1:2": [1]}}'])
def test_a_damaged_memory_is_none(tmp_path: Path, text: str, read: list[str]) -> None:
    (tmp_path / "known.json").write_text(text)
    (tmp_path / "weights").write_bytes(b"numbers")
    assert Hashes(tmp_path / "known.json").of(tmp_path / "weights") == sha256(b"numbers")
    assert read == ["weights"]


def test_a_memory_with_one_changed_letter_is_none(tmp_path: Path, read: list[str]) -> None:
    (tmp_path / "weights").write_bytes(b"numbers")
    hashes = Hashes(tmp_path / "known.json")
    digest = hashes.of(tmp_path / "weights")
    hashes.save()
    text = (tmp_path / "known.json").read_text()
    (tmp_path / "known.json").write_text(text.replace(digest, digest[:-1] + ("0" if digest[-1] != "0" else "1")))
    assert json.loads((tmp_path / "known.json").read_text())["files"]
    assert Hashes(tmp_path / "known.json").of(tmp_path / "weights") == digest
    assert read == ["weights"] * 2


def test_memories_that_cannot_be_written_cost_a_reading(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"numbers")
    hashes = Hashes(tmp_path / "weights" / "known.json")
    assert hashes.of(tmp_path / "weights") == sha256(b"numbers")
    hashes.save()


def test_files_that_are_asked_for_no_more_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST", 3)
    for number in range(4):
        (tmp_path / f"f{number}").write_bytes(b"x")
    first = Hashes(tmp_path / "known.json")
    for number in range(3):
        first.of(tmp_path / f"f{number}")
    first.save()
    second = Hashes(tmp_path / "known.json")
    second.of(tmp_path / "f3")
    second.save()
    assert len(json.loads((tmp_path / "known.json").read_text())["files"]) == 1
