"""The request that most clients send, one image for one model: answered, counted and given up, on real sockets."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import pytest

from serve.asgi.http.application import Application
from serve.asgi.http.server_settings import Settings
from serve.runtime.errors import BrokenError, Refusal
from serve.runtime.service.observation import Observation
from serve.runtime.service.pending_request import Answered
from serve.runtime.service.protocol import Request
from serve.runtime.service.service import QueueFull
from serve.runtime.service.stages import Stages
from serve.runtime.tasks.classification import Label
from tests.serve.stuck import Full, Streams, Stuck, read, settings, started, stuck_model

PATH = b"/predictions/stuck"
PING = b"GET /ping HTTP/1.1\r\nHost: x\r\nX-Request-ID: ping\r\n\r\n"
IMAGE = b"\xff\xd8\xff an image"


class Answering(Stuck):
    """A service that answers at once what ``found`` gives, or fails so: by itself, the length of each image."""

    def __init__(self, found: Callable[[Request], Any] | None = None) -> None:
        super().__init__()
        self._found = found or counted

    def submit(self, request: Request, *, deadline: float | None = None, here: bool = False) -> Future[Any]:
        found = self._found(request)
        future = super().submit(request, deadline=deadline, here=here)
        future.set_running_or_notify_cancel()
        if isinstance(found, Exception):
            future.set_exception(found)
        else:
            future.set_result(found)
        return future


def counted(request: Request, probability: float = 0.5) -> Answered:
    outcomes = tuple(
        image if isinstance(image, Refusal) else [Label("bytes", len(image), probability)] for image in request.images
    )
    return Answered(outcomes, Stages(0.0, 0.0, 0.0, 0.0, 0.0), len(request.images))


@dataclass
class Seen:
    """What was seen of a server.

    ``answers`` are without what no two answers share, ``kept`` what it counted at the end: requests in flight, bytes,
    holders of the model, and requests at the service.
    """

    answers: bytes
    told: list[Observation]
    service: Stuck
    kept: tuple[int, ...]


def post(path: bytes, body: bytes = IMAGE, *headers: bytes, length: int | None = None) -> bytes:
    lines = [b"POST %s HTTP/1.1" % path, b"Host: x", b"X-Request-ID: mine", *headers]
    size = len(body) if length is None else length
    return b"\r\n".join([*lines, b"Content-Length: %d" % size, b"", body])


async def watched(service: Stuck, do: Callable[[Streams], Awaitable[bytes]], told: Settings | None) -> Seen:
    found: list[Observation] = []
    async with started(told or settings(), served := stuck_model(service)) as (_, opened, application):
        application.observers.append(found.append)
        reader, writer = await asyncio.open_connection(*opened.getsockname()[:2])
        answers = await do((reader, writer))
        writer.close()
        for _ in range(300):
            kept = (application.in_flight, application.held.bytes, served._holders, service.waiting)
            if not any(kept):
                break
            await asyncio.sleep(0.01)
    answers = re.sub(rb"date: [^\r]*|server-timing: [^\r]*", b"", answers)
    return Seen(answers, [replace(one, seconds=0.0) for one in found], service, kept)


def seen(service: Stuck, do: Callable[[Streams], Awaitable[bytes]], told: Settings | None = None) -> Seen:
    """What is seen of a server that a client has asked by ``do``; nothing may be kept of it."""
    found = asyncio.run(watched(service, do, told))
    assert found.kept == (0, 0, 0, 0)
    return found


async def whole_answer(reader: asyncio.StreamReader) -> bytes:
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
    length = re.search(rb"content-length: (\d+)", head)
    assert length is not None
    return head + await asyncio.wait_for(reader.readexactly(int(length[1])), 30)


def sent(*headers: bytes, body: bytes = IMAGE) -> Callable[[Streams], Awaitable[bytes]]:
    """Ask once, and then once for the server's health by the same connection."""

    async def do(streams: Streams) -> bytes:
        reader, writer = streams
        writer.write(post(PATH, body, *headers))
        answer = await whole_answer(reader)
        writer.write(PING)
        return answer + await whole_answer(reader)

    return do


