"""One HTTP request as a handler sees it: headers, body within limits, deadline, and the call of the service."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator, Sequence
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
from serve.runtime.errors import Refusal
from serve.runtime.service.observation import Observation, request_id

if TYPE_CHECKING:
    from serve.asgi.http.inline_inference import InlineInference
    from serve.asgi.http.served_models import Models, Served
    from serve.runtime.service.pending_request import Answered
    from serve.runtime.service.protocol import Request
    from serve.runtime.tasks.base import Outcome, Task

# For a connection without the `GONE` extension. Most answers take a few milliseconds. The task that waits for a
# disconnect starts later: it would hold Python's lock just when the engine's thread wakes up for the request.
_WATCH_AFTER_S = 0.02


@dataclass(frozen=True)
class Limits:
    """What a client may cost before anything is computed for it.

    Attributes:
        body_bytes: largest body of a request. A larger one gets 413. TorchServe gets the same limit.
        held_bytes: most bytes of all requests that are being received or answered, and of long answers that are being
            written or that clients have not read. Beyond it requests get 503.
        body_s: seconds for a whole body to arrive. A slower one gets 408.
        head_s: seconds for the headers to arrive. Then the connection is closed.
        head_bytes: most bytes of request line and headers. Beyond it the connection is closed.
        keep_alive_s: seconds that a connection may stay idle.
        connections: most open connections. A further one gets 503.
        queue: most requests that wait for a model's service. Further ones get 503. None: the archive's own limit.
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
    """Bytes of requests and long answers in memory, compared with `Limits.held_bytes`.

    Attributes:
        limit: the most bytes.
        bytes: bodies of requests, and long answers that are being written.
        unread: written answers that clients have not read.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.bytes = 0
        self.unread = 0

    def take(self, size: int) -> None:
        """Count the bytes of a body or an answer. The caller subtracts them later, also when this raises.

        Raises:
            RefusedError: 503, the limit is exceeded.
        """
        self.bytes += size
        if self.bytes + self.unread > self.limit:
            raise try_again("the server has reached its limit of memory for requests: try again later", "memory")

    def check_answer(self, size: int) -> None:
        """Check that a long answer of this many bytes fits into the limit at all.

        Raises:
            RefusedError: 413, it does not.
        """
        if size > self.limit:
            raise RefusedError(
                413,
                f"writing the answer needs {size} bytes, and the server has {self.limit} for all requests: send fewer "
                "or smaller images, or ask for PNG at /predictions",
                "too-large",
            )


class Call:
    """One HTTP request. Use it in the event loop, in one handler.

    Attributes:
        method: the method in capitals.
        headers: values by name in lower case. The last value wins if a name comes twice.
        parameters: values of the path's placeholders.
        request_id: the client's ``x-request-id``, or a new one.
        observation: the record for the observers. Handlers fill in the model.
        models: the models that answer requests.
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
        self._call_on_disconnect = self._extensions.get(GONE)
        self._limits = limits
        self._held = held
        self._inline = inline
        self._kept = 0
        self._whole = False
        self._served: Served | None = None

    @property
    def query(self) -> dict[str, str]:
        """The query's parameters. The last value wins if a name comes twice."""
        if not self._query:
            return {}
        try:
            return dict(parse_qsl(self._query.decode("latin-1"), keep_blank_values=True, max_num_fields=100))
        except ValueError:
            raise RefusedError(400, "the query has more than 100 parameters", "bad-request") from None

    @cached_property
    def deadline(self) -> float | None:
        """When the client gives up, by its ``x-request-deadline-ms``, in seconds of `time.monotonic`.

        Raises:
            RefusedError: 400, the header is not a whole number of milliseconds.
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
        """Return the version of a model that answers this request. It stays open until the request is over.

        Raises:
            RefusedError: see `Models.get`.
        """
        served = self.models.get(name, version)
        served.hold()
        self._served = served
        self.observation.model, self.observation.version = served.name, served.version
        return served

    async def body(self) -> bytes:
        """Receive the whole body.

        If the queue of the taken model is full, the request is refused before its body is read. Under overload most
        requests end here, and their cost slows down the others.

        Raises:
            RefusedError: 400 (not HTTP), 408 (too slow), 413 (too large), 415 (compressed), or 503 (queue full, too
                many bytes held, or too little memory). A body whose stated size is too large is refused before it is
                read.
            ClientGoneError: the client disconnected while it sent the body.
        """
        if self._served is not None and (full := self._served.service.full) is not None:
            raise queue_full(self._served.name, full)
        if self.headers.get("content-encoding", "identity").lower() != "identity":
            raise RefusedError(
                415, "compressed bodies are not accepted: send the image without Content-Encoding", "content-encoding"
            )
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

    def keep_answer(self, size: int) -> None:
        """Count the bytes of a long answer that is going to be written.

        Raises:
            RefusedError: 413 (it never fits into the limit) or 503 (it does not now).
        """
        self._held.check_answer(size)
        self._keep(size)

    def keep_answers(self, task: Task, outcomes: Sequence[Outcome]) -> None:
        """Count the bytes of the answers to a request that is going to be written; see `keep_answer`."""
        self.keep_answer(sum(task.body_bytes(outcome) for outcome in outcomes if not isinstance(outcome, Refusal)))

    async def ask(self, served: Served, request: Request) -> Answered:
        """Have a request answered, unless its deadline passes or its client disconnects. Read the body first.

        Args:
            served: the model that `take` returned.
            request: the request.

        Raises:
            RefusedError: 503 (queue full, or the server shuts down), 504 (deadline), 500 (the engine failed).
            ClientGoneError: the client disconnected. What is not computed yet will not be computed.
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
        """Release the model, and subtract the body from the held bytes."""
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
        """Call ``abandon`` if the client disconnects within the block."""
        if self._call_on_disconnect is not None:
            self._call_on_disconnect(abandon)
            try:
                yield
            finally:
                self._call_on_disconnect(None)
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
        """Call ``abandon`` when the client has disconnected. The body is complete, so nothing else can arrive."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        abandon()
