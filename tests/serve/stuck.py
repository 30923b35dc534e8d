"""A model that takes requests and answers none, and the own server around it, on a real socket."""

from __future__ import annotations

import asyncio
import functools
import math
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from serve.asgi.http import http_server
from serve.asgi.http.application import Application
from serve.asgi.http.call import Limits
from serve.asgi.http.listen_sockets import Listening
from serve.asgi.http.served_models import Models, Served
from serve.asgi.http.server_settings import Settings
from serve.asgi.process import server_process, watchdog
from serve.runtime.card.execution import Execution
from serve.runtime.card.serving import Serving
from tests.serve.artifacts import task_of

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[], Awaitable[Streams]]
#: That of a classifier with many classes, so that an answer may be long.
TASK = task_of(classes=tuple(map(str, range(5000))))
PING = b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n"


class Stuck:
    """A service that takes requests and answers none."""

    broken: str | None = None
    full: str | None = None
    here_s = math.inf
    stalls = False

    def __init__(self) -> None:
        self.futures: list[Future[Any]] = []
        self.requests: list[Any] = []

    def submit(self, request: Any, *, deadline: float | None = None, here: bool = False) -> Future[Any]:
        self.requests.append(request)
        self.futures.append(Future())
        return self.futures[-1]

    @property
    def waiting(self) -> int:
        return sum(not future.done() for future in self.futures)

    @property
    def holding(self) -> int | None:
        return next((number for number, future in enumerate(self.futures) if not future.done()), None)

    def drain(self, timeout_s: float) -> bool:
        return True

    def close(self) -> None:
        pass


class Full(Stuck):
    """A service that takes nothing more."""

    full = "256 requests are already waiting: try again later"


def stuck_model(service: Any) -> Served:
    predictor: Any = SimpleNamespace(task=TASK)
    serving = Serving((Execution("openvino"),), response_timeout_s=1)
    return Served("stuck", "1.0", predictor, serving, service)


def stand_in(monkeypatch: pytest.MonkeyPatch, service: Any) -> None:
    """What a process of the own server serves is ``service``, whatever it is told; it sees at once that it broke."""
    monkeypatch.setattr("serve.asgi.process.model_updates.load", lambda *_, **__: stuck_model(service))
    monkeypatch.setattr(server_process._Process, "_loaded", lambda *_: None)
    monkeypatch.setattr(watchdog, "LOOK_S", 0.05)


@asynccontextmanager
async def listening(settings: Settings, *models: Served) -> AsyncIterator[tuple[Connect, Application]]:
    async with started(settings, *models) as (server, opened, application):
        del server
        yield functools.partial(asyncio.open_connection, *opened.getsockname()[:2]), application


@asynccontextmanager
async def started(
    settings: Settings, *models: Served
) -> AsyncIterator[tuple[http_server.HttpServer, socket.socket, Application]]:
    served = Models()
    served.replace({entry.name: [entry] for entry in models})
    application = server_process.build(settings, served)
    server = http_server.HttpServer(http_server.uvicorn_config(application, settings))
    opened = settings.listening.open()
    running = asyncio.ensure_future(server.serve(sockets=[opened]))
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield server, opened, application
    finally:
        server.should_exit = True
        await asyncio.wait_for(running, 20)


def settings(**limits: Any) -> Settings:
    return Settings(listening=Listening(port=0), limits=Limits(**limits), drain_s=3)


async def read(reader: asyncio.StreamReader, timeout_s: float = 30) -> bytes:
    """All that comes until the connection is closed."""
    try:
        return await asyncio.wait_for(reader.read(), timeout_s)
    except ConnectionResetError:
        return b""