@pytest.mark.parametrize(
    ("headers", "status", "kinds"),
    [
        ((), 200, ()),
        ((b"Content-Type: image/png",), 200, ()),
        ((b"Content-Type: APPLICATION/JSON",), 400, ("bad-request",)),
        ((b"Content-Type: \xa0application/json",), 400, ("bad-request",)),
        ((b"Content-Type: multipart/form-data; boundary=x",), 400, ("bad-request",)),
        ((b"Content-Type: \x85multipart/form-data; boundary=x",), 400, ("bad-request",)),
        ((b"X-Top-K: 3",), 200, ()),
        ((b"X-Top-K: none",), 400, ("bad-request",)),
        ((b"X-Request-Deadline-Ms: 0",), 504, ("deadline",)),
        ((b"X-Request-Deadline-Ms: no",), 400, ("bad-request",)),
        ((b"Content-Encoding: gzip",), 415, ("content-encoding",)),
        ((b"Expect: 200-maybe",), 200, ()),
        ((b"Upgrade: h2c", b"Connection: Upgrade"), 200, ()),
    ],
)
def test_each_header_of_a_request_is_heeded(headers: tuple[bytes, ...], status: int, kinds: tuple[str, ...]) -> None:
    found = seen(Answering(), sent(*headers))
    assert found.answers.startswith(b"HTTP/1.1 %d " % status)
    assert (found.told[0].status, found.told[0].refusals) == (status, kinds)
    assert [asked.options for asked in found.service.requests] == (
        [3 if b"X-Top-K: 3" in headers else 5] * (status == 200)
    )


def test_the_very_bytes_are_classified_by_the_models_own_number_of_classes() -> None:
    found = seen(Answering(), sent())
    assert found.service.requests == [Request((IMAGE,), 5, listed=False)]
    assert b'"index": %d' % len(IMAGE) in found.answers
    assert [(told.route, told.model, told.status, told.images) for told in found.told] == [
        ("/predictions/{name}", "stuck", 200, 1),
        ("/ping", None, 200, 0),
    ]


@pytest.mark.parametrize("size", [1, 100_000])
@pytest.mark.parametrize("says", [b"image/jpeg", b"text/plain"])
def test_a_body_that_is_json_is_read_so_whatever_its_headers_say(size: int, says: bytes) -> None:
    body = json.dumps({"instances": [{"b64": "eA=="}, {"b64": "x" * size}]}).encode()
    found = seen(Answering(), sent(b"Content-Type: " + says, body=body))
    assert b'"predictions": [[' in found.answers
    assert [told.images for told in found.told] == [2, 0]


def refuses(error: Exception) -> Callable[[], Stuck]:
    def found(_: Request) -> Answered:
        raise error

    return lambda: Answering(found)


def fails(error: Exception) -> Callable[[], Stuck]:
    return lambda: Answering(lambda _: error)


@pytest.mark.parametrize(
    ("service", "status", "kinds"),
    [
        (refuses(QueueFull("9 requests are already waiting")), 503, ("queue-full",)),
        (refuses(BrokenError("the device is lost")), 500, ("engine",)),
        (refuses(MemoryError()), 503, ("memory",)),
        (fails(ValueError("of a library")), 500, ("engine",)),
        (fails(TimeoutError()), 504, ("timeout",)),
        (lambda: Answering(lambda request: counted(request, float("nan"))), 500, ("fault",)),
        (lambda: Answering(lambda _: counted(Request((Refusal(415, "none"),), 5, listed=False))), 415, ("item-415",)),
        (lambda: Answering(lambda _: counted(Request((Refusal(503, "later"),), 5, listed=False))), 503, ("item-503",)),
    ],
    ids=["queue", "broken", "memory", "engine", "late", "nan", "item", "item-503"],
)
def test_a_failure_is_told_and_counted(service: Callable[[], Stuck], status: int, kinds: tuple[str, ...]) -> None:
    found = seen(service(), sent())
    assert found.answers.startswith(b"HTTP/1.1 %d " % status)
    assert (found.told[0].status, found.told[0].refusals) == (status, kinds)
    assert found.answers.count(b"HTTP/1.1 200 ") == 1, "the connection goes on"


