"""The store against damage, death, company and full disks."""

from __future__ import annotations

import datetime
import errno
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from optimize.errors import NotApplicableError
from optimize.store import hashes as hashes_module
from optimize.store import objects as store_module
from optimize.store.atomic_files import write_atomically, write_json
from optimize.store.keys import make_key
from optimize.store.objects import Store, StoredObject, fault
from serve.runtime.card.card import sha256_file
from serve.runtime.errors import UserError
from tests.optimize.workbench import noting

KEY = make_key(what="the object of these tests")

# Builds KEY slowly in another process: says when it has begun, and how it ended.
BUILDER = """
import sys, time
from collections.abc import Callable
from pathlib import Path
from optimize.store.objects import Store

def build(folder):
    (folder / "half").write_text("first half")
    print("building", flush=True)
    time.sleep(float(sys.argv[3]))
    (folder / "rest").write_text("second half")

stored = Store(Path(sys.argv[1])).obtain(sys.argv[2], build, lambda: print("waiting", flush=True))
print("cached" if stored.cached else "built", sorted(path.name for path in stored.folder.iterdir()), flush=True)
"""


def builder(root: Path, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILDER, str(root), KEY, str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def text(content: str):
    return lambda folder: (folder / "file").write_text(content)


def forbidden(folder: Path) -> None:
    raise AssertionError("the object was built again")


def objects(root: Path) -> list[str]:
    return sorted(path.name for path in (root / ".store" / "objects").iterdir())


def temporaries(root: Path) -> list[Path]:
    return list((root / ".store" / "tmp").iterdir())


def test_an_object_is_built_once_and_then_found(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.open(KEY) is None
    first = store.obtain(KEY, text("a"))
    again = Store(tmp_path).obtain(KEY, forbidden)
    assert (first.cached, again.cached) == (False, True)
    assert again.folder == first.folder
    assert store.open(KEY) == again
    assert (again.folder / "file").read_text() == "a"
    assert again.seconds == first.seconds


def test_an_object_under_construction_is_not_there_for_others(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "file").write_text("a")
        assert objects(tmp_path) == []
        assert Store(tmp_path).open(KEY) is None

    Store(tmp_path).obtain(KEY, build)
    assert objects(tmp_path) == [KEY]


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt(), NotApplicableError("no")])
def test_a_build_that_raises_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    def build(folder: Path) -> None:
        (folder / "file").write_text("a")
        raise error

    with pytest.raises(type(error)):
        Store(tmp_path).obtain(KEY, build)
    assert objects(tmp_path) == []
    assert temporaries(tmp_path) == []
    assert Store(tmp_path).obtain(KEY, text("b")).cached is False


def test_after_sigkill_in_the_middle_of_a_build_the_next_process_builds_it(tmp_path: Path) -> None:
    with builder(tmp_path, 60) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "building\n"
        finally:
            process.kill()
    assert objects(tmp_path) == []
    output, _ = builder(tmp_path, 0).communicate(timeout=60)
    assert output.splitlines()[-1] == "built ['half', 'object.json', 'rest']"


def test_of_two_processes_one_builds_and_the_other_waits_for_it(tmp_path: Path) -> None:
    processes = [builder(tmp_path, 1.5), builder(tmp_path, 1.5)]
    outputs = sorted(process.communicate(timeout=60)[0].splitlines() for process in processes)
    names = "['half', 'object.json', 'rest']"
    built = ["building", f"built {names}"]
    assert built in outputs
    outputs.remove(built)
    assert outputs in ([["waiting", f"cached {names}"]], [[f"cached {names}"]])


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "file").write_text("A"),
        lambda folder: (folder / "file").unlink(),
        lambda folder: os.truncate(folder / "file", 3),
        lambda folder: (folder / "file").write_bytes(b""),
        lambda folder: (folder / "object.json").unlink(),
        lambda folder: os.truncate(folder / "object.json", 20),
        lambda folder: (folder / "object.json").write_text("[]"),
    ],
    ids=["changed", "missing", "truncated", "empty", "no manifest", "half a manifest", "no object"],
)
def test_a_damaged_object_is_noticed_and_built_again(tmp_path: Path, damage) -> None:
    store = Store(tmp_path)
    folder = store.obtain(KEY, text("whole")).folder
    assert fault(folder) is None
    damage(folder)
    assert fault(folder) is not None
    assert store.open(KEY) is None
    rebuilt = store.obtain(KEY, text("whole again"))
    assert rebuilt.cached is False
    assert (rebuilt.folder / "file").read_text() == "whole again"
    assert temporaries(tmp_path) == []


def test_a_process_that_saw_damage_does_not_throw_away_what_another_has_rebuilt(tmp_path: Path) -> None:
    store = Store(tmp_path)
    folder = store.obtain(KEY, text("whole")).folder
    (folder / "file").write_text("damaged")
    rebuilt = threading.Event()
    inodes = []

    def rebuild() -> None:
        inodes.append((Store(tmp_path).obtain(KEY, text("whole")).folder / "file").stat().st_ino)
        rebuilt.set()

    real = store_module.fault

    def slow_fault(path: Path, hash_of: Callable[[Path], str]) -> str | None:
        found = real(path, hash_of)
        if threading.current_thread() is threading.main_thread() and not rebuilt.is_set():
            other = threading.Thread(target=rebuild)  # it replaces the object while we hold a stale verdict
            other.start()
            other.join()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_module, "fault", slow_fault)
        kept = store.obtain(KEY, forbidden)
    assert kept.cached is True
    assert (kept.folder / "file").stat().st_ino == inodes[0]


