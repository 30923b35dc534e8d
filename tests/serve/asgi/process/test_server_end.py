"""When the process of the own server ends, and what it leaves behind."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve.archive.verification import Policy
from serve.asgi.http.listen_sockets import Listening
from serve.asgi.http.served_models import Models, Served
from serve.asgi.http.server_settings import Settings
from serve.asgi.process import server_process, watchdog
from serve.asgi.process.group_member import Failed, Member
from serve.asgi.process.model_updates import ModelUpdates
from serve.asgi.process.serving_plan import Wanted
from serve.runtime.errors import EngineError, UserError
from tests.serve.stuck import PING, Stuck, settings, stand_in, started, stuck_model


def test_when_a_device_is_lost_the_process_ends_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    service: Any = Stuck()
    stand_in(monkeypatch, service)
    wanted = Wanted("stuck", "1.0", Path("stuck.mar"))

    def said(line: str) -> None:
        if line.startswith("ready"):
            service.broken = "CUDA error: device-side assert"

    with pytest.raises(EngineError, match="stuck: CUDA error: device-side assert: the server ends"):
        server_process.run(Settings(listening=Listening(port=0), drain_s=1), lambda: [wanted], said)


def test_while_it_serves_who_waits_for_pythons_lock_gets_it_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoders and engine wait for it behind the event loop, which under overload has something to do all the time."""
    service: Any = Stuck()
    stand_in(monkeypatch, service)
    intervals: list[float] = []

    def said(line: str) -> None:
        if line.startswith("ready"):
            intervals.append(sys.getswitchinterval())
            service.broken = "the test is over"

    before = sys.getswitchinterval()
    with pytest.raises(EngineError, match="the test is over"):
        server_process.run(
            Settings(listening=Listening(port=0), drain_s=1), lambda: [Wanted("stuck", "1.0", Path("stuck.mar"))], said
        )
    (serving,) = intervals
    assert serving <= before / 10
    assert sys.getswitchinterval() == before


def test_a_model_that_no_engine_runs_stops_the_start_or_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    service: Any = Stuck()

    def load(wanted: Wanted, **_: Any) -> Served:
        if wanted.name == "gpu-only":
            raise EngineError("gpu-only: it needs a GPU, and none was assigned to this worker")
        return stuck_model(service)

    monkeypatch.setattr("serve.asgi.process.model_updates.load", load)
    monkeypatch.setattr(server_process._Process, "_loaded", lambda *_: None)
    monkeypatch.setattr(watchdog, "LOOK_S", 0.05)
    wanted = [Wanted(name, "1.0", Path(f"{name}.mar")) for name in ("stuck", "gpu-only")]
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        if line.startswith("ready"):
            service.broken = "the test is over"

    with pytest.raises(EngineError, match="gpu-only: it needs a GPU"):
        server_process.run(Settings(listening=Listening(port=0), drain_s=1), lambda: wanted, say)
    with pytest.raises(EngineError, match="the test is over"):
        server_process.run(Settings(listening=Listening(port=0), drain_s=1, leave_out=True), lambda: wanted, say)
    assert "left out: gpu-only 1.0: gpu-only: it needs a GPU, and none was assigned to this worker" in lines


def test_what_an_engine_does_not_answer_is_given_up_and_an_engine_that_hangs_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Hanging(Stuck):
        def submit(self, request: Any, *, deadline: float | None = None, here: bool = False) -> Future[Any]:
            future = super().submit(request, deadline=deadline, here=here)
            future.set_running_or_notify_cancel()  # it cannot be cancelled any more
            return future

    class ExitedError(Exception):
        pass

    def leave(status: int) -> None:
        raise ExitedError(status)

    service = Hanging()
    stand_in(monkeypatch, service)
    monkeypatch.setattr(watchdog, "_GRACE_S", 0.5)
    monkeypatch.setattr("serve.asgi.process.server_process.os._exit", leave)
    answers: list[httpx.Response] = []
    asking: list[threading.Thread] = []

    def say(line: str) -> None:
        if line.startswith("ready: "):
            url = f"{line.removeprefix('ready: ')}/predictions/stuck"
            asking.append(threading.Thread(target=lambda: answers.append(httpx.post(url, content=b"x", timeout=20))))
            asking[0].start()

    with pytest.raises(ExitedError, match="1"):
        server_process.run(
            Settings(listening=Listening(port=0), drain_s=1), lambda: [Wanted("stuck", "1.0", Path())], say
        )
    asking[0].join()
    assert answers[0].status_code == 504
    assert "did not answer within 1 s" in answers[0].json()["error"]


