"""One request as a route sees it: its words, its body within limits, its deadline, and the service asked for it."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from serve.asgi.http.inference_call import ClientGoneError, InferenceCall
from serve.asgi.http.messages import (
    CONNECTION,
    FAULT,
    GONE,
    Receive,
    RefusedError,
    Scope,
    queue_full,
    slow_body,
    try_again,
)
from serve.runtime.service.observation import Observation, request_id

if TYPE_CHECKING:
    from serve.asgi.http.inline_inference import InlineInference
    from serve.asgi.http.served_models import Models, Served
    from serve.runtime.service.pending_request import Answered
    from serve.runtime.service.protocol import Request

# Where the connection does not tell by itself that its client has gone (`GONE`). An answer takes a few milliseconds;
# it is looked at from then on only: the task for it would hold Python's lock in the very moment in which the engine's
# thread wakes up for the request.
_WATCH_AFTER_S = 0.02


@dataclass(frozen=True)
class Limits:
    """What a client may cost before anything is computed for it.

    Attributes:
        body_bytes: of one request; 413 beyond it. As TorchServe is told here.
        held_bytes: of all requests that are being received or answered; 503 beyond it.
        body_s: seconds for a body to arrive whole; 408 beyond it.
        head_s: seconds for the headers to arrive; the connection is closed beyond it.
        head_bytes: of the request line and the headers; the connection is closed beyond it.
        keep_alive_s: seconds that a connection may lie idle.
        connections: open at once; 503 beyond it.
        queue: requests that wait for a model's service, 503 beyond it; None: as each archive says.
    """

    body_bytes: int = 64 * 1024 * 1024
    held_bytes: int = 512 * 1024 * 1024
    body_s: float = 30.0
    head_s: float = 10.0
    head_bytes: int = 64 * 1024
    keep_alive_s: int = 75
    connections: int = 2048
    queue: int | None = None


class Held:
    """Bytes of bodies that are in memory now, against `Limits.held_bytes`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bytes = 0

    def take(self, size: int) -> None:
        """Count a body's bytes, which the caller gives back whatever comes of them.

        Raises:
            RefusedError: 503; there is no room for them.
        """
        self.bytes += size
        if self.bytes > self.limit:
            raise try_again("the server holds as many bodies as it may: try again later", "memory")


