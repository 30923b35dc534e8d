"""What the own server does by TLS, on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import ssl
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from serve.asgi.http import http_server
from serve.asgi.http.listen_sockets import Listening
from serve.asgi.http.server_settings import Settings
from serve.asgi.http.tls import Tls
from serve.asgi.process import server_process
from serve.asgi.process.serving_plan import Wanted
from serve.runtime.errors import EngineError, UserError
from tests.serve.certificates import certify
from tests.serve.stuck import PING, Stuck, listening, stand_in, started


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Listening:
    certificate, key = certify(tmp_path_factory.mktemp("tls"))
    return Listening(port=0, certificate=certificate, key=key)


def test_it_serves_by_tls_with_the_files_that_it_is_given(secure: Listening) -> None:
    trusting = ssl.create_default_context(cafile=secure.certificate)

    async def ask() -> bytes:
        async with listening(Settings(listening=secure, drain_s=3)) as (connect, _):
            reader, writer = await functools.partial(connect, ssl=trusting, server_hostname="localhost")()  # type: ignore[call-arg]
            writer.write(PING)
            answer = await asyncio.wait_for(reader.readline(), 30)
            writer.close()
            return answer

    assert asyncio.run(ask()).startswith(b"HTTP/1.1 200 ")


def test_files_that_make_no_tls_are_named_before_anything_is_opened(secure: Listening, tmp_path: Path) -> None:
    certificate, key = secure.certificate, secure.key
    assert certificate is not None
    assert key is not None
    locked, other, nothing = tmp_path / "locked.pem", tmp_path / "other.pem", tmp_path / "nothing.pem"
    nothing.write_text("nothing")
    subprocess.run(["openssl", "rsa", "-aes256", "-passout", "pass:word", "-in", key, "-out", locked], check=True)
    subprocess.run(["openssl", "genrsa", "-out", other], check=True)
    Listening(certificate=certificate, key=key, client_authorities=certificate)
    for wrong in (nothing, locked, other):
        with pytest.raises(UserError, match=f"^--tls-certificate {certificate} and --tls-key {wrong} cannot be used"):
            Listening(certificate=certificate, key=wrong)
    with pytest.raises(UserError, match=f"^--tls-certificate {certificate} cannot be used"):
        Listening(certificate=certificate)
    with pytest.raises(UserError, match=f"^--tls-client-authorities {nothing} cannot be used"):
        Listening(certificate=certificate, key=key, client_authorities=nothing)


def test_a_client_whose_authority_is_let_in_no_more_cannot_come_back_by_its_session(
    secure: Listening, tmp_path: Path
) -> None:
    assert secure.certificate is not None
    (own := tmp_path / "own").mkdir()
    certificate, key = certify(own)
    authorities = tmp_path / "authorities.pem"
    authorities.write_bytes(certificate.read_bytes())
    tls = Tls(secure.certificate, secure.key, authorities)
    client = ssl.create_default_context(cafile=secure.certificate)
    client.load_cert_chain(certificate, key)

    def ask(session: ssl.SSLSession | None) -> ssl.SSLSession | None:
        """Shake hands and read a byte; the session to come back by."""
        near, far = socket.socketpair()

        def serve() -> None:
            with contextlib.suppress(ssl.SSLError, OSError), tls.context.wrap_socket(far, server_side=True) as end:
                end.sendall(b"x")

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with client.wrap_socket(near, server_hostname="localhost", session=session) as end:
                assert end.recv(1) == b"x"
                return end.session
        finally:
            thread.join()

    session = ask(None)
    authorities.write_bytes(secure.certificate.read_bytes())
    tls.newest = tls.read()
    for again in (None, session):
        with pytest.raises((ssl.SSLError, OSError)):
            ask(again)


def test_a_tls_client_that_nobody_reads_for_does_not_hold_up_the_end(
    secure: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection in a client's pool: that it is closed is read when it is taken for the next request."""
    service: Any = Stuck()
    stand_in(monkeypatch, service)
    monkeypatch.setattr(http_server, "_TLS_SHUTDOWN_S", 0.5)
    monkeypatch.setattr(http_server, "_HANDSHAKE_S", 0.5)
    trusting = ssl.create_default_context(cafile=secure.certificate)
    clients: list[socket.socket] = []
    told: list[float | bytes] = []

    def ask(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as silent:
            told.append(silent.recv(1))  # closed: it shook no hands
        clients.append(
            trusting.wrap_socket(socket.create_connection(("127.0.0.1", port), timeout=10), server_hostname="localhost")
        )
        clients[0].sendall(PING)
        told.append(clients[0].recv(4096))
        told.append(time.monotonic())
        service.broken = "the test is over"

    def said(line: str) -> None:
        if line.startswith("ready"):
            threading.Thread(target=ask, args=(int(line.rpartition(":")[2]),)).start()

    wanted = [Wanted("stuck", "1.0", Path("stuck.mar"))]
    with pytest.raises(EngineError, match="the test is over"):
        server_process.run(Settings(listening=secure, drain_s=20), lambda: wanted, said)
    ended = time.monotonic()
    clients[0].close()
    closed, answer, began = told
    assert closed == b""
    assert isinstance(answer, bytes)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert isinstance(began, float)
    assert ended - began < 8


def test_who_shakes_no_hands_by_tls_when_the_server_ends_keeps_nobody_and_fails_nothing(secure: Listening) -> None:
    trusting = ssl.create_default_context(cafile=secure.certificate)

    def ask(address: tuple[str, int]) -> bytes:
        with socket.create_connection(address, timeout=10) as plain:
            begun.set()
            with trusting.wrap_socket(plain, server_hostname="localhost") as client:
                client.sendall(PING)
                return client.recv(4096)

    async def end() -> tuple[bytes, float, list[bytes]]:
        async with started(Settings(listening=secure, drain_s=3)) as (server, opened, _):
            others = [socket.create_connection(opened.getsockname(), timeout=10) for _ in range(4)]
            others[0].sendall(PING)
            others[1].sendall(b"\x16\x03\x01")
            others[2].close()
            answer = asyncio.ensure_future(asyncio.to_thread(ask, opened.getsockname()))
            await asyncio.sleep(0)
            begun.wait(10)
            began = time.monotonic()
            await server.stop(opened)
            took = time.monotonic() - began
            left = [await asyncio.to_thread(other.recv, 4096) for other in (others[0], others[1], others[3])]
            for other in others:
                other.close()
            return await answer, took, left

    begun = threading.Event()
    answer, took, left = asyncio.run(end())
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert took < 5
    assert left == [b""] * 3