def test_what_the_engine_never_answers_is_given_up() -> None:
    found = seen(Stuck(), sent())
    assert found.answers.startswith(b"HTTP/1.1 504 ")
    assert found.service.futures[0].cancelled()


def test_a_body_that_does_not_come_is_not_waited_for_and_its_rest_is_no_request() -> None:
    async def do(streams: Streams) -> bytes:
        reader, writer = streams
        writer.write(post(PATH, b"abc", length=100))
        answer = await whole_answer(reader)
        writer.write(b"x" * 97 + PING)
        return answer + await whole_answer(reader)

    found = seen(Answering(), do, settings(body_s=0.2))
    assert found.answers.startswith(b"HTTP/1.1 408 ")
    assert b"the body did not arrive within 0.2 s" in found.answers
    assert found.answers.count(b"HTTP/1.1 200 ") == 1


def test_the_time_for_a_body_is_none_for_its_answer() -> None:
    async def do(streams: Streams) -> bytes:
        reader, writer = streams
        message = post(PATH)
        writer.write(message[:-3])
        await asyncio.sleep(0.05)
        writer.write(message[-3:])
        await asyncio.sleep(0.5)
        service.futures[0].set_result(counted(service.requests[0]))
        return await whole_answer(reader)

    service = Stuck()
    assert seen(service, do, settings(body_s=0.2)).answers.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("parts", [1, 3])
def test_what_there_is_no_room_for_is_refused_and_its_rest_is_no_request(parts: int) -> None:
    body = bytes(3000)

    async def do(streams: Streams) -> bytes:
        reader, writer = streams
        message, step = post(PATH, body), -(-len(body) // parts)
        start = len(message) - len(body)
        writer.write(message[: start + step])
        for place in range(start + step, len(message), step):
            await asyncio.sleep(0.05)
            writer.write(message[place : place + step])
        answer = await whole_answer(reader)
        writer.write(PING)
        return answer + await whole_answer(reader)

    found = seen(Answering(), do, settings(held_bytes=1500))
    assert found.answers.startswith(b"HTTP/1.1 503 ")
    assert found.told[0].refusals == ("memory",)
    assert not found.service.requests


@pytest.mark.parametrize("part", [5, len(IMAGE)])
def test_nothing_is_computed_or_kept_for_a_client_that_has_gone(part: int) -> None:
    async def do(streams: Streams) -> bytes:
        _, writer = streams
        writer.write(post(PATH, IMAGE[:part], length=len(IMAGE)))
        await asyncio.sleep(0.1)
        writer.transport.abort()
        await asyncio.sleep(0.1)
        return b""

    found = seen(Stuck(), do)
    assert [(told.status, told.refusals) for told in found.told] == [(499, ("client-gone",))]
    assert all(future.cancelled() for future in found.service.futures)


def test_requests_that_are_sent_at_once_are_answered_in_their_order() -> None:
    bodies = [b"x" * size for size in (1, 300_000, 2, 70_000, 3)]

    async def do(streams: Streams) -> bytes:
        reader, writer = streams
        writer.write(b"".join(post(PATH, body) for body in bodies) + PING)
        return b"".join([await whole_answer(reader) for _ in range(len(bodies) + 1)])

    found = seen(Answering(), do)
    assert [int(index) for index in re.findall(rb'"index": (\d+)', found.answers)] == [1, 300_000, 2, 70_000, 3]
    assert found.answers.endswith(b'{"status": "Healthy"}')


def test_what_comes_behind_a_request_waits_for_its_answer() -> None:
    async def do(streams: Streams) -> bytes:
        reader, writer = streams
        writer.write(post(PATH))
        await asyncio.sleep(0.05)
        writer.write(PING)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.2)
        service.futures[0].set_result(counted(service.requests[0]))
        return await whole_answer(reader) + await whole_answer(reader)

    service = Stuck()
    answers = seen(service, do).answers
    assert answers.index(b'"index": %d' % len(IMAGE)) < answers.index(b"Healthy")


