"""Pruning: what no run names goes, if asked for, and what anybody uses stays."""

from __future__ import annotations

import dataclasses
import gc
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from typer.testing import CliRunner

from optimize import cli
from optimize.models.checkpoint import Checkpoint
from optimize.models.model_names import resolve_model
from optimize.passes.fuse import Fuse
from optimize.run.session import Session
from optimize.store.atomic_files import write_json
from optimize.store.keys import make_key
from optimize.store.locks import Hold, unshared
from optimize.store.objects import Store
from optimize.store.store_pruning import Prunable, prunable, prune
from serve.runtime.errors import UserError
from serve.torchserve.process_identity import Identity
from serve.torchserve.state import RunningServer, ServedModel, state_folder
from tests.optimize.tiny_net import Tiny
from tests.optimize.workbench import TINY_NET, noise_context

KEY = make_key(what="the object of these tests")
IN_USE = "a run or a Python program is using the store"


def objects(store: Store) -> set[str]:
    return {path.name for path in store.objects.iterdir()}


def put(store: Store, key: str, content: str = "a", name: str = "file", about: str = "") -> Path:
    def build(folder: Path) -> None:
        (folder / name).write_text(content)

    return store.obtain(key, build, about=about).folder


def write_run(root: Path, name: str, keys: object) -> None:
    (root / name).mkdir()
    write_json(keys, root / name / "objects.json")


def invoke(*words: object):
    return CliRunner().invoke(cli.app, [str(word) for word in words])


def test_what_no_run_names_is_shown_with_its_bytes_and_removed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    used, unused = make_key(n=1), make_key(n=2)
    put(store, used, "used")
    folder = put(store, unused, "x" * 1000, about="resnet18 on digits: ptq")
    write_run(tmp_path, "run", [used])
    found = prunable(store)
    assert found.objects == {folder: "resnet18 on digits: ptq"}
    assert found.size == 1000 + (folder / "object.json").stat().st_size
    assert found.lines() == ["resnet18 on digits: ptq"]
    assert objects(store) == {used, unused}
    assert prune(store, found).size == found.size
    assert objects(store) == {used}
    assert not prunable(store).objects


def test_locks_that_nobody_holds_go_with_what_they_were_for(tmp_path: Path) -> None:
    store = Store(tmp_path)
    folder = put(store, KEY)
    locks = tmp_path / ".store" / "locks"
    assert {path.name for path in locks.iterdir()} >= {KEY}
    with store.lock("run-held"):
        prune(store, prunable(store))
        assert {path.name for path in locks.iterdir()} == {"in-use", "run-held"}
    assert not folder.exists()
    assert put(store, KEY).is_dir(), "and the lock is made again when it is needed"


def test_only_bytes_that_nobody_else_shows_are_counted_and_shared_ones_once(tmp_path: Path) -> None:
    store = Store(tmp_path)
    one, two, three = (make_key(n=number) for number in range(3))
    first = put(store, one, "x" * 1000)
    for key in (two, three):
        store.obtain(key, lambda folder: store.link(first / "file", folder / "file"))
    manifests = sum((store.objects / key / "object.json").stat().st_size for key in (one, two, three))
    assert prunable(store).size == 1000 + manifests
    store.link(first / "file", tmp_path / "run" / "file")
    assert prunable(store).size == manifests


def test_what_a_run_has_come_to_need_since_it_was_shown_stays(tmp_path: Path) -> None:
    store = Store(tmp_path)
    put(store, KEY)
    agreed = prunable(store)
    write_run(tmp_path, "run", [KEY])
    late = make_key(n="made after it was shown")
    put(store, late)
    assert not prune(store, agreed).objects
    assert objects(store) == {KEY, late}


def test_lines_name_the_models_and_count_what_there_is_of_them() -> None:
    about = ["b on digits: ptq", "a on digits: ptq", "b on digits: ptq", "b on digits: speed", ""]
    found = Prunable({Path(str(number)): text for number, text in enumerate(about)}, 0)
    assert found.lines() == ["a on digits: ptq", "b on digits: ptq (2), speed", "of unknown origin: objects"]


@pytest.mark.parametrize("content", ["{", "5", "null"])
def test_nothing_is_removed_if_it_cannot_be_known_what_is_used(tmp_path: Path, content: str) -> None:
    store = Store(tmp_path)
    put(store, KEY)
    agreed = prunable(store)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "objects.json").write_text(content)
    for ask in (lambda: prunable(store), lambda: prune(store, agreed)):
        with pytest.raises(UserError, match=r"objects\.json is damaged"):
            ask()
    assert objects(store) == {KEY}


# --- what is in use


def session_of(root: Path) -> Session:
    return Session(Store(root), resolve_model(f"{TINY_NET}:tiny"), noise_context())


