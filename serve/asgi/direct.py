"""The request that most are, answered without a task: one image for one model, with nothing else asked.

What a task, its timers and ASGI's messages cost is little by itself. Behind an engine that has just filled the caches,
all code that an answer passes through is slow.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from serve.asgi.application import CLIENT_GONE
from serve.asgi.asking import Asking, ClientGoneError
from serve.asgi.messages import Headers, Response, answer_response, slow_body
from serve.runtime.protocol import Request, looks_like_json

if TYPE_CHECKING:
    from serve.asgi.application import Application
    from serve.asgi.models import Served
    from serve.runtime.observing import Observation
    from serve.runtime.work import Answered

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
    if kind.startswith((b"application/json", b"multipart/")) or not _MORE.isdisjoint(headers):
        return 0
    return int(length) if length.isdigit() and len(length) < 20 and int(length) <= limit else 0


class Direct:
    """One such request. Used in the event loop, by its connection.

    What it may cost, what it is answered and what observers are told is as of any request; see `Application`.

    Attributes:
        answer: called once, with the answer and all its headers, unless the client goes before. Set by the connection.
        left: bytes of its body that have not come.
        other_body: all of its body, where that is no image, whatever its headers said: the request is somebody else's.

    Args:
        application: that answers it.
        served: the model.
        observation: what is known of it.
        length: of its body, above 0.
    """

    answer: Callable[[Response, Headers], None]

    def __init__(self, application: Application, served: Served, observation: Observation, length: int) -> None:
        self.left = length
        self._began = time.monotonic()
        self._application = application
        self._served = served
        self._observation = observation
        self.other_body: bytes | bytearray | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._body: bytes | bytearray = b""
        self._kept = 0
        self._asking: Asking | None = None
        served.hold()
        application.in_flight += 1

    def receive(self, data: memoryview) -> memoryview:
        """Take in what has come of its body, and have the image classified when it is whole; what came behind it."""
        mine, behind = data[: self.left], data[self.left :]
        if mine:
            self.left -= len(mine)
            self._kept += len(mine)
            try:
                self._keep(mine)
            except Exception as error:  # noqa: BLE001 - as of any request
                self._fail(error)
                return behind
            if not self.left:
                self._whole()
        if self.left and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._application.limits.body_s, self._too_late)
        return behind

    def abandon(self) -> None:
        """Say that the client has gone."""
        if self._asking is not None:
            self._asking.abandon()
        else:
            self._gone()

    def _keep(self, data: memoryview) -> None:
        self._application.held.take(len(data))
        if not self._body:
            self._body = bytes(data)
        else:
            if isinstance(self._body, bytes):
                self._body = bytearray(self._body)
            self._body += data

    def _whole(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if looks_like_json(self._body):
            self.other_body = self._body
            self._release()
            return
        try:
            request = Request((bytes(self._body),), self._served.serving.k, listed=False)
            self._body = b""
            self._observation.images = 1
            self._asking = Asking(self._served, request)
            self._asking.start(lambda found: self._settle(request, found))
        except Exception as error:  # noqa: BLE001 - as of any request
            self._fail(error)

    def _too_late(self) -> None:
        self._fail(slow_body(self._application.limits.body_s))

    def _settle(self, request: Request, found: Answered | Exception) -> None:
        if isinstance(found, ClientGoneError):
            self._gone()
            return
        if isinstance(found, Exception):
            self._fail(found)
            return
        self._observation.tell(found)
        try:
            response = answer_response(request, found.outcomes)
        except Exception as error:  # noqa: BLE001 - as of any request
            self._fail(error)
        else:
            self._finish(response)

    def _fail(self, error: Exception) -> None:
        self._finish(self._application.failed(error, self._observation))

    def _finish(self, response: Response) -> None:
        self._release()  # its client may take its time to read the answer
        self.answer(response, self._application.headers(response, self._observation, self._began))
        self._observe(response.status)

    def _gone(self) -> None:
        self._release()
        self._observation.refusals += ("client-gone",)
        self._observe(CLIENT_GONE)

    def _release(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._served.release()
        self._application.held.bytes -= self._kept
        self._application.in_flight -= 1

    def _observe(self, status: int) -> None:
        self._observation.status = status
        self._observation.seconds = time.monotonic() - self._began
        self._application.observe(self._observation)
