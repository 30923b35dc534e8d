"""The ASGI application: it checks the token, routes a request, returns its response and informs the observers."""

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

#: Status of a request whose client disconnected before the response. nginx logs the same number.
CLIENT_GONE = 499


class Application:
    """One server: its models, routes, tokens and observers. Use it in one event loop only.

    To add a protocol, add its paths to ``router`` and its observers to ``observers``. What runs beside the HTTP server,
    for example a gRPC server, starts in ``on_start`` and stops in ``on_stop``.

    Attributes:
        models: the models that answer requests.
        router: maps paths to handlers.
        observers: called with the observation of each finished request.
        on_start: awaited in order once the event loop runs, before a model is loaded.
        on_stop: awaited in reverse order once every accepted HTTP request is answered, before the services end.
        draining: True once the server shuts down. It is then not ready, and each response closes its connection.
        notes: lines for the person who starts the server, complete when ``on_start`` is over.
        ends: when the time to answer accepted requests is over, in seconds of `time.monotonic`. Infinite until
            shutdown.
        in_flight: number of requests that are being received or answered, gRPC included.
        held: bytes of their bodies.
        inline: decides whether the event loop may run the inference itself.

    Args:
        models: the models that answer requests.
        limits: what a client may cost.
        tokens: the valid tokens. None: no token is needed.
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
        """Answer one HTTP request (ASGI specification, version 3)."""
        if scope["type"] != "http":
            raise ValueError(f"this server accepts only HTTP, not {scope['type']}")
        call = Call(scope, receive, models=self.models, limits=self.limits, held=self.held, inline=self.inline)
        observation = call.observation
        self.in_flight += 1
        try:
            response = await self._answer(call, scope)
            call.release()  # the client may read the response slowly
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
        """Seconds left to answer accepted requests. Infinite until the server shuts down."""
        return max(0.0, self.ends - time.monotonic())

    @property
    def unready(self) -> str | None:
        """Why a load balancer should send no requests here, without a model's name. None: it should."""
        if self.draining:
            return "the server is ending"
        return None if self.models.ready else "not every model is loaded and ready"

    def observe(self, observation: Observation, arrived: float) -> None:
        """Inform the observers of a finished request that arrived at ``arrived``, in seconds of `time.monotonic`.

        They run in the next turn of the event loop. This turn writes the response, and uvloop (0.23) sends it at once.
        """
        observation.seconds = time.monotonic() - arrived
        asyncio.get_running_loop().call_soon(self._tell, observation)

    def _tell(self, observation: Observation) -> None:
        for observer in self.observers:
            observer(observation)

    def headers(self, response: Response, observation: Observation, arrived: float) -> Headers:
        """Return all headers of a response, except those that the HTTP server adds to every response.

        Args:
            response: the response.
            observation: what is known of its request.
            arrived: when the request arrived, in seconds of `time.monotonic`.
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
        """Return the response to a request that raised ``error``, and record the refusal. Log an internal fault."""
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
        except asyncio.CancelledError:  # the HTTP server cancels when the time to drain is over
            return self.failed(try_again("the server is shutting down: try again later", "ending"), call.observation)
        except Exception as error:  # noqa: BLE001 - a fault in one request must not end the connection
            return self.failed(error, call.observation)


def fault(error: Exception, request_id: str) -> RefusedError:
    """Log an internal fault and return the refusal for it. The client sees nothing of the fault's text."""
    if isinstance(error, MemoryError):
        _LOG.error("request %s: not enough memory: %s", request_id, one_line(error))
        return no_memory()
    _LOG.error("request %s failed", request_id, exc_info=error)
    return RefusedError(500, f"the server failed; see the reason in its log under {request_id}", "fault")


def server_timing(observation: Observation, seconds: float) -> bytes:
    """Return the value of a ``Server-Timing`` header: each stage and the total, in milliseconds."""
    assert observation.stages is not None
    return f"{observation.stages.server_timing}, total;dur={seconds * 1e3:.2f}".encode()
