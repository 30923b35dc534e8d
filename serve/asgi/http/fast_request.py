"""A prediction for one image by one model, answered without an asyncio task: what most requests are.

What a task, its timers and ASGI's messages cost is little by itself. Behind an engine that has just filled the caches,
all code that an answer passes through is slow.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Protocol, TypeVar

from serve.asgi.http.application import CLIENT_GONE
from serve.asgi.http.inference_call import InferenceCall
from serve.asgi.http.messages import LONG_BODY, Headers, Response, answer_response, bad_request, is_long, slow_body
from serve.runtime.errors import RequestError
from serve.runtime.service.protocol import Request, looks_like_json, parse

if TYPE_CHECKING:
    from serve.asgi.http.application import Application
    from serve.asgi.http.served_models import Served
    from serve.runtime.service.observation import Observation
    from serve.runtime.service.pending_request import Answered

_T = TypeVar("_T")
_LOG = logging.getLogger(__name__)

# What asks for more than the classes of the body as it comes, or in another way.
_MORE = frozenset((b"transfer-encoding", b"content-encoding", b"expect", b"x-top-k", b"x-request-deadline-ms"))


def image_bytes(headers: Mapping[bytes, bytes], limit: int) -> int:
    """The length of a body that is one image, by its request's headers, and nothing else asked; 0: it may not be so.

    Args:
        headers: with names in lower case.
        limit: of the length.
    """
    length = headers.get(b"content-length", b"")
    kind = headers.get(b"content-type", b"").lower()
    # Anywhere in it: `parse` strips what a text's `strip` does, which of latin-1 are 0x85 and 0xa0 too.
    if b"application/json" in kind or b"multipart/" in kind or not _MORE.isdisjoint(headers):
        return 0
    return int(length) if length.isdigit() and len(length) < 20 and int(length) <= limit else 0


class Connection(Protocol):
    """What a request on the fast path needs of the connection that it came by."""

    transport: asyncio.Transport

    def answer_fast(self, request: FastRequest, response: Response, headers: Headers) -> None:
        """Write the answer to the request."""

    def go_on(self) -> None:
        """Take up what has come behind it."""


class FastRequest:
    """One request on the fast path. Used in the event loop, by its connection.

    What it may cost, what it is answered and what observers are told is as of any request; see `Application`.

    Attributes:
        connection: that it came by, set by that.
        left: bytes of its body that have not come.

    Args:
        application: that answers it.
        served: the model.
        observation: what is known of it.
        length: of its body, above 0.
    """

    connection: Connection

    def __init__(self, application: Application, served: Served, observation: Observation, length: int) -> None:
        self.left = length
        self._began = time.monotonic()
        self._application = application
        self._served = served
        self._observation = observation
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._body: bytes | bytearray = b""
        self._kept = 0
        self._inference: InferenceCall | None = None
        self._over = False
        self._more = False  # whether its client has sent more behind it
        served.hold()
        application.in_flight += 1

    def receive(self, data: memoryview) -> memoryview:
        """Take in what has come of its body, and have it answered when that is whole; what has come behind it."""
        mine, behind = data[: self.left], data[self.left :]
        self._more = bool(behind)
        if mine:
            self.left -= len(mine)
            self._kept += len(mine)
            try:
                self._keep(mine)
                if not self.left:
                    self._whole()
            except Exception as error:  # noqa: BLE001 - as of any request
                self.fail(error)
                return behind
        if self.left and self._timer is None:
            self._timer = self._loop.call_later(self._application.limits.body_s, self._too_late)
        return behind

    def fail(self, error: Exception) -> None:
        """Answer that it is refused, or that it failed; nothing more is computed for it."""
        self._finish(self._application.failed(error, self._observation))

    def abandon(self) -> None:
        """Say that the client has gone."""
        if not self._over:
            self._release()
            self._observation.refusals += ("client-gone",)
            self._observe(CLIENT_GONE)

    def _keep(self, data: memoryview) -> None:
        self._application.held.take(len(data))
        if not self._body:
            self._body = bytes(data)
        else:
            if isinstance(self._body, bytes):
                self._body = bytearray(self._body)
            self._body += data

    def _too_late(self) -> None:
        self.fail(slow_body(self._application.limits.body_s))

    def _whole(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        # It may be JSON, whatever its headers say.
        if len(self._body) > LONG_BODY and looks_like_json(self._body):
            self._in_thread(self._parse, self._ask)
        else:
            self._ask(self._parse())

    def _parse(self) -> Request:
        serving, parameters = self._served.serving, {"body": self._body}
        try:
            return parse(
                parameters,
                says_json=False,
                request_type="none",
                default_k=serving.k,
                instance_limit=serving.instance_limit,
            )
        except RequestError as error:
            raise bad_request(error) from None

    def _ask(self, request: Request) -> None:
        self._body = b""
        self._observation.images = len(request.images)
        application, served = self._application, self._served
        one_by_one = application.inline.allows(self.connection, served, request, application.in_flight)
        here = one_by_one and not self._more
        self._inference = InferenceCall(served, request, here=here)
        with application.inline.computing(self.connection, served) if here else nullcontext():
            self._inference.start(lambda found: self._settle(request, found))

    def _settle(self, request: Request, found: Answered | Exception) -> None:
        if isinstance(found, Exception):
            self.fail(found)
            return
        self._observation.tell(found)
        write = functools.partial(answer_response, request, found.outcomes)
        if is_long(request):
            self._in_thread(write, self._finish)
            return
        try:
            response = write()
        except Exception as error:  # noqa: BLE001 - as of any request
            self.fail(error)
        else:
            self._finish(response)

    def _in_thread(self, work: Callable[[], _T], then: Callable[[_T], None]) -> None:
        """Do what takes long beside the event loop, and then the rest in it."""

        def done(future: asyncio.Future[_T]) -> None:
            if self._over:
                future.exception()  # nobody is to be told of it
                return
            try:
                then(future.result())
            except Exception as error:  # noqa: BLE001 - as of any request
                self.fail(error)

        self._loop.run_in_executor(None, work).add_done_callback(done)

    def _finish(self, response: Response) -> None:
        if self._over:
            return
        self._release()  # its client may take its time to read the answer
        try:
            self.connection.answer_fast(
                self, response, self._application.headers(response, self._observation, self._began)
            )
        except Exception:  # noqa: BLE001 - or the connection would wait for ever
            _LOG.exception("request %s is not answered", self._observation.request_id)
            self.connection.transport.abort()
        self._observe(response.status)
        self.connection.go_on()

    def _release(self) -> None:
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
        if self._inference is not None:
            self._inference.end()
        self._served.release()
        self._application.held.bytes -= self._kept
        self._application.in_flight -= 1

    def _observe(self, status: int) -> None:
        self._observation.status = status
        self._application.observe(self._observation, self._began)