def test_a_pause_of_the_process_is_not_an_engine_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of SIGSTOP, a container or a machine that is stopped: for as long, nothing runs."""
    monkeypatch.setattr(watchdog, "LOOK_S", 0.05)
    monkeypatch.setattr(watchdog, "_GRACE_S", 0.5)
    service: Any = Stuck()

    async def run() -> bool:
        watching = server_process._Process(settings(), list, lambda _: None)
        watching._models = Models()
        watching._models.replace({"stuck": [stuck_model(service)]})
        looking = asyncio.ensure_future(watching._watch())
        service.submit(None)
        await asyncio.sleep(0.2)
        time.sleep(2)  # of the response timeout and the grace, 1.5 s, most is left behind it
        await asyncio.sleep(0.2)
        survived = not watching._ending.is_set()
        await asyncio.wait_for(looking, 10)  # what hangs without a pause is found still
        assert watching._hangs
        return survived

    assert asyncio.run(run())


class Hung(Stuck):
    """A service whose engine hangs: closed, its thread does not end before it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def submit(self, request: Any, *, deadline: float | None = None, here: bool = False) -> Future[Any]:
        future = super().submit(request, deadline=deadline, here=here)
        future.set_running_or_notify_cancel()
        return future

    def drain(self, timeout_s: float) -> bool:
        return not self.waiting

    def close(self) -> None:
        if self.waiting:
            self.released.wait(30)


def changing(*served: Served, drain_s: float) -> ModelUpdates:
    models = Models()
    models.replace({entry.name: [entry] for entry in served})
    return ModelUpdates(
        models,
        gpu=None,
        queue=None,
        policy=Policy(),
        drain_s=drain_s,
        on_loaded=lambda *_: None,
        on_left_out=lambda *_: None,
    )


def test_the_end_waits_no_longer_for_a_version_that_was_replaced_and_hangs() -> None:
    service: Any = Hung()
    service.submit(None)
    old = stuck_model(service)

    async def run() -> tuple[float, bool, bool]:
        ending = changing(old, drain_s=20)
        with old.held():  # a request of it is open
            await ending.change([])
            begun = time.monotonic()
            answered = await ending.end(0.3)
            took = time.monotonic() - begun
            for task in ending._closings:
                task.cancel()
        return took, answered, ending.left_open

    took, answered, left_open = asyncio.run(run())
    assert (took < 10, answered, left_open) == (True, False, False)


def test_an_engine_that_hangs_in_a_version_that_is_gone_is_known_to_be_left_open() -> None:
    service: Any = Hung()
    service.submit(None)

    async def run() -> tuple[bool, bool]:
        ending = changing(stuck_model(service), drain_s=0.1)
        await ending.change([])
        while not ending.left_open:
            await asyncio.sleep(0.01)
        return await ending.end(5), ending.left_open

    assert asyncio.run(run()) == (True, True)
    service.released.set()


def test_a_process_of_several_tells_why_it_leaves_beside_an_engine_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    class ExitedError(Exception):
        pass

    def leave(status: int) -> None:
        raise ExitedError(status)

    monkeypatch.setattr("serve.asgi.process.server_process.os._exit", leave)
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        leaving = server_process._Process(settings(), list, lambda _: None, Member(0, 2, 1, None, theirs, Path()))
        leaving._failure = EngineError("m: it hangs")
        with pytest.raises(ExitedError, match="1"):
            leaving._exit(1)
        assert ours.recv() == Failed("m: it hangs", users=False)


def test_told_to_end_while_it_opens_a_model_it_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class ExitedError(Exception):
        pass

    def leave(status: int) -> None:
        opening.set()  # so that the test's own thread ends
        raise ExitedError(status)

    opening = threading.Event()

    def load(*_: Any, **__: Any) -> Served:
        opening.wait(30)
        return stuck_model(Stuck())

    def say(line: str) -> None:
        if line.startswith("serving"):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("serve.asgi.process.model_updates.load", load)
    monkeypatch.setattr("serve.asgi.process.server_process.os._exit", leave)
    with pytest.raises(ExitedError, match="0"):
        server_process.run(
            Settings(listening=Listening(port=0), drain_s=1), lambda: [Wanted("stuck", "1.0", Path())], say
        )


