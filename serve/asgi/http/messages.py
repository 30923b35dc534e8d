"""What a route gets of one request and what it gives back; nothing here knows a model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from serve.runtime.errors import PipelineError, RequestError
from serve.runtime.service import protocol

if TYPE_CHECKING:
    from serve.runtime.service.predictor import Outcome

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

#: The ASGI extension of a connection that answers in one write: called with a `Response` and all its headers, it tells
#: whether it did.
WHOLE: Final = "serve.whole"
#: The ASGI extension of a connection that tells by itself when its client goes: called with who is to be called then,
#: at once where it has gone, or with None: nobody.
GONE: Final = "serve.gone"
#: The ASGI extension of a connection that is there when the rest of a body cannot be read: the `RefusedError` for it.
FAULT: Final = "serve.fault"
#: The ASGI extension of a connection that says who asks: itself, with its requests that are ``waiting``.
CONNECTION: Final = "serve.connection"
#: Seconds after which who was refused for want of room may try again.
RETRY_AFTER_S: Final = 1
#: What tells them.
RETRY: Final = (("retry-after", str(RETRY_AFTER_S)),)
#: Bytes of a body above which parsing it (JSON, base64, a form) may take longer than changing to a thread. It is left
#: to one then, so that the event loop answers others meanwhile.
LONG_BODY: Final = 32 * 1024
# Classes in an answer above which the same holds of writing it: about 5 ms.
_LONG_ANSWER = 4096

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Response:
    """One answer: HTTP status, body, content type, and further headers with lower-case names."""

    status: int
    body: bytes
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()


class RefusedError(PipelineError):
    """A request that gets no answer: `status` and one line of text for the client, a `kind` for who counts.

    Kinds are words that never hold anything of the client's: ``unknown-model``, ``queue-full``, ``deadline`` …

    Args:
        status: HTTP status.
        message: one line: what is wrong, and what would be right.
        kind: the word for it in metrics and logs.
        headers: further headers of the answer, with lower-case names.
    """

    def __init__(self, status: int, message: str, kind: str, headers: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.headers = headers


def try_again(message: str, kind: str) -> RefusedError:
    """A refusal with 503 that says when to come back: the same request may be answered later."""
    return RefusedError(503, message, kind, RETRY)


def queue_full(model: str, reason: str) -> RefusedError:
    """A refusal of a request for which a model's service has no room."""
    return try_again(f"{model}: {reason}", "queue-full")


def slow_body(seconds: float) -> RefusedError:
    """A refusal of a body that did not arrive whole in so many seconds."""
    return RefusedError(408, f"the body did not arrive within {seconds:g} s", "slow-client")


def no_memory() -> RefusedError:
    """A refusal of what this process has no memory for."""
    return try_again("the server has too little memory for the request now: try again later", "memory")


def bad_request(error: RequestError) -> RefusedError:
    """A refusal of what a request's reader could not make sense of."""
    return RefusedError(error.status, str(error), "bad-request")


def json_response(status: int, body: object, headers: tuple[tuple[str, str], ...] = ()) -> Response:
    """A JSON document as an answer."""
    return Response(status, json.dumps(body, allow_nan=False).encode(), headers=headers)


def answer_response(request: protocol.Request, outcomes: Sequence[Outcome]) -> Response:
    """What became of a request's images, as TorchServe's handler and KServe v1 write it."""
    status, body = protocol.answer(request, outcomes)
    return Response(status, body, headers=RETRY if status == 503 else ())


def is_long(request: protocol.Request) -> bool:
    """Whether an answer is written in a thread, because the event loop answers others meanwhile."""
    return len(request.images) * request.k > _LONG_ANSWER


async def written(request: protocol.Request, write: Callable[[], _T]) -> _T:
    """What ``write`` makes of a request's outcomes; of many, in a thread (see `is_long`)."""
    return await asyncio.to_thread(write) if is_long(request) else write()


def headers_of(response: Response) -> Headers:
    """What an answer says of itself: the type and length of its body, and its own headers."""
    return [
        (b"content-type", response.content_type.encode()),
        (b"content-length", str(len(response.body)).encode()),
        *((name.encode(), value.encode("latin-1", "replace")) for name, value in response.headers),
    ]


def refusal_response(error: RefusedError) -> Response:
    """A refusal as TorchServe's handler, KServe v1 and the Open Inference Protocol all write it: ``{"error": …}``."""
    return json_response(error.status, {"error": str(error)}, error.headers)