class Call:
    """One HTTP request. Used in the event loop, by one route.

    Attributes:
        method: in capitals.
        headers: by name in lower case; of one that came twice, the last.
        parameters: what stood in the path's places.
        request_id: the client's ``x-request-id``, or one that was made.
        observation: what will be told of it; routes fill in the model.
        models: who answers.
    """

    def __init__(
        self, scope: Scope, receive: Receive, *, models: Models, limits: Limits, held: Held, inline: InlineInference
    ) -> None:
        self.arrived = time.monotonic()
        self.method: str = scope["method"]
        self.headers: dict[str, str] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        self.parameters: dict[str, str] = {}
        self.models = models
        self.request_id = request_id(self.headers.get("x-request-id", ""))
        self.observation = Observation(self.request_id)
        self._query: bytes = scope["query_string"]
        self._receive = receive
        self._extensions = scope.get("extensions", {})
        self._when_gone = self._extensions.get(GONE)
        self._limits = limits
        self._held = held
        self._inline = inline
        self._kept = 0
        self._whole = False
        self._served: Served | None = None

    @property
    def query(self) -> dict[str, str]:
        """The query's parameters; of one that came twice, the last."""
        if not self._query:
            return {}
        try:
            return dict(parse_qsl(self._query.decode("latin-1"), keep_blank_values=True, max_num_fields=100))
        except ValueError:
            raise RefusedError(400, "the query has more than 100 parameters", "bad-request") from None

    @cached_property
    def deadline(self) -> float | None:
        """When the client will have gone, by its ``x-request-deadline-ms``, in seconds of `time.monotonic`.

        Raises:
            RefusedError: 400, the header is no whole number of milliseconds.
        """
        word = self.headers.get("x-request-deadline-ms")
        if word is None:
            return None
        if not re.fullmatch(r"[0-9]{1,9}", word):
            raise RefusedError(
                400,
                f"x-request-deadline-ms must be a whole number of milliseconds below 1e9, got {word[:40]!r}",
                "bad-request",
            )
        return self.arrived + int(word) / 1000

    def take(self, name: str, version: str | None = None) -> Served:
        """The version of a model that answers this request. It is kept open until the request is over.

        Raises:
            RefusedError: as `Models.get`.
        """
        served = self.models.get(name, version)
        served.hold()
        self._served = served
        self.observation.model, self.observation.version = served.name, served.version
        return served

    async def body(self) -> bytes:
        """The whole body.

        Where the model that was taken has a full queue, that is told before anything is read: under overload most
        requests end here, and what they cost is taken from those that are answered.

        Raises:
            RefusedError: 400 (no HTTP), 408 (too slow), 413 (too large; told before it is read where the client says
                its size), 415 (compressed), 503 (the queue is full, too much is held already, or memory is short).
            ClientGoneError: the client went while it sent.
        """
        if self._served is not None and (full := self._served.service.full) is not None:
            raise queue_full(self._served.name, full)
        if self.headers.get("content-encoding", "identity").lower() != "identity":
            raise RefusedError(415, "compressed bodies are not taken: send the image as it is", "content-encoding")
        length = self.headers.get("content-length", "")
        if length.isdecimal() and len(length) < 20 and int(length) > self._limits.body_bytes:
            raise self._too_large()
        chunks: list[bytes] = []
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + self._limits.body_s):
                while not self._whole:
                    message = await self._receive()
                    if (fault := self._extensions.get(FAULT)) is not None:
                        raise fault
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    self._whole = not message.get("more_body", False)
                    chunk: bytes = message.get("body", b"")
                    self._keep(len(chunk))
                    chunks.append(chunk)
                    if self._kept > self._limits.body_bytes:
                        raise self._too_large()
        except TimeoutError:
            raise slow_body(self._limits.body_s) from None
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def ask(self, served: Served, request: Request) -> Answered:
        """Have a request answered, unless its time is over or its client goes. Its body must have been read.

        Args:
            served: the model, as it was taken.
            request: what is asked.

        Raises:
            RefusedError: 503 (queue full, or the server ends), 504 (deadline), 500 (the engine failed).
            ClientGoneError: nobody waits for the answer; what was not computed yet will not be.
        """
        self.observation.images = len(request.images)
        who = self._extensions.get(CONNECTION)
        here = who is not None and self._inline.allows(who, served, request)
        inference = InferenceCall(served, request, self.deadline, self._inline.computing(who, served) if here else None)
        with self._watched(inference.abandon):
            answered = await inference.answered()
        self.observation.tell(answered)
        return answered

    def release(self) -> None:
        """Let go of its model, and count its body as gone."""
        if self._served is not None:
            self._served.release()
            self._served = None
        self._held.bytes -= self._kept
        self._kept = 0

    def _too_large(self) -> RefusedError:
        return RefusedError(413, f"the body is larger than the limit of {self._limits.body_bytes} bytes", "too-large")

    def _keep(self, size: int) -> None:
        self._kept += size
        self._held.take(size)

    @contextmanager
    def _watched(self, abandon: Callable[[], None]) -> Iterator[None]:
        """Call ``abandon`` when the client goes within the block."""
        if self._when_gone is not None:
            self._when_gone(abandon)
            try:
                yield
            finally:
                self._when_gone(None)
            return
        watching: list[asyncio.Task[None]] = []
        later = asyncio.get_running_loop().call_later(
            _WATCH_AFTER_S, lambda: watching.append(asyncio.ensure_future(self._watch(abandon)))
        )
        try:
            yield
        finally:
            later.cancel()
            for task in watching:
                task.cancel()

    async def _watch(self, abandon: Callable[[], None]) -> None:
        """Call ``abandon`` when the client has gone. Its body was received whole: nothing else can come."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        abandon()