def test_told_to_end_while_it_changes_models_it_does_not_wait_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class ExitedError(Exception):
        pass

    def leave(status: int) -> None:
        opening.set()
        raise ExitedError(status)

    opening = threading.Event()
    wanted = [Wanted("stuck", "1.0", Path())]

    def load(entry: Wanted, **_: Any) -> Served:
        if entry.version == "2.0":
            os.kill(os.getpid(), signal.SIGTERM)
            opening.wait(10)
        return stuck_model(Stuck())

    def say(line: str) -> None:
        if line.startswith("ready"):
            wanted[:] = [Wanted("stuck", "2.0", Path())]
            os.kill(os.getpid(), signal.SIGHUP)

    monkeypatch.setattr("serve.asgi.process.model_updates.load", load)
    monkeypatch.setattr("serve.asgi.process.server_process.os._exit", leave)
    monkeypatch.setattr(server_process._Process, "_loaded", lambda *_: None)
    with pytest.raises(ExitedError, match="0"):
        server_process.run(Settings(listening=Listening(port=0), drain_s=1), lambda: list(wanted), say)


def test_told_twice_to_look_again_it_serves_what_was_said_last() -> None:
    """Though the first reading take longer than the second."""
    asked: list[str] = []
    changed: list[str] = []

    def wanted() -> list[Wanted]:
        asked.append(str(len(asked)))
        mine = asked[-1]
        if mine == "0":
            time.sleep(0.5)
        return [Wanted("m", mine, Path())]

    class Noting:
        async def change(self, told: list[Wanted], *, leave_out: bool) -> None:
            changed.append(told[0].version)

    async def run() -> None:
        looking = server_process._Process(settings(), wanted, lambda _: None)
        looking._updates = Noting()  # type: ignore[assignment]
        looking._models = Models()
        looking._begun.set()
        await asyncio.gather(looking._reload(), looking._reload())

    asyncio.run(run())
    assert changed == ["0", "1"]


def test_told_to_look_again_while_it_loads_it_is_not_ready_before_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service: Any = Stuck()
    stand_in(monkeypatch, service)
    asked: list[bool] = []

    def wanted() -> list[Wanted]:
        asked.append(True)
        if len(asked) == 1:
            return [Wanted("stuck", "1.0", Path())]
        service.broken = "the test is over"
        raise UserError("the file of models is gone")

    def load(*_: Any, **__: Any) -> Served:
        os.kill(os.getpid(), signal.SIGHUP)
        time.sleep(0.5)
        return stuck_model(service)

    monkeypatch.setattr("serve.asgi.process.model_updates.load", load)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        with pytest.raises(EngineError, match="the test is over"):
            server_process.run(Settings(listening=Listening(port=0), drain_s=1), wanted, lambda _: None)
        assert systemd.recv(100) == b"READY=1"
        assert systemd.recv(100).startswith(b"RELOADING=1\n")


def test_a_connection_that_waits_to_be_accepted_when_the_server_ends_is_answered() -> None:
    async def end() -> bytes:
        async with started(settings()) as (server, opened, _):
            # The kernel accepts it; while this runs, the server's loop does not.
            with socket.create_connection(opened.getsockname()) as client:
                client.sendall(PING)
                await server.stop(opened)
                client.settimeout(5)
                return await asyncio.to_thread(client.recv, 4096)

    assert asyncio.run(end()).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("listens", [True, False])
def test_the_socket_of_another_server_at_its_path_outlives_it(
    listens: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it ends after it has listened, or before."""
    service: Any = Stuck()
    stand_in(monkeypatch, service)
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as other:

        def take_the_place() -> None:
            path.unlink()
            other.bind(str(path))
            service.broken = "the test is over"

        def said(line: str) -> None:
            if line.startswith("ready"):
                take_the_place()

        def not_begun(*_: Any) -> Any:
            take_the_place()
            raise EngineError("the test is over")

        if not listens:
            monkeypatch.setattr(server_process, "build", not_begun)
        with pytest.raises(EngineError, match="the test is over"):
            server_process.run(
                Settings(listening=Listening(path=path), drain_s=1), lambda: [Wanted("stuck", "1.0", Path())], said
            )
        assert path.exists()


def test_its_own_socket_a_server_takes_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service: Any = Stuck()
    stand_in(monkeypatch, service)
    path = tmp_path / "socket"
    seen: list[bool] = []

    def said(line: str) -> None:
        if line.startswith("ready"):
            seen.append(path.is_socket())
            service.broken = "the test is over"

    with pytest.raises(EngineError, match="the test is over"):
        server_process.run(
            Settings(listening=Listening(path=path), drain_s=1), lambda: [Wanted("stuck", "1.0", Path())], said
        )
    assert [*seen, path.exists()] == [True, False]
