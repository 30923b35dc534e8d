"""Which process a server is: what stays true when clocks, namespaces and machines differ, and what is doubted."""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from serve.runtime.errors import UserError
from serve.torchserve import server
from serve.torchserve.process_identity import ALIVE_FILE, Identity, hold, is_held, life_of
from serve.torchserve.state import RunningServer, ServedModel, state_folder


@dataclasses.dataclass(frozen=True)
class Standing:
    """A process that stands for Java: it holds the lock, and its command line has the nonce."""

    store: Path
    folder: Path
    state: RunningServer
    process: subprocess.Popen[bytes]

    def record(self, **changes: object) -> None:
        identity = dataclasses.replace(self.state.identity, **changes)  # type: ignore[arg-type]
        state = dataclasses.replace(self.state, identity=identity)
        (self.folder / "state.json").write_text(json.dumps(dataclasses.asdict(state)))


@pytest.fixture
def standing(tmp_path: Path) -> Iterator[Standing]:
    folder = state_folder(tmp_path)
    folder.mkdir(mode=0o700)
    temporary = tmp_path / "torchserve-of-the-living"
    temporary.mkdir()
    nonce = secrets.token_hex(16)
    alive = hold(folder / ALIVE_FILE)
    words = [sys.executable, "-c", "input()", nonce, str(folder / "config.properties")]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, pass_fds=(alive,))
    os.close(alive)
    while nonce not in " ".join(psutil.Process(process.pid).cmdline()):
        time.sleep(0.01)
    identity = Identity.of(process.pid, nonce)
    state = RunningServer(identity, (ServedModel("small-x", "small", "x"),), "small-x", str(temporary))
    stands = Standing(tmp_path, folder, state, process)
    stands.record()
    try:
        yield stands
    finally:
        process.kill()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()


def test_a_step_of_the_clock_changes_nothing(standing: Standing, monkeypatch: pytest.MonkeyPatch) -> None:
    started = psutil.Process.create_time
    # What psutil says after the clock was put an hour ahead: it adds the ticks since the boot to the boot's time.
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: started(process) + 3600)
    found = server.running(standing.store)
    assert found is not None
    assert found.pid == standing.process.pid


def test_a_server_of_another_pid_namespace_is_running_and_is_not_stopped_from_here(standing: Standing) -> None:
    standing.record(namespace="pid:[1]", pid=7)
    found = server.running(standing.store)
    assert found is not None
    with pytest.raises(UserError, match=r"cannot be stopped from here: it is process 7 in another PID namespace"):
        server.stop(standing.store)
    assert Path(standing.state.temporary).is_dir()
    assert (standing.folder / "state.json").is_file()
    assert standing.process.poll() is None


def test_from_inside_a_pid_namespace_the_server_outside_is_seen_and_left_alone(standing: Standing) -> None:
    words = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*words, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("namespaces cannot be made here")
    ended = subprocess.run(
        [*words, sys.executable, "-m", "serve", "stop", "--store", str(standing.store)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode == 2
    assert "another PID namespace" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert Path(standing.state.temporary).is_dir()
    assert standing.process.poll() is None


def test_a_process_that_cannot_be_looked_into_is_not_taken_for_gone(standing: Standing) -> None:
    standing.record(nonce="what its command line would say, if it could be read")
    with pytest.raises(UserError, match="cannot be inspected: it may belong to another user"):
        server.stop(standing.store)
    assert Path(standing.state.temporary).is_dir()


def test_a_living_server_whose_record_is_lost_is_named_and_nothing_is_cleaned(standing: Standing) -> None:
    (standing.folder / "state.json").write_text('{"pid": 1}')
    archive = standing.store / "small-x.mar"
    archive.touch()
    for act in (
        lambda: server.start(standing.store, {"small-x": archive}),
        lambda: server.stop(standing.store),
    ):
        with pytest.raises(UserError, match=rf"is running \(process {standing.process.pid}\)"):
            act()
    assert Path(standing.state.temporary).is_dir()
    assert (standing.folder / "state.json").is_file()


def test_another_machines_server_is_doubted_and_a_reboot_is_not(standing: Standing) -> None:
    standing.process.kill()
    standing.process.wait()
    standing.record(boot="another", host="another-machine")
    with pytest.raises(UserError, match=r"it was started on another machine, another-machine.*remove .*state\.json"):
        server.stop(standing.store)
    assert Path(standing.state.temporary).is_dir()
    standing.record(boot="another")
    assert server.stop(standing.store) is None
    assert not Path(standing.state.temporary).exists()


def test_a_later_process_of_the_same_number_is_another(standing: Standing) -> None:
    identity = standing.state.identity
    assert life_of(identity, standing.folder) == ("here", "")
    assert dataclasses.replace(identity, ticks=identity.ticks - 1).process() is None
    standing.process.kill()
    standing.process.wait()
    assert life_of(identity, standing.folder) == ("gone", "")


def test_a_lock_lives_as_long_as_who_has_inherited_it(standing: Standing) -> None:
    assert is_held(standing.folder / ALIVE_FILE)
    with pytest.raises(BlockingIOError):
        hold(standing.folder / ALIVE_FILE)
    standing.process.kill()
    standing.process.wait()
    assert not is_held(standing.folder / ALIVE_FILE)


def test_stop_waits_for_a_start_that_is_under_way(standing: Standing) -> None:
    starting = "from serve.torchserve.state import locked; from pathlib import Path; import sys\n"
    starting += "with locked(Path(sys.argv[1])): print(flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", starting, str(standing.store)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdin is not None
    process.stdout.readline()
    ended: list[float] = []

    def end_the_start() -> None:
        assert standing.process.poll() is None, "it was stopped while it was being started"
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        ended.append(time.monotonic())

    with process:
        stopped = server.stop(standing.store, end_the_start)
    assert stopped is not None
    assert len(ended) == 1
    assert standing.process.poll() is not None
