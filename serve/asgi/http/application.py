"""The ASGI callable: a request in, through token and router, an answer out, told to who observes."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from serve.asgi.http.call import Call, Held, Limits
from serve.asgi.http.inference_call import ClientGoneError
from serve.asgi.http.inline_inference import InlineInference
from serve.asgi.http.messages import (
    WHOLE,
    Headers,
    Receive,
    RefusedError,
    Response,
    Scope,
    Send,
    headers_of,
    no_memory,
    refusal_response,
    try_again,
)
from serve.asgi.http.router import Router
from serve.asgi.http.served_models import Models
from serve.runtime.errors import one_line
from serve.runtime.service.observation import Observation, Observer

if TYPE_CHECKING:
    from serve.asgi.http.tokens import Tokens

_LOG = logging.getLogger(__name__)

#: Of a request whose client went before its answer, as nginx logs it.
CLIENT_GONE = 499


class Application:
    """One server: its models, its routes, its tokens and who observes it. Used in one event loop.

    What speaks another protocol adds its paths to ``router``, its observers to ``observers``, and what lives beside
    the HTTP server (a gRPC server) to ``on_start`` and ``on_stop``.

    Attributes:
        models: who answers.
        router: what answers which path.
        observers: each is told of each request.
        on_start: awaited in order when the event loop runs, before a model is loaded.
        on_stop: awaited in reverse order when every accepted HTTP request is answered, before the services end.
        draining: set when the server is told to end: it is ready no more, and connections are closed as they answer.
        notes: lines for the person who starts it, filled until ``on_start`` is over.
        ends: by when what was accepted is answered, in seconds of `time.monotonic`, once it ends.
        in_flight: requests that are being received or answered, gRPC's too.
        held: bytes of their bodies.
        alone: whether they come one by one.

    Args:
        models: who answers.
        limits: what a client may cost.
        tokens: who may ask; None: everybody who reaches it.
    """

    def __init__(self, models: Models, *, limits: Limits | None = None, tokens: Tokens | None = None) -> None:
        self.models = models
        self.limits = limits or Limits()
        self.tokens = tokens
        self.router = Router()
        self.observers: list[Observer] = []
        self.on_start: list[Callable[[], Awaitable[None]]] = []
        self.on_stop: list[Callable[[], Awaitable[None]]] = []
        self.draining = False
        self.ends = math.inf
        self.notes: list[str] = []
        self.in_flight = 0
        self.held = Held(self.limits.held_bytes)
        self.inline = InlineInference(lambda: self.in_flight)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request; see the ASGI specification, version 3."""
        if scope["type"] != "http":
            raise ValueError(f"only HTTP is served, not {scope['type']}")
        call = Call(scope, receive, models=self.models, limits=self.limits, held=self.held, inline=self.inline)
        observation = call.observation
        self.in_flight += 1
        try:
            response = await self._answer(call, scope)
            call.release()  # its client may take its time to read the answer
            observation.status = response.status
            head = self.headers(response, observation, call.arrived)
            whole = scope.get("extensions", {}).get(WHOLE)
            if whole is None or not whole(response, head):
                await send({"type": "http.response.start", "status": response.status, "headers": head})
                await send({"type": "http.response.body", "body": response.body})
        except ClientGoneError:
            observation.status = CLIENT_GONE
            observation.refusals += ("client-gone",)
        finally:
            call.release()
            self.in_flight -= 1
            self.observe(observation, call.arrived)

    @property
    def ends_in(self) -> float:
        """Seconds that are left for what was accepted, when it ends."""
        return max(0.0, self.ends - time.monotonic())

    @property
    def unready(self) -> str | None:
        """Why no requests should be sent here, without a model's name; None: they should."""
        if self.draining:
            return "the server is ending"
        return None if self.models.ready else "not every model is loaded and answers as it should"

    def observe(self, observation: Observation, arrived: float) -> None:
        """Have the observers told of a request that is over, and came at ``arrived`` in seconds of `time.monotonic`.

        They are in the event loop's next turn. In this one its answer is written, which uvloop (0.23) sends at once.
        """
        observation.seconds = time.monotonic() - arrived
        asyncio.get_running_loop().call_soon(self._tell, observation)

    def _tell(self, observation: Observation) -> None:
        for observer in self.observers:
            observer(observation)

    def headers(self, response: Response, observation: Observation, arrived: float) -> Headers:
        """All headers of an answer, but for those that the HTTP server adds to each.

        Args:
            response: the answer.
            observation: what is known of its request.
            arrived: when that came, in seconds of `time.monotonic`.
        """
        headers = [*headers_of(response), (b"x-request-id", observation.request_id.encode())]
        if observation.version is not None:
            headers.append((b"x-model-version", observation.version.encode()))
        if observation.stages is not None:
            headers.append((b"server-timing", server_timing(observation, time.monotonic() - arrived)))
        if self.draining:
            headers.append((b"connection", b"close"))
        return headers

    def failed(self, error: Exception, observation: Observation) -> Response:
        """The answer to a request that ended so, which its observation is told of; a fault of ours is logged."""
        refused = error if isinstance(error, RefusedError) else fault(error, observation.request_id)
        observation.refusals += (refused.kind,)
        return refusal_response(refused)

    async def _answer(self, call: Call, scope: Scope) -> Response:
        try:
            route, call.parameters = self.router.find(call.method, scope["raw_path"].decode("latin-1"))
            call.observation.route, call.observation.probe = route.path, route.public
            if not route.public and self.tokens is not None:
                self.tokens.check(call.headers.get("authorization", ""))
            return await route.handler(call)
        except ClientGoneError:
            raise
        except asyncio.CancelledError:  # by the HTTP server, when the time for its end is over
            return self.failed(try_again("the server is ending: try again later", "ending"), call.observation)
        except Exception as error:  # noqa: BLE001 - one request's fault must not be the connection's
            return self.failed(error, call.observation)


def fault(error: Exception, request_id: str) -> RefusedError:
    """What a client is told of a fault of ours, which is logged: nothing of its text."""
    if isinstance(error, MemoryError):
        _LOG.error("request %s: too little memory: %s", request_id, one_line(error))
        return no_memory()
    _LOG.error("request %s failed", request_id, exc_info=error)
    return RefusedError(500, f"the server failed; its log has the reason under {request_id}", "fault")


def server_timing(observation: Observation, seconds: float) -> bytes:
    """The value of a ``Server-Timing`` header: each stage and the total, in milliseconds."""
    assert observation.stages is not None
    return f"{observation.stages.server_timing}, total;dur={seconds * 1e3:.2f}".encode()