def test_temporaries_of_dead_processes_are_swept_and_those_of_living_ones_are_not(tmp_path: Path) -> None:
    store = Store(tmp_path)
    root = tmp_path / ".store" / "tmp"
    dead, unlocked, fresh = root / "dead", root / "unlocked", root / "fresh"
    for folder in (dead, unlocked, fresh):
        folder.mkdir()
    (dead / ".lock").touch()
    (root / "probe-of-a-killed-process").touch()
    long_ago = time.time() - 3600
    with store.workspace() as living:
        for path in (dead, unlocked, living, root / "probe-of-a-killed-process"):
            os.utime(path, (long_ago, long_ago))
        Store(tmp_path)
        assert sorted(temporaries(tmp_path)) == sorted([living, fresh])


def test_an_object_tells_when_it_was_built_and_what_is_in_it(tmp_path: Path) -> None:
    before = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    built = Store(tmp_path).obtain(KEY, text("a"))
    assert before <= datetime.datetime.fromisoformat(built.created) <= datetime.datetime.now(datetime.UTC)
    assert built.files == {"file": hashlib.sha256(b"a").hexdigest()}
    time.sleep(1.1)
    again = Store(tmp_path).obtain(KEY, forbidden)
    assert (again.created, again.files) == (built.created, built.files)


def shares(store: Store, first: StoredObject) -> StoredObject:
    """An object that has ``file`` in common with the first, and ``own`` for itself."""

    def build(folder: Path) -> None:
        store.link(first.folder / "file", folder / "file")
        (folder / "own").write_text("own")

    return store.obtain(make_key(n="shares"), build)


def test_a_shared_file_is_one_file_and_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    first = store.obtain(KEY, text("shared"))
    hashed: list[str] = []
    monkeypatch.setattr(hashes_module, "sha256_file", noting(hashed, sha256_file, lambda path: path.name))
    for cached in (False, True):
        second = shares(store, first)
        assert second.cached is cached
        assert (second.folder / "file").samefile(first.folder / "file")
        assert second.files == {name: sha256_file(second.folder / name) for name in ("file", "own")}
    assert hashed == ["own"]
    assert fault(second.folder) is None


def test_damage_of_a_shared_file_is_noticed_on_either_side(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first = store.obtain(KEY, text("shared"))
    second = shares(store, first)
    (second.folder / "file").write_text("damage")  # of both: it is one file
    first = store.obtain(KEY, text("shared"))
    assert first.cached is False
    repaired = shares(store, first)
    assert repaired.cached is False
    assert (repaired.folder / "file").read_text() == "shared"
    (repaired.folder / "file").unlink()
    (repaired.folder / "file").write_text("damage")  # of this one alone
    assert shares(store, store.obtain(KEY, forbidden)).cached is False


def test_a_link_is_the_same_file_and_replaces_what_was_there(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    source, destination = tmp_path / "source", tmp_path / "run" / "deep" / "file"
    source.write_text("new")
    store.link(source, destination)
    assert destination.samefile(source)
    destination.unlink()
    destination.write_text("old")
    store.link(source, destination)
    assert destination.read_text() == "new"
    assert [path.name for path in destination.parent.iterdir()] == ["file"]


def test_where_hard_links_fail_the_file_is_copied(tmp_path: Path, monkeypatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    source, destination = tmp_path / "source", tmp_path / "file"
    source.write_text("new")
    destination.write_text("old")
    Store(tmp_path).link(source, destination)
    assert destination.read_text() == "new"
    assert not destination.samefile(source)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".store", "file", "source"]


def test_a_full_disk_is_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    try:
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("a small file system cannot be mounted here")
    try:
        store = Store(disk)
        with pytest.raises(UserError, match="no space left on the disk") as caught:
            store.obtain(KEY, text("x" * (4 << 20)))
        assert "\n" not in str(caught.value)
        assert str(disk) in str(caught.value)
        assert objects(disk) == []
        assert temporaries(disk) == []
        store.obtain(KEY, text("small"))
        # What a stage cannot do here stays its own reason, however little room there is.
        with pytest.raises(NotApplicableError, match="nothing to do"):
            store.obtain(make_key(n=1), lambda folder: (_ for _ in ()).throw(NotApplicableError("nothing to do")))
    finally:
        subprocess.run(["umount", str(disk)], check=False)


def test_a_full_disk_is_known_by_a_librarys_own_words(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")

    with pytest.raises(UserError, match="no space left on the disk"):
        Store(tmp_path).obtain(KEY, build)


def test_a_file_in_place_of_the_store_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("I am a file")
    for root in (tmp_path / "store", tmp_path / "store" / "below"):
        with pytest.raises(UserError, match="is not a folder; choose another one with --store"):
            Store(root)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_store_without_write_permission_is_the_users_mistake(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(UserError, match="no permission to write"):
            Store(tmp_path)
    finally:
        tmp_path.chmod(0o700)


def test_an_atomic_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "report.json"
    write_json({"a": 1}, path)
    with pytest.raises(ValueError, match="Out of range"):
        write_json({"a": float("nan")}, path)

    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", refuse)  # where a full disk may first show
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"new")
    assert json.loads(path.read_text()) == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]