def test_a_server_that_ends_answers_and_says_that_the_connection_is_closed() -> None:
    async def ask() -> bytes:
        service = Stuck()
        async with started(settings(), stuck_model(service)) as (server, opened, application):
            reader, writer = await asyncio.open_connection(*opened.getsockname()[:2])
            writer.write(post(PATH))
            while not service.futures:
                await asyncio.sleep(0.01)
            application.draining = server.should_exit = True
            await asyncio.sleep(0.2)
            service.futures[0].set_result(counted(service.requests[0]))
            answer = await read(reader)
            writer.close()
        return answer

    answer = asyncio.run(ask())
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.count(b"connection: close") == 1
    assert answer.endswith(b"}]")


def test_in_whatever_parts_requests_come_they_are_answered_the_same() -> None:
    drawn = random.Random(0)

    async def do(streams: Streams) -> list[int]:
        reader, writer = streams
        size = drawn.randint(1, 300)
        message = post(PATH, b"y" * size) + post(PATH, b"z" * (size + 1)) + PING
        cuts = sorted(drawn.randint(0, len(message)) for _ in range(drawn.randint(0, 8)))
        for start, end in itertools.pairwise([0, *cuts, len(message)]):
            writer.write(message[start:end])
            await asyncio.sleep(0.002)
        answers = b"".join([await whole_answer(reader) for _ in range(3)])
        writer.close()
        assert answers.endswith(b'"Healthy"}')
        return [int(index) - size for index in re.findall(rb'"index": (\d+)', answers)]

    async def ask() -> list[list[int]]:
        async with started(settings(), stuck_model(Answering())) as (_, opened, application):
            address = opened.getsockname()[:2]
            found = [await do(await asyncio.open_connection(*address)) for _ in range(200)]
            assert application.in_flight == application.held.bytes == 0
        return found

    assert asyncio.run(ask()) == [[0, 1]] * 200


class Watched(list[Label]):
    """An outcome that knows in which threads it was read."""

    def __init__(self, labels: list[Label], threads: set[int]) -> None:
        super().__init__(labels)
        self._threads = threads

    def __iter__(self) -> Iterator[Label]:
        self._threads.add(threading.get_ident())
        return super().__iter__()


@pytest.mark.parametrize("k", [5, 5000])
def test_an_answer_that_takes_long_to_write_is_written_in_a_thread(k: int) -> None:
    """One of so many classes is; what it has here is one."""

    async def ask() -> bool:
        threads: set[int] = set()
        stages = Stages(0.0, 0.0, 0.0, 0.0, 0.0)
        service = Answering(lambda _: Answered((Watched([Label("one", 0, 0.5)], threads),), stages, 1))
        served = stuck_model(service)
        served.serving = replace(served.serving, k=k)
        async with started(settings(), served) as (_, opened, _):
            reader, writer = await asyncio.open_connection(*opened.getsockname()[:2])
            writer.write(post(PATH))
            assert b'"one"' in await whole_answer(reader)
            writer.close()
        (thread,) = threads
        return thread == threading.get_ident()

    assert asyncio.run(ask()) == (k == 5)


