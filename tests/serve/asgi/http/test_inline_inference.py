"""The event loop computes for who asks alone, one by one, of a quick model; on real sockets."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from serve.asgi.http import inline_inference
from serve.asgi.http.http_server import Loop
from serve.asgi.http.listen_sockets import Listening
from serve.asgi.http.server_settings import Settings
from serve.asgi.process import server_process, watchdog
from serve.asgi.process.serving_plan import Wanted
from serve.runtime.errors import EngineError
from serve.runtime.service.observation import Observation
from serve.runtime.service.protocol import Request
from serve.runtime.service.service import Service
from tests.serve import artifacts
from tests.serve.asgi.http.test_one_image_request import IMAGE, PING, counted, post, whole_answer
from tests.serve.runtime.service.test_service import gated
from tests.serve.stuck import Connect, Streams, Stuck, listening, settings, stand_in, stuck_model

PATH = b"/predictions/stuck"


class Quick(Stuck):
    """A service that answers at once where it may compute in its caller's thread, and else when `later` does."""

    def __init__(self, here_s: float = 0.001) -> None:
        super().__init__()
        self.here_s = here_s
        self.here: list[bool] = []
        self.meanwhile: Callable[[], object] = lambda: None

    def submit(self, request: Request, *, deadline: float | None = None, here: bool = False) -> Future[Any]:
        future = super().submit(request, deadline=deadline, here=here)
        self.here.append(here)
        if here:
            self.meanwhile()
            future.set_result(counted(request))
        return future

    def later(self) -> None:
        for future, request in zip(self.futures, self.requests, strict=True):
            if not future.done():
                future.set_result(counted(request))


def asking(
    service: Stuck | Service, do: Callable[[Connect], Awaitable[Any]], observer: Any = lambda observation: None
) -> Any:
    async def run() -> Any:
        async with listening(settings(), stuck_model(service)) as (connect, application):
            application.observers.append(observer)
            opened: list[Streams] = []

            async def kept() -> Streams:
                opened.append(await connect())
                return opened[-1]

            try:
                found = await asyncio.wait_for(do(kept), 20)
            finally:
                for _, writer in opened:
                    writer.close()
            assert (application.in_flight, application.held.bytes, application.inline.job) == (0, 0, None)
            return found

    with asyncio.Runner(loop_factory=Loop) as runner:
        return runner.run(run())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_one_client_that_asks_one_by_one_is_answered_without_another_thread() -> None:
    service = Quick()

    async def do(connect: Connect) -> list[bytes]:
        reader, writer = await connect()
        answers = []
        for number in range(5):
            writer.write(post(PATH, IMAGE + b"x" * number))
            answers.append(await whole_answer(reader))
            writer.write(PING)
            await whole_answer(reader)
        other_reader, other_writer = await connect()
        other_writer.write(post(PATH, IMAGE + b"x" * 5))
        answers.append(await whole_answer(other_reader))
        return answers

    answers = asking(service, do)
    assert [b'"index": %d,' % (len(IMAGE) + number) in answer for number, answer in enumerate(answers)] == [True] * 6
    assert service.here == [True] * 6


@pytest.mark.parametrize(
    ("here_s", "body"),
    [
        (0.5, IMAGE),
        (math.inf, IMAGE),
        (0.001, b"II*\0 a TIFF"),
        (0.001, json.dumps({"instances": [{"b64": base64.b64encode(IMAGE).decode()}] * 2}).encode()),
    ],
    ids=["slow", "bound to its thread", "no JPEG", "several"],
)
def test_what_others_would_wait_for_is_left_to_the_models_thread(here_s: float, body: bytes) -> None:
    service = Quick(here_s)

    async def do(connect: Connect) -> bytes:
        reader, writer = await connect()
        writer.write(post(PATH, body))
        await until(lambda: bool(service.futures))
        service.later()
        return await whole_answer(reader)

    assert b"200 OK" in asking(service, do)
    assert service.here == [False]


