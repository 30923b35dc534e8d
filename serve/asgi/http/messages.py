"""Requests, responses and refusals as handlers see them. Nothing here depends on a model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from serve.runtime.errors import PipelineError, RequestError
from serve.runtime.service.protocol import Request, answer

if TYPE_CHECKING:
    from serve.runtime.tasks.base import Outcome, Task

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

#: ASGI extension: answers in one write. Called with a `Response` and all its headers; returns whether it answered.
WHOLE: Final = "serve.whole"
#: ASGI extension: reports a disconnect. Called with the function to call then, at once if the client is gone already.
#: Called with None to cancel that.
GONE: Final = "serve.gone"
#: ASGI extension, present if the rest of a body cannot be read: the `RefusedError` for the request.
FAULT: Final = "serve.fault"
#: ASGI extension: the connection itself, whose ``waiting`` counts its waiting requests.
CONNECTION: Final = "serve.connection"
#: Seconds after which a client that was refused for lack of capacity may try again.
RETRY_AFTER_S: Final = 1
#: The header for it.
RETRY: Final = (("retry-after", str(RETRY_AFTER_S)),)
#: Bytes of a body above which parsing (JSON, base64, a form) may take longer than a switch to a thread. A thread then
#: parses it, and the event loop can answer others.
LONG_BODY: Final = 32 * 1024
# Values in an answer above which a thread writes it too. About 5 ms.
_LONG_ANSWER = 4096

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Response:
    """One response: HTTP status, body, content type, and further headers with lower-case names."""

    status: int
    body: bytes
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()


class RefusedError(PipelineError):
    """A refused request: a status and one line of text for the client, a ``kind`` for metrics and logs.

    Kinds are fixed words, for example ``unknown-model``, ``queue-full`` or ``deadline``. They never contain client
    data.

    Args:
        status: HTTP status.
        message: one line that says what is wrong and what would be right.
        kind: the word for it in metrics and logs.
        headers: further headers of the response, with lower-case names.
    """

    def __init__(self, status: int, message: str, kind: str, headers: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.headers = headers


def try_again(message: str, kind: str) -> RefusedError:
    """Return a refusal with 503 and a time to retry: the same request may succeed later."""
    return RefusedError(503, message, kind, RETRY)


def queue_full(model: str, reason: str) -> RefusedError:
    """Return the refusal of a request for which a model's service has no room."""
    return try_again(f"{model}: {reason}", "queue-full")


def slow_body(seconds: float) -> RefusedError:
    """Return the refusal of a body that did not arrive within ``seconds``."""
    return RefusedError(408, f"the body did not arrive within {seconds:g} s", "slow-client")


def no_memory() -> RefusedError:
    """Return the refusal of a request for which this process has too little memory."""
    return try_again("the server does not have enough memory for the request now: try again later", "memory")


def bad_request(error: RequestError) -> RefusedError:
    """Return the refusal of a request that could not be parsed."""
    return RefusedError(error.status, str(error), "bad-request")


def json_response(status: int, body: object, headers: tuple[tuple[str, str], ...] = ()) -> Response:
    """Return a JSON document as a response."""
    return Response(status, json.dumps(body, allow_nan=False).encode(), headers=headers)


def is_long(task: Task, request: Request) -> bool:
    """Whether a thread writes the response, so that the event loop can answer others meanwhile."""
    return len(request.images) * task.size(request.options) > _LONG_ANSWER


async def written(task: Task, request: Request, write: Callable[[], _T]) -> _T:
    """Return the result of ``write``. A long response is written in a thread; see `is_long`."""
    return await asyncio.to_thread(write) if is_long(task, request) else write()


async def written_answer(task: Task, request: Request, outcomes: Sequence[Outcome]) -> Response:
    """Return the results of a request's images, in the format of TorchServe's handler and KServe v1."""
    reply = await written(task, request, lambda: answer(task, request, outcomes))
    headers = RETRY if reply.status == 503 else ()
    return Response(reply.status, reply.body, reply.content_type, headers)


def headers_of(response: Response) -> Headers:
    """Return the headers of a response: content type, length, and its own."""
    return [
        (b"content-type", response.content_type.encode()),
        (b"content-length", str(len(response.body)).encode()),
        *((name.encode(), value.encode("latin-1", "replace")) for name, value in response.headers),
    ]


def refusal_response(error: RefusedError) -> Response:
    """Return a refusal as ``{"error": …}``, like TorchServe's handler, KServe v1 and the Open Inference Protocol."""
    return json_response(error.status, {"error": str(error)}, error.headers)