def test_a_session_keeps_its_store_until_it_and_its_artifacts_are_gone(tmp_path: Path) -> None:
    session = session_of(tmp_path)
    base = session.baseline(checkpoint=Checkpoint(Tiny(4).eval().state_dict(), "c" * 64)).artifact
    fused = session.apply(base, Fuse()).artifact
    del session, base
    gc.collect()
    with pytest.raises(UserError, match=IN_USE):
        prunable(Store(tmp_path))
    assert isinstance(fused.module(), torch.nn.Module)  # it could still be gone on from
    del fused
    gc.collect()
    assert len(prunable(Store(tmp_path)).objects) == 4


def test_a_closed_session_keeps_nothing(tmp_path: Path) -> None:
    session = session_of(tmp_path)
    session.close()
    session.close()
    assert not prunable(Store(tmp_path)).objects


def test_a_lock_outlives_the_end_of_a_forked_child_and_ends_with_the_last_holder(tmp_path: Path) -> None:
    path = tmp_path / "in-use"
    hold = Hold(path)
    fork = multiprocessing.get_context("fork")
    ended = fork.Process(target=hold.close)
    ended.start()
    ended.join()
    with unshared(path) as alone:
        assert not alone
    release, living = fork.Event(), None
    living = fork.Process(target=release.wait)
    living.start()
    hold.close()
    with unshared(path) as alone:
        assert not alone  # the child has what it had
    release.set()
    living.join()
    with unshared(path) as alone:
        assert alone


HOLDER = """
import sys, time
from pathlib import Path
from optimize.store.locks import Hold

hold = Hold(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_a_killed_program_holds_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "in-use")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"held\n"
            with unshared(tmp_path / "in-use") as alone:
                assert not alone
        finally:
            process.kill()
    with unshared(tmp_path / "in-use") as alone:
        assert alone


def test_archives_that_a_server_serves_stay(tmp_path: Path) -> None:
    store = Store(tmp_path)
    served, other = make_key(n=1), make_key(n=2)
    put(store, served, name="tiny-ptq.mar")
    put(store, other, name="tiny-qat.mar")
    # This process stands for Java.
    state = RunningServer(
        Identity.of(os.getpid(), psutil.Process().cmdline()[0]),
        (ServedModel("mine", "tiny", "ptq"),),
        "mine",
        "torchserve-x",
    )
    state_folder(tmp_path).mkdir()
    write_json(dataclasses.asdict(state), state_folder(tmp_path) / "state.json")
    found = prunable(store)
    assert {folder.name for folder in found.objects} == {other}
    assert found.kept == ("1 archives stay: a server is serving them (run tiny)",)
    gone = dataclasses.replace(state, identity=dataclasses.replace(state.identity, nonce="no such word"))
    write_json(dataclasses.asdict(gone), state_folder(tmp_path) / "state.json")
    assert {folder.name for folder in prunable(store).objects} == {served, other}


# --- the command


def test_the_command_shows_and_does_nothing_where_nobody_can_be_asked(tmp_path: Path) -> None:
    store = Store(tmp_path)
    put(store, KEY, about="resnet18 on digits: ptq")
    result = invoke("prune", "--store", tmp_path)
    assert result.exit_code == 2
    assert result.stdout == "  resnet18 on digits: ptq\n"
    assert "would remove 1 objects" in result.stderr
    assert "--yes" in result.stderr
    assert objects(store) == {KEY}
    result = invoke("prune", "--store", tmp_path, "--yes")
    assert result.exit_code == 0
    assert "removed 1 objects" in result.stdout
    assert not objects(store)
    assert invoke("prune", "--store", tmp_path).stdout == "nothing to remove: every object is used\n"


@pytest.mark.parametrize(("answer", "left"), [("y\n", set()), ("n\n", {KEY})])
def test_the_command_asks_at_a_terminal(tmp_path: Path, answer: str, left: set[str]) -> None:
    store = Store(tmp_path)
    put(store, KEY)
    child, terminal = os.forkpty()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-m", "optimize", "prune", "--store", str(tmp_path)])
    os.write(terminal, answer.encode())
    seen = b""
    try:
        while chunk := os.read(terminal, 4096):
            seen += chunk
    except OSError:  # the child has gone
        pass
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, seen
    assert b"remove 1 objects" in seen
    assert objects(store) == left


def test_the_command_refuses_while_a_program_uses_the_store(tmp_path: Path) -> None:
    store = Store(tmp_path)
    put(store, KEY)
    hold = store.hold()
    result = invoke("prune", "--store", tmp_path, "--yes")
    assert result.exit_code == 2
    assert IN_USE in result.stderr
    assert objects(store) == {KEY}
    hold.close()
    assert json.loads((store.objects / KEY / "object.json").read_text())["key"] == KEY