def test_two_that_ask_at_once_are_left_to_its_thread_and_for_a_while_after(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Quick()
    monkeypatch.setattr(inline_inference, "_CONCURRENT_PAUSE_S", 60.0)

    async def do(connect: Connect) -> None:
        reader, writer = await connect()
        other_reader, other_writer = await connect()
        half = len(post(PATH)) - 3
        other_writer.write(post(PATH)[:half])  # it is being received
        await asyncio.sleep(0.05)
        writer.write(post(PATH))
        await until(lambda: len(service.futures) == 1)
        other_writer.write(post(PATH)[half:])
        await until(lambda: len(service.futures) == 2)
        service.later()
        await asyncio.gather(whole_answer(reader), whole_answer(other_reader))
        writer.write(post(PATH))
        await until(lambda: len(service.futures) == 3)
        service.later()
        await whole_answer(reader)
        assert service.here == [False] * 3
        monkeypatch.setattr(inline_inference, "_CONCURRENT_PAUSE_S", 0.0)
        writer.write(post(PATH))
        await whole_answer(reader)

    asking(service, do)
    assert service.here == [False] * 3 + [True]


def test_one_that_came_while_the_loop_was_computing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Quick()
    monkeypatch.setattr(inline_inference, "_CONCURRENT_PAUSE_S", 60.0)

    async def do(connect: Connect) -> None:
        reader, writer = await connect()
        other_reader, other_writer = await connect()
        sending = other_writer.get_extra_info("socket").fileno()
        service.meanwhile = lambda: os.write(sending, post(PATH))
        writer.write(post(PATH))
        await whole_answer(reader)
        await until(lambda: len(service.futures) == 2)
        service.later()
        await whole_answer(other_reader)

    asking(service, do)
    assert service.here == [True, False]


def test_of_what_a_client_sends_at_once_the_loop_computes_no_more_than_the_last() -> None:
    service = Quick()

    async def do(connect: Connect) -> list[bytes]:
        reader, writer = await connect()
        writer.write(b"".join(post(PATH, IMAGE + b"x" * number) for number in range(3)))
        for count in (1, 2):
            await until(lambda count=count: len(service.futures) == count)  # type: ignore[misc]
            service.later()
        return [await whole_answer(reader) for _ in range(3)]

    answers = asking(service, do)
    assert [b'"index": %d,' % (len(IMAGE) + number) in answer for number, answer in enumerate(answers)] == [True] * 3
    assert service.here == [False, False, True]


@pytest.mark.parametrize("here_s", [0.001, 0.5])
def test_observers_are_told_when_the_client_has_its_answer(here_s: float) -> None:
    service, answered, told = Quick(here_s), threading.Event(), list[tuple[int, bool]]()

    def observe(observation: Observation) -> None:
        told.append((observation.status, answered.wait(20)))  # the loop does nothing else meanwhile

    async def do(connect: Connect) -> None:
        reader, writer = await connect()
        client = writer.get_extra_info("socket").dup()
        client.setblocking(True)

        def read() -> None:
            client.recv(1)
            answered.set()

        reader._transport.pause_reading()  # type: ignore[attr-defined]
        reading = threading.Thread(target=read)
        reading.start()
        writer.write(post(PATH))
        if here_s > 0.1:
            await until(lambda: bool(service.futures))
            service.later()
        await until(lambda: bool(told))
        reading.join(30)
        client.close()

    asking(service, do, observe)
    assert told == [(200, True)]


@pytest.mark.parametrize("most_s", [0.3, 8.0])
def test_a_loop_that_hangs_in_an_engine_ends_the_process(most_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    ended, left, asked, threads = threading.Event(), list[int](), list[threading.Thread](), list[int]()

    def leave(status: int) -> None:
        left.append(status)
        service.broken = "the test is over"
        ended.set()

    def hang() -> None:
        threads.append(torch.get_num_threads())
        assert ended.wait(60)

    service = Quick()
    service.meanwhile = hang
    torch.set_num_threads(2)
    stand_in(monkeypatch, service)
    monkeypatch.setattr(watchdog, "_GRACE_S", 0.5)
    monkeypatch.setattr(server_process, "_LONGEST_INLINE_S", most_s)
    monkeypatch.setattr("serve.asgi.process.server_process.os._exit", leave)

    def say(line: str) -> None:
        if line.startswith("ready: "):
            url = f"{line.removeprefix('ready: ')}/predictions/stuck"
            asked.append(threading.Thread(target=lambda: httpx.post(url, content=IMAGE, timeout=60, trust_env=False)))
            asked[0].start()

    with pytest.raises(EngineError, match="the server ends, to be restarted"):
        server_process.run(
            Settings(listening=Listening(port=0), drain_s=1), lambda: [Wanted("stuck", "1.0", Path())], say
        )
    asked[0].join()
    assert (set(left), service.here) == ({1}, [True])  # it goes on looking, where it would have ended
    assert threads == [1], "a team of threads for the loop would take the engine's cores"


def test_the_networks_answer_is_that_of_its_own_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with gated(artifacts.onnx(tmp_path / "onnx", device="cpu")) as (service, gate):
        answers: list[bytes] = []

        async def do(connect: Connect) -> None:
            reader, writer = await connect()
            for most_s in (inline_inference._QUICK_S, 0.0):
                monkeypatch.setattr(inline_inference, "_QUICK_S", most_s)
                while not service._queues._idle:
                    await asyncio.sleep(0.001)
                gate.threads.clear()
                writer.write(post(PATH, artifacts.jpeg(1)))
                answers.append(await whole_answer(reader))
                assert (gate.threads == {threading.get_ident()}) == (most_s > 0)

        asking(service, do)
    first, second = ([line for line in answer.split(b"\r\n") if b"-timing" not in line] for answer in answers)
    assert first == second
    assert b"probability" in first[-1]
