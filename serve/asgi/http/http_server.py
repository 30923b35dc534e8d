"""uvicorn and uvloop, configured for this server: timeouts, shutdown, and the share of Python's lock."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import resource
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
import uvloop

from serve.asgi.http.call import Limits
from serve.asgi.http.connection import GuardedConnection
from serve.asgi.http.early_refusal import EarlyRefusal
from serve.asgi.http.listen_sockets import SocketFile

if TYPE_CHECKING:
    from serve.asgi.http.application import Application
    from serve.asgi.http.server_settings import Settings

_LOG = logging.getLogger(__name__)
# A switch costs a few microseconds and happens only if another thread waits. Under four times its capacity, the server
# of a small network answered 41 % of capacity with CPython's 5 ms, 76 % with 0.5 ms, 108 % with this value and 115 %
# with 0.01 ms. For ResNet-18 the share was 88 % with 5 ms and 93 % with this value. These are medians of rounds in
# turns, on 2 cores. The answers at capacity do not depend on it.
_SWITCH_S = 5e-5
# For a client's TLS handshake. The same time as for the headers of a request.
_HANDSHAKE_S = 10.0
# For the end of a TLS connection: the client reads the rest and confirms. Nobody reads a connection that lies in a
# client's pool, so the shutdown of the server takes that long.
_TLS_SHUTDOWN_S = 5.0
# For a connection that is accepted while the server shuts down. A handshake takes two round trips.
_LAST_HANDSHAKE_S = 1.0
# Open files beside connections: archives, libraries, devices.
_OTHER_FILES = 256


def uvicorn_config(application: Application, settings: Settings) -> uvicorn.Config:
    """Return uvicorn's configuration for an application."""
    tls = settings.listening.tls
    config = uvicorn.Config(
        application,
        http=functools.partial(  # type: ignore[arg-type]
            GuardedConnection, settings.limits, application.held, EarlyRefusal(application)
        ),
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=settings.limits.keep_alive_s,
        timeout_graceful_shutdown=max(1, round(settings.drain_s)),
        ssl_context_factory=None if tls is None else lambda *_: tls.context,
    )
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # it warns of each request that is not HTTP
    return config


class Loop(uvloop.Loop):
    """uvloop with shorter TLS timeouts. Its own are a minute for the handshake and half a minute for the end."""

    async def create_server(self, *args: Any, ssl: Any = None, **settings: Any) -> Any:
        """Listen with TLS timeouts. uvicorn 0.54 sets none."""
        if ssl is not None:
            settings |= {"ssl_handshake_timeout": _HANDSHAKE_S, "ssl_shutdown_timeout": _TLS_SHUTDOWN_S}
        return await super().create_server(*args, ssl=ssl, **settings)


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers. They raise a signal again at exit, so that the exit code is not 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals."""
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Shut the server down."""
        self.should_exit = True

    async def stop(self, opened: socket.socket, file: SocketFile | None = None) -> None:
        """Stop listening, and let accepted requests be answered.

        The file of a unix socket is removed first. A file that is there later belongs to another server.

        A client that waits to be accepted when the socket closes gets a reset. So all waiting connections are accepted
        just before. A connection without a TLS handshake within a moment is closed.
        """
        if file is not None:
            file.remove()
        waiting = []
        with contextlib.suppress(OSError):  # none is left, or no file descriptor is free
            while True:
                waiting.append(opened.accept()[0])
        for server in self.servers:
            server.close()
        await asyncio.gather(*map(self._accept, waiting))
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for accepted requests, and end those that take longer.

        uvicorn 0.54 cancels their tasks but does not wait for them.
        """
        await super().shutdown(sockets)
        await asyncio.gather(*self.server_state.tasks, return_exceptions=True)

    async def _accept(self, accepted: socket.socket) -> None:
        secure = self.config.ssl
        handshake_s, shutdown_s = (None, None) if secure is None else (_LAST_HANDSHAKE_S, _TLS_SHUTDOWN_S)
        with contextlib.suppress(OSError):  # no TLS, disconnected, or too slow: this concerns no other connection
            await asyncio.get_running_loop().connect_accepted_socket(
                self._connection,
                accepted,
                ssl=secure,
                ssl_handshake_timeout=handshake_s,
                ssl_shutdown_timeout=shutdown_s,
            )

    def _connection(self) -> asyncio.Protocol:
        return self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state={}
        )


@contextlib.contextmanager
def share_python_lock() -> Iterator[None]:
    """Give a thread that waits for Python's lock its turn soon.

    A busy event loop releases the lock after each callback. It takes the lock again before a waiting thread has woken
    up (uvloop 0.23, CPython 3.11). By default such a thread requests its turn after 5 ms. During many refusals decoders
    and engine stood still, while a fifth of the processor was idle.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def raise_file_limit(limits: Limits, ports: int) -> Limits:
    """Let this process open a file for each connection of each port. Return the limits that it can keep.

    If the operating system allows fewer files, fewer connections are accepted. A server at its limit of open files
    accepts nobody and does not say so.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = ports * limits.connections + _OTHER_FILES
    if soft < needed:
        soft = min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft >= needed:
        return limits
    most = max(1, (soft - _OTHER_FILES) // ports)
    _LOG.warning(
        "the limit is %d connections instead of %d, because this process may open only %d files",
        most,
        limits.connections,
        soft,
    )
    return replace(limits, connections=most)