def test_a_server_that_ends_while_json_comes_says_that_the_connection_is_closed() -> None:
    async def ask() -> bytes:
        message = post(PATH, b'{"instances": [{"b64": "eA=="}]}')
        async with started(settings(), stuck_model(Answering())) as (server, opened, _):
            reader, writer = await asyncio.open_connection(*opened.getsockname()[:2])
            writer.write(message[:-3])
            await asyncio.sleep(0.1)
            server.should_exit = True
            await asyncio.sleep(0.3)
            writer.write(message[-3:])
            answer = await asyncio.wait_for(whole_answer(reader), 10)
            writer.close()
        return answer

    assert asyncio.run(ask()).count(b"connection: close") == 1


def test_what_is_not_answered_when_the_time_for_the_servers_end_is_over_is_told_so() -> None:
    async def ask(part: int) -> bytes:
        service = Stuck()
        served = stuck_model(service)
        served.serving = replace(served.serving, response_timeout_s=60)
        async with started(replace(settings(), drain_s=1), served) as (server, opened, application):
            reader, writer = await asyncio.open_connection(*opened.getsockname()[:2])
            writer.write(post(PATH, IMAGE[:part], length=len(IMAGE)))
            await asyncio.sleep(0.1)
            server.should_exit = True
            answer = await read(reader)
            writer.close()
            assert not application.in_flight
            assert all(future.cancelled() for future in service.futures)
        return answer

    for part in (3, len(IMAGE)):
        answer = asyncio.run(ask(part))
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"connection: close" in answer


def test_blank_lines_behind_a_request_are_none() -> None:
    async def do(streams: Streams) -> bytes:
        reader, writer = streams
        writer.write(post(PATH) + b"\r\n\r\n")
        answer = await whole_answer(reader)
        await asyncio.sleep(0.4)
        writer.write(PING)
        return answer + await whole_answer(reader)

    found = seen(Answering(), do, settings(head_s=0.2))
    assert found.answers.count(b"HTTP/1.1 200 ") == 2


@pytest.mark.parametrize("behind", [b"\r\n", b"POST / HTTP/1.1\r\nHost"])
def test_that_a_client_goes_is_seen_though_something_came_behind_its_request(behind: bytes) -> None:
    async def do(streams: Streams) -> bytes:
        _, writer = streams
        writer.write(post(PATH) + behind)
        await asyncio.sleep(0.1)
        writer.transport.abort()
        await asyncio.sleep(0.1)
        return b""

    found = seen(Stuck(), do)
    assert [told.status for told in found.told] == [499]


def test_what_comes_without_end_behind_a_request_is_not_taken_in() -> None:
    size = 50_000_000

    async def ask() -> int:
        async with started(settings(), stuck_model(Stuck())) as (_, opened, _):
            _, writer = await asyncio.open_connection(*opened.getsockname()[:2])
            writer.write(post(PATH) + post(PATH, bytes(size)))
            await asyncio.sleep(0.5)
            left = writer.transport.get_write_buffer_size()
            writer.transport.abort()
        return left

    assert asyncio.run(ask()) > size * 0.8, "the rest is in the buffers of the two sockets"


@pytest.mark.parametrize("service", [Full, Answering])
def test_a_connection_lives_while_the_rest_of_a_refused_body_comes(service: Callable[[], Stuck]) -> None:
    async def do(streams: Streams) -> bytes:
        reader, writer = streams
        writer.write(post(PATH, b"x" * 200, length=1000))
        answer = await whole_answer(reader)
        for _ in range(8):
            await asyncio.sleep(0.2)
            writer.write(b"x" * 100)
        await asyncio.sleep(0.2)
        writer.write(PING)
        return answer + await whole_answer(reader)

    found = seen(service(), do, settings(keep_alive_s=1, held_bytes=100))
    assert found.answers.startswith(b"HTTP/1.1 503 ")


def test_a_request_that_cannot_be_answered_does_not_keep_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    def headers(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(Application, "headers", headers)

    async def do(streams: Streams) -> bytes:
        reader, writer = streams
        writer.write(post(PATH))
        return await read(reader, 5)

    assert len(seen(Answering(), do).told) == 1
