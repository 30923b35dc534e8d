"""uvicorn and uvloop as they serve here: their limits, their end, and the lock of Python beside busy threads."""

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
# A switch costs a few microseconds, and is made only where another thread waits. Under four times its capacity a small
# network's server answered 41 % of capacity with CPython's 5 ms, 76 % with 0.5 ms, 108 % with this and 115 % with 0.01;
# of ResNet-18, 88 and 93 % (medians of rounds in turns, 2 cores). What it answers at capacity does not depend on it.
_SWITCH_S = 5e-5
# For a client's handshake by TLS: as for the headers of a request.
_HANDSHAKE_S = 10.0
# For a client that is told by TLS that its connection is closed, to read what is left and say the same. One in a pool
# is read by nobody: the server's end takes that long.
_GOODBYE_S = 5.0
# For a connection that is accepted in the moment in which the server ends: a client's handshake takes two ways.
_LAST_HANDSHAKE_S = 1.0
# What is open beside connections: archives, libraries, devices.
_OTHER_FILES = 256


def uvicorn_config(application: Application, settings: Settings) -> uvicorn.Config:
    """How uvicorn serves an application."""
    tls = settings.listening.tls
    config = uvicorn.Config(
        application,
        http=functools.partial(GuardedConnection, settings.limits, EarlyRefusal(application)),  # type: ignore[arg-type]
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
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # a warning for each request that is no HTTP
    return config


class Loop(uvloop.Loop):
    """uvloop, which gives a TLS client a minute for its handshake and half of one for its end by default."""

    async def create_server(self, *args: Any, ssl: Any = None, **settings: Any) -> Any:
        """Listen; uvicorn 0.54 says nothing of either."""
        if ssl is not None:
            settings |= {"ssl_handshake_timeout": _HANDSHAKE_S, "ssl_shutdown_timeout": _GOODBYE_S}
        return await super().create_server(*args, ssl=ssl, **settings)


class HttpServer(uvicorn.Server):
    """uvicorn, whose signals are somebody else's: it raises them again when it ends, and would not exit with 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End."""
        self.should_exit = True

    async def stop(self, opened: socket.socket, file: SocketFile | None = None) -> None:
        """Listen no more, and let what was accepted be answered.

        The file of a unix socket is removed in the same moment: what is there later is another server's.

        A client whose connection waits to be accepted when the socket is closed gets a reset for its request: all that
        wait are accepted in the moment before. Those that shake no hands by TLS in a moment are closed.
        """
        if file is not None:
            file.remove()
        waiting = []
        with contextlib.suppress(OSError):  # there is none, or no file for one
            while True:
                waiting.append(opened.accept()[0])
        for server in self.servers:
            server.close()
        await asyncio.gather(*map(self._take_up, waiting))
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for what was accepted, and end what takes longer: uvicorn 0.54 cancels its task, and leaves it there."""
        await super().shutdown(sockets)
        await asyncio.gather(*self.server_state.tasks, return_exceptions=True)

    async def _take_up(self, accepted: socket.socket) -> None:
        secure = self.config.ssl
        handshake_s, goodbye_s = (None, None) if secure is None else (_LAST_HANDSHAKE_S, _GOODBYE_S)
        with contextlib.suppress(OSError):  # it speaks no TLS, has gone, or took too long: nobody else's matter
            await asyncio.get_running_loop().connect_accepted_socket(
                self._connection,
                accepted,
                ssl=secure,
                ssl_handshake_timeout=handshake_s,
                ssl_shutdown_timeout=goodbye_s,
            )

    def _connection(self) -> asyncio.Protocol:
        return self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state={}
        )


@contextlib.contextmanager
def share_python_lock() -> Iterator[None]:
    """Have a thread that waits for Python's lock get it soon.

    An event loop that always has something to do lets go of the lock behind each callback, and takes it again before
    a thread that waits for it has woken up (uvloop 0.23, CPython 3.11). By default such a thread asks for its turn
    after 5 ms: behind refusals decoders and engine stood still, with a fifth of the processor idle.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def raise_file_limit(limits: Limits, ports: int) -> Limits:
    """Let this process open a file for each connection of each port; where it may not, fewer connections are taken.

    At its limit of open files a server accepts nobody and tells nobody.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = ports * limits.connections + _OTHER_FILES
    if soft < needed:
        soft = min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft >= needed:
        return limits
    most = max(1, (soft - _OTHER_FILES) // ports)
    _LOG.warning("%d connections are taken, not %d: this process may open %d files", most, limits.connections, soft)
    return replace(limits, connections=most)
