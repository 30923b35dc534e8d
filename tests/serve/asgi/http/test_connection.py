"""What a client cannot keep for nothing, on real sockets: connections, headers, work that nobody waits for."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import itertools
import json
import os
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from serve.asgi.http import http_server
from serve.asgi.http.application import Application
from serve.asgi.http.call import Call, Limits
from serve.asgi.http.connection import GuardedConnection
from serve.asgi.http.listen_sockets import Listening
from serve.asgi.http.messages import Response
from serve.asgi.http.server_settings import Settings
from serve.runtime.service.observation import Observation
from tests.serve.stuck import PING, Connect, Full, Streams, Stuck, listening, read, settings, stuck_model


def test_a_full_queue_is_told_before_the_body_is_sent_and_the_connection_goes_on() -> None:
    async def ask() -> tuple[bytes, bytes]:
        async with listening(settings(), stuck_model(Full())) as (connect, _):
            reader, writer = await connect()
            writer.write(b"POST /predictions/stuck HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n")
            refused = await asyncio.wait_for(reader.readuntil(b'later"}'), 30)
            writer.write(b"x" * 100000 + PING)
            after = await asyncio.wait_for(reader.readuntil(b"}"), 30)
            writer.close()
        return refused, after

    refused, after = asyncio.run(ask())
    assert refused.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1" in refused
    assert b"stuck: 256 requests are already waiting" in refused
    assert after.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("path", ["/predictions/stuck", "/predictions/stuck/1.0"])
def test_that_a_queue_is_full_is_told_and_counted_as_the_routes_tell_it(path: str) -> None:
    seen: list[Observation] = []

    async def ask() -> list[bytes]:
        async with listening(settings(), stuck_model(Full())) as (connect, application):
            application.observers.append(seen.append)
            reader, writer = await connect()
            answers = []
            # A name with a percent sign is the router's.
            for asked in (path, path.replace("stuck", "%73tuck")):
                writer.write(f"PUT {asked} HTTP/1.1\r\nHost: x\r\nX-Request-ID: mine\r\n".encode())
                writer.write(b"Content-Length: 3\r\n\r\nabc")
                answers.append(await asyncio.wait_for(reader.readuntil(b'later"}'), 30))
            writer.close()
        return [b"\n".join(line for line in answer.split(b"\n") if not line.startswith(b"date")) for answer in answers]

    early, routed = asyncio.run(ask())
    assert early == routed
    assert b"x-request-id: mine\r\nx-model-version: 1.0\r\n" in early
    early_told, routed_told = (dataclasses.replace(told, seconds=0.0) for told in seen)
    assert early_told == routed_told
    assert (early_told.status, early_told.refusals) == (503, ("queue-full",))


def test_nobody_is_told_of_a_queue_without_a_token(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("t" * 16)
    path.chmod(0o600)

    async def ask() -> list[bytes]:
        told = Settings(listening=Listening(port=0), token_file=path)
        async with listening(told, stuck_model(Full())) as (connect, _):
            answers = []
            for token in (b"no", b"t" * 16):
                reader, writer = await connect()
                head = b"POST /predictions/stuck HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n" % token
                writer.write(head + b"Content-Length: 9\r\n\r\n")
                answers.append(await asyncio.wait_for(reader.readline(), 30))
                writer.close()
        return answers

    assert [answer[9:12] for answer in asyncio.run(ask())] == [b"401", b"503"]


def test_who_sends_all_before_it_reads_that_the_queue_is_full_reads_it() -> None:
    body = bytes(8_000_000)

    async def ask() -> bytes:
        async with listening(settings(), stuck_model(Full())) as (connect, _):
            reader, writer = await connect()
            writer.write(b"POST /predictions/stuck HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body))
            for start in range(0, len(body), 1_000_000):
                writer.write(body[start : start + 1_000_000])
                await writer.drain()
                await asyncio.sleep(0.01)
            answer = await asyncio.wait_for(reader.readuntil(b'later"}'), 30)
            writer.close()
        return answer

    assert asyncio.run(ask()).startswith(b"HTTP/1.1 503 ")


def test_who_sends_all_before_it_reads_that_there_is_no_such_path_can_send_it_all() -> None:
    part = bytes(500_000)

    async def ask() -> tuple[bytes, bytes]:
        async with listening(settings(), stuck_model(Stuck())) as (connect, _):
            reader, writer = await connect()
            writer.write(b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (40 * len(part)))
            for _ in range(40):
                writer.write(part)
                await asyncio.wait_for(writer.drain(), 3)  # less than the connection would linger
                await asyncio.sleep(0.005)
            refused = await asyncio.wait_for(reader.readuntil(b"}"), 3)
            writer.write(PING)
            after = await asyncio.wait_for(reader.readuntil(b"}"), 3)
            writer.close()
        return refused, after

    refused, after = asyncio.run(ask())
    assert refused.startswith(b"HTTP/1.1 404 ")
    assert after.startswith(b"HTTP/1.1 200 ")


def test_a_connection_is_not_kept_for_ever_after_an_answer_that_came_before_the_body() -> None:
    async def ask(connect: Connect, path: bytes) -> bytes:
        reader, writer = await connect()
        writer.write(b"POST " + path + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\n")
        answer = await asyncio.wait_for(reader.readuntil(b'later"}'), 5)
        writer.write(b"abc")
        rest = await read(reader)
        writer.close()
        return answer + rest

    async def both() -> list[bytes]:
        async with listening(settings(keep_alive_s=1), stuck_model(Full())) as (connect, _):
            # A name with a percent sign is the router's.
            return await asyncio.gather(
                *(ask(connect, path) for path in (b"/predictions/stuck", b"/predictions/%73tuck"))
            )

    for answer in asyncio.run(both()):
        assert answer.endswith(b'later"}')


def test_a_body_in_any_number_of_parts_is_what_was_sent() -> None:
    body = os.urandom(200_000)
    service = Stuck()

    async def ask() -> None:
        async with listening(settings(), stuck_model(service)) as (connect, _):
            for number, parts in enumerate((1, 2, 5), 1):
                _, writer = await connect()
                writer.write(b"POST /predictions/stuck HTTP/1.1\r\nHost: x\r\nContent-Type: image/jpeg\r\n")
                writer.write(b"Content-Length: %d\r\n\r\n" % len(body))
                step = -(-len(body) // parts)
                for start in range(0, len(body), step):
                    writer.write(body[start : start + step])
                    await writer.drain()
                    await asyncio.sleep(0.02)
                for _ in range(200):
                    if len(service.requests) == number:
                        break
                    await asyncio.sleep(0.01)
                writer.close()

    asyncio.run(ask())
    assert [request.images == (body,) for request in service.requests] == [True, True, True]


BODIES = st.one_of(
    st.binary(max_size=40), st.just(b"\r\n\r\n"), st.just(PING), st.just(b"POST /predictions/stuck HTTP/1.1\r\n\r\n")
)


def test_wherever_the_bytes_of_requests_are_cut_each_gets_its_answer() -> None:
    @settings_of_hypothesis(max_examples=60)
    @given(
        messages=st.lists(st.one_of(st.none(), st.tuples(BODIES, st.booleans())), min_size=1, max_size=5),
        cuts=st.lists(st.integers(0, 400), max_size=4),
    )
    def each(messages: list[tuple[bytes, bool] | None], cuts: list[int]) -> None:
        """A message is a request that is answered, or the body of one that is refused, and whether it is chunked."""
        sent = b"".join(PING if message is None else refused_request(*message) for message in messages)
        places = [0, *sorted(cut for cut in cuts if cut < len(sent)), len(sent)]
        answers = runner.run(ask(sent[start:end] for start, end in itertools.pairwise(places)))
        statuses = [int(answer[:3]) for answer in answers.split(b"HTTP/1.1 ")[1:]]
        assert statuses == [200 if message is None else 503 for message in [*messages, None]]

    async def ask(parts: Iterable[bytes]) -> bytes:
        reader, writer = await connect()
        for part in parts:
            writer.write(part)
            for _ in range(3):
                await asyncio.sleep(0)
        writer.write(PING.replace(b"Host: x", b"Connection: close"))
        answers = await read(reader)
        writer.close()
        return answers

    with asyncio.Runner() as runner:
        server = listening(settings(), stuck_model(Full()))
        connect, _ = runner.run(server.__aenter__())
        each()
        runner.run(server.__aexit__(None, None, None))


def test_a_connection_may_have_so_many_requests_waiting_for_each_other_and_ends_with_more() -> None:
    async def answers(connect: Connect, count: int) -> int:
        reader, writer = await connect()
        writer.write(PING * (count - 1) + PING.replace(b"Host: x", b"Connection: close"))
        found = (await read(reader)).count(b"HTTP/1.1 200 ")
        writer.close()
        return found

    async def ask() -> None:
        async with listening(settings(), stuck_model(Stuck())) as (connect, application):
            assert await answers(connect, 30) == 30
            # One of each read may be answered at once: nothing is before it.
            assert await answers(connect, 5000) < 30
            assert await answers(connect, 1) == 1
            assert application.in_flight == 0

    asyncio.run(ask())


def refused_request(body: bytes, chunked: bool) -> bytes:
    head = b"POST /predictions/stuck HTTP/1.1\r\nHost: x\r\n"
    if not chunked:
        return head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    chunk = b"%x\r\n%s\r\n" % (len(body), body) if body else b""
    return head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk + b"0\r\n\r\n"


def test_nothing_of_a_request_waits_for_the_garbage_collector() -> None:
    async def ask() -> list[str]:
        async with listening(settings(), stuck_model(Full())) as (connect, _):
            reader, writer = await connect()
            for request in (PING, b"POST /predictions/%73tuck HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc") * 3:
                writer.write(request)
                await asyncio.wait_for(reader.readuntil(b"}"), 30)
            gc.collect()
            gc.set_debug(gc.DEBUG_SAVEALL)
            for _ in range(5):
                writer.write(PING)
                await asyncio.wait_for(reader.readuntil(b"}"), 30)
            gc.collect()
            found = [type(entry).__name__ for entry in gc.garbage]
            gc.set_debug(0)
            gc.garbage.clear()
            writer.close()
        return found

    assert "RequestResponseCycle" not in asyncio.run(ask())


def test_an_answer_has_the_body_and_the_end_that_its_request_asks_for() -> None:
    async def ask() -> bytes:
        async with listening(settings()) as (connect, _):
            reader, writer = await connect()
            writer.write(PING.replace(b"GET", b"HEAD") + PING + PING.replace(b"HTTP/1.1", b"HTTP/1.0"))
            answers = await read(reader)
            writer.close()
        return answers

    head, again, last, *more = [b"HTTP/1.1 " + part for part in asyncio.run(ask()).split(b"HTTP/1.1 ")[1:]]
    assert not more
    fields, _, nothing = head.partition(b"\r\n\r\n")
    assert nothing == b"", "HEAD has the length of a body, and none"
    same, _, body = again.partition(b"\r\n\r\n")
    assert b"content-length: %d\r\n" % len(body) in fields
    assert b"content-length: %d\r\n" % len(body) in same
    assert last.endswith(body)
    assert [b"connection: close" in answer for answer in (head, again, last)] == [False, False, True]


@pytest.mark.parametrize(
    ("sent", "told"), [(b"", b""), (b"\r\n", b"HTTP/1.1 408 "), (PING[:20], b"HTTP/1.1 408 "), (PING + b"G", b"HTTP/")]
)
def test_who_does_not_finish_its_headers_is_cut_off(sent: bytes, told: bytes) -> None:
    async def stall() -> bytes:
        async with listening(settings(head_s=0.2)) as (connect, _):
            reader, writer = await connect()
            writer.write(sent)
            answer = await read(reader)
            writer.close()
            return answer

    answer = asyncio.run(stall())
    assert answer.startswith(told)
    assert bool(answer) == bool(told)


CHUNKED = b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
OF_ANOTHER = b"Host: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n"
# Which llhttp takes, and uvicorn's reading of paths does not.
NO_PATHS = (b"CONNECT x:1", b"CONNECT x", b"GET http://a:99999/", b"GET http://[x/")


@pytest.mark.parametrize(
    ("sent", "status", "route"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, ""),  # the beginning of TLS
        (b"GET / HTTP/9.9\r\n\r\n", 400, ""),
        (CHUNKED + b"3\r\nabc\r\nno number\r\n", 400, "/echo"),
        (CHUNKED + b"no number\r\n", 400, "/echo"),
        (b"GET /ping HTTP/1.1\r\nX: " + b"x" * 1001, 431, ""),
        *((line + b" HTTP/1.1\r\nHost: x\r\n\r\n", 400, "") for line in NO_PATHS),
        (b"POST /echo HTTP/1.1\r\n" + OF_ANOTHER + b"Transfer-Encoding: gzip\r\n\r\n", 400, "/echo"),
    ],
)
def test_what_is_no_http_is_told_as_json_and_counted_once(sent: bytes, status: int, route: str) -> None:
    seen: list[Observation] = []

    async def run() -> bytes:
        async with listening(settings(head_bytes=1000)) as (connect, application):
            add_echo(application)
            application.observers.append(seen.append)
            async with connection(connect) as (reader, writer):
                writer.write(sent)
                return await read(reader)

    head, _, body = asyncio.run(run()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"content-type: application/json" in head
    assert b"connection: close" in head
    assert list(json.loads(body)) == ["error"]
    assert [(told.status, told.route) for told in seen] == [(status, route)]


@pytest.mark.parametrize("behind", NO_PATHS)
def test_a_request_is_answered_though_nothing_that_there_can_be_is_behind_it(behind: bytes) -> None:
    async def run() -> bytes:
        async with listening(settings()) as (connect, application):
            add_echo(application)
            async with connection(connect) as (reader, writer):
                head = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n"
                writer.write(head + b"12345" + behind + b" HTTP/1.1\r\nHost: x\r\n\r\n")
                return await read(reader)

    answer = asyncio.run(run())
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"12345")


@pytest.mark.parametrize("behind", [b"no HTTP\r\n\r\n", PING[:20], b"GET / HTTP/1.1\r\nX: " + b"x" * 2000])
def test_what_is_no_request_is_not_answered_in_the_place_of_one_that_came_before(behind: bytes) -> None:
    async def slow(_: Call) -> Response:
        await asyncio.sleep(0.5)
        return Response(200, b'"slow"')

    async def run() -> bytes:
        async with listening(settings(head_s=0.2, head_bytes=1000)) as (connect, application):
            application.router.add("GET", "/slow", slow)
            async with connection(connect) as (reader, writer):
                writer.write(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n" + behind)
                return await read(reader)

    answer = asyncio.run(run())
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b'"slow"')
    assert b"connection: close" in answer


def test_headers_that_are_too_long_are_told_so() -> None:
    async def send() -> bytes:
        async with listening(settings(head_bytes=1000)) as (connect, _):
            reader, writer = await connect()
            writer.write(b"GET /ping HTTP/1.1\r\nX: " + b"x" * 1001)
            answer = await read(reader)
            writer.close()
            return answer

    assert asyncio.run(send()).startswith(b"HTTP/1.1 431 ")


def test_one_connection_too_many_is_told_to_come_again_and_the_others_go_on() -> None:
    async def crowd() -> tuple[bytes, bytes]:
        async with listening(settings(connections=2)) as (connect, _):
            pairs = [await connect() for _ in range(2)]
            reader, writer = await connect()
            refused = await read(reader)
            pairs[0][1].write(PING)
            answer = await asyncio.wait_for(pairs[0][0].readline(), 30)
            for _, other in (*pairs, (reader, writer)):
                other.close()
            return refused, answer

    refused, answer = asyncio.run(crowd())
    assert refused.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1\r\n" in refused
    assert answer.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("abort", [False, True])
def test_when_the_client_closes_its_request_is_not_computed(abort: bool) -> None:
    service = Stuck()

    async def leave() -> None:
        async with listening(settings(), stuck_model(service)) as (connect, application):
            _, writer = await connect()
            writer.write(b"POST /predictions/stuck HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nimage")
            while not service.futures:
                await asyncio.sleep(0.01)
            if abort:
                writer.transport.abort()
            else:
                writer.close()
            for _ in range(200):
                if service.futures[0].cancelled() and not application.in_flight:
                    break
                await asyncio.sleep(0.01)

    asyncio.run(leave())
    assert service.futures[0].cancelled()


def test_a_refusal_reaches_a_client_that_is_still_sending_and_the_connection_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("serve.asgi.http.limited_connection._LINGER_S", 1.0)

    async def flood() -> tuple[bytes, bool]:
        async with listening(settings(body_bytes=1000)) as (connect, _):
            reader, writer = await connect()
            writer.write(b"POST /predictions/x HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n")
            told = b""
            for _ in range(100):
                writer.write(b"x" * 10_000)
                await writer.drain()
            told = await asyncio.wait_for(reader.readline(), 30)
            ended = False
            for _ in range(200):
                try:
                    writer.write(b"x" * 1000)
                    await writer.drain()
                    await asyncio.sleep(0.05)
                except ConnectionError:
                    ended = True
                    break
            writer.close()
            return told, ended

    told, ended = asyncio.run(flood())
    assert told.startswith(b"HTTP/1.1 404 ")
    assert ended


@pytest.mark.parametrize(("files", "connections"), [((300, 5000), 2000), ((300, 1256), 1000), ((300, 300), 44)])
def test_as_many_connections_are_taken_as_files_can_be_opened(
    files: tuple[int, int], connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = [files]
    monkeypatch.setattr("serve.asgi.http.http_server.resource.getrlimit", lambda _: limits[-1])
    monkeypatch.setattr("serve.asgi.http.http_server.resource.setrlimit", lambda _, pair: limits.append(pair))
    assert http_server.raise_file_limit(Limits(connections=2000), ports=1).connections == connections
    assert limits[-1] == (min(2256, files[1]), files[1])


UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAAAA\r\n"


@asynccontextmanager
async def connection(connect: Connect) -> AsyncIterator[Streams]:
    reader, writer = await connect()
    try:
        yield reader, writer
    finally:
        writer.close()


def add_echo(application: Application) -> None:
    """Answer ``POST /echo`` with its body, and ``GET /much`` with more than a connection takes in."""

    async def echo(call: Call) -> Response:
        return Response(200, await call.body(), headers=(("x-told", call.headers.get("x-told", "nothing")),))

    async def much(_: Call) -> Response:
        return Response(200, bytes(32 << 20))

    application.router.add("POST", "/echo", echo)
    application.router.add("GET", "/much", much)


@pytest.mark.parametrize("parts", [1, 2, 500])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_request_that_offers_another_protocol_is_answered_and_its_body_is_no_request(
    parts: int, chunked: bool
) -> None:
    inner = b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n"
    framing = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % len(inner)
    body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(inner), inner) if chunked else inner
    request = b"POST /echo HTTP/1.1\r\nHost: x\r\n" + UPGRADE + framing + b"\r\n\r\n" + body
    last = b"GET /ping HTTP/1.1\r\nHost: x\r\n" + UPGRADE.replace(b"Upgrade,", b"close, Upgrade,") + b"\r\n"
    sent = request + request + last

    async def run() -> bytes:
        async with listening(settings(), stuck_model(Stuck())) as (connect, application):
            add_echo(application)
            async with connection(connect) as (reader, writer):
                size = -(-len(sent) // parts)
                for start in range(0, len(sent), size):
                    writer.write(sent[start : start + size])
                    await writer.drain()
                    await asyncio.sleep(0)
                return await read(reader, 5)

    told = asyncio.run(run())
    assert told.count(b"HTTP/1.1 200") == 3
    assert told.count(inner) == 2  # as bodies


def test_what_comes_behind_a_body_is_no_header_and_not_kept(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("t" * 32)
    (tmp_path / "tokens").chmod(0o600)
    with_tokens = dataclasses.replace(settings(), token_file=tmp_path / "tokens")
    token = b"Authorization: Bearer " + b"t" * 32 + b"\r\n"
    head = b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"

    async def run() -> None:
        async with listening(with_tokens) as (connect, application):
            add_echo(application)
            async with connection(connect) as (reader, writer):
                writer.write(head + b"\r\n0\r\n" + token + b"\r\n")
                assert b" 401 " in await reader.readline()
            async with connection(connect) as (reader, writer):
                writer.write(head + token + b"Connection: close\r\n\r\n0\r\nx-told: behind\r\n\r\n")
                assert b"x-told: nothing" in await read(reader)
            async with connection(connect) as (reader, writer):
                writer.write(head + b"\r\n0\r\n" + b"a:b\r\n" * 1_000_000)  # and no end
                with contextlib.suppress(ConnectionError):
                    await writer.drain()
                assert await read(reader, 5) == b""

    asyncio.run(run())


def test_a_body_in_chunks_of_a_byte_each_is_not_read_on() -> None:
    head = b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"

    async def run() -> None:
        async with listening(settings()) as (connect, application):
            add_echo(application)
            async with connection(connect) as (reader, writer):
                writer.write(head + b"1\r\na\r\n" * 4000 + b"0\r\n\r\n")
                assert b" 200 " in await reader.readline()
            async with connection(connect) as (reader, writer):
                writer.write(head + b"1\r\na\r\n" * 500_000)
                with contextlib.suppress(ConnectionError):
                    await writer.drain()
                assert await read(reader, 5) == b""

    asyncio.run(run())


def test_who_does_not_read_its_answer_keeps_no_body_in_memory_and_is_cut_off() -> None:
    async def run() -> None:
        taken = asyncio.Event()

        async def take(call: Call) -> Response:
            body = await call.body()
            taken.set()
            return Response(200, body)

        async with listening(settings(body_s=1)) as (connect, application):
            add_echo(application)
            application.router.add("POST", "/taken", take)
            async with connection(connect) as (_, writer), asyncio.timeout(20):
                writer.write(b"GET /much HTTP/1.1\r\nHost: x\r\n\r\n")
                writer.write(b"POST /taken HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n" + bytes(1_000_000))
                await taken.wait()
                while application.held.bytes:
                    await asyncio.sleep(0.001)
                assert application.in_flight == 1, "its answer waits to be read"
                while application.in_flight:
                    await asyncio.sleep(0.01)

    asyncio.run(run())


def test_an_unread_answer_counts_as_memory_until_it_is_read_or_the_client_is_cut_off() -> None:
    """Another client is refused meanwhile, if the limit is reached."""
    much = 30_000_000

    async def until(condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.001)

    async def run() -> tuple[bytes, bytes]:
        async def answer(_: Call) -> Response:
            return Response(200, bytes(much))

        async with listening(settings(body_s=1, body_bytes=1000, held_bytes=much)) as (connect, application):
            add_echo(application)
            application.router.add("GET", "/all", answer)
            post = b"POST /echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
            size = much // 2
            async with connection(connect) as (reader, writer), asyncio.timeout(20):
                writer.write(b"GET /all HTTP/1.1\r\nHost: x\r\n\r\n")
                await until(lambda: application.held.unread >= size)
                application.held.limit = size
                async with connection(connect) as (other, sent):
                    sent.write(post % 5 + b"hello")
                    refused = await read(other)
                await reader.readexactly(much)
                await until(lambda: application.held.unread == 0)
                async with connection(connect) as (other, sent):
                    sent.write(post % 5 + b"hello")
                    answered = await read(other)
                writer.write(b"GET /all HTTP/1.1\r\nHost: x\r\n\r\n")  # and never reads it
                await until(lambda: application.held.unread > 0)
                await until(lambda: application.held.unread == 0)
            return refused, answered

    refused, answered = asyncio.run(run())
    assert refused.startswith(b"HTTP/1.1 503 ")
    assert b"limit of memory for requests" in refused
    assert answered.startswith(b"HTTP/1.1 200 ")


def test_a_length_of_many_digits_is_read_as_the_number_that_it_is(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> bytes:
        async with (
            listening(settings(), stuck_model(Full())) as (connect, _),
            connection(connect) as (reader, writer),
        ):
            writer.write(
                b"POST /predictions/stuck HTTP/1.1\r\nHost: x\r\nContent-Length: " + b"0" * 5000 + b"5\r\n\r\n"
            )
            writer.write(b"hello" + PING.replace(b"Host", b"Connection: close\r\nHost"))
            return await read(reader)

    told = asyncio.run(run())
    assert told.startswith(b"HTTP/1.1 503")
    assert b"HTTP/1.1 200" in told
    assert not [record for record in caplog.records if record.name == "asyncio"]


def _connections_in_memory() -> int:
    gc.collect()
    return sum(isinstance(found, GuardedConnection) for found in gc.get_objects())


def test_a_connection_that_its_client_resets_is_not_kept() -> None:
    async def run() -> int:
        async with listening(settings()) as (connect, _):
            for _ in range(20):
                reader, writer = await connect()
                writer.write(PING)
                await reader.readexactly(1)
                opened = writer.get_extra_info("socket")
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
            del reader, writer, opened
            until = time.monotonic() + 30
            while (kept := _connections_in_memory()) and time.monotonic() < until:
                await asyncio.sleep(0.05)
            return kept

    assert asyncio.run(run()) == 0


@pytest.mark.parametrize("where", ["on_url", "on_body"])
def test_where_memory_is_short_for_what_comes_that_is_told_and_not_a_fault_of_the_client(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a body that is read to its end, behind which the connection goes on; of a head it is closed."""

    def fail(*_: Any) -> None:
        raise MemoryError

    async def run() -> tuple[bytes, bytes]:
        async with listening(settings(), stuck_model(Stuck())) as (connect, application):
            add_echo(application)
            async with connection(connect) as (reader, writer):
                with monkeypatch.context() as short:
                    short.setattr(f"uvicorn.protocols.http.httptools_impl.HttpToolsProtocol.{where}", fail)
                    head = b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
                    writer.write(head + b"5\r\n01234\r\n3\r\n567\r\n")
                    told = await asyncio.wait_for(reader.readuntil(b"}"), 10)
                if where == "on_body":
                    writer.write(b"2\r\n89\r\n0\r\n\r\n" + PING.replace(b"Host", b"Connection: close\r\nHost"))
                return told, await read(reader, 5)

    told, after = asyncio.run(run())
    assert told.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 1" in told
    assert b"not have enough memory" in told
    assert after.startswith(b"HTTP/1.1 200 " if where == "on_body" else b"")


def test_where_memory_is_short_for_a_request_it_gets_503() -> None:
    async def greedy(_: Call) -> Response:
        raise MemoryError

    async def run() -> bytes:
        async with listening(settings(), stuck_model(Stuck())) as (connect, application):
            application.router.add("GET", "/greedy", greedy)
            async with connection(connect) as (reader, writer):
                writer.write(b"GET /greedy HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                return await read(reader)

    told = asyncio.run(run())
    assert told.startswith(b"HTTP/1.1 503 ")
    assert b"not have enough memory" in told
