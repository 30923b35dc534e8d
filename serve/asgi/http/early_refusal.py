"""Refusals without a task: of a request for a model whose queue is full, and of data that is not a request.

Under overload most requests meet a full queue, and their cost slows down the others.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from serve.asgi.http.messages import Headers, RefusedError, Response, queue_full, refusal_response
from serve.runtime.service.observation import Observation, request_id

if TYPE_CHECKING:
    from serve.asgi.http.application import Application

_ROUTES = {2: "/predictions/{name}", 3: "/predictions/{name}/{version}"}


class EarlyRefusal:
    """Refuses requests of one application that need no task. Use it in the application's event loop.

    The response and the observation are the same as the application's.

    Args:
        application: the application with the routes, models and tokens.
    """

    def __init__(self, application: Application) -> None:
        self._application = application

    def __call__(
        self, method: bytes, url: bytes, headers: Sequence[tuple[bytes, bytes]]
    ) -> tuple[Response, Headers] | None:
        """Return the refusal of a request and all its headers. None: the application must answer the request.

        Args:
            method: the method in capitals.
            url: path and query, as received.
            headers: the headers, with names in lower case.
        """
        application = self._application
        if method not in (b"POST", b"PUT") or not url.startswith(b"/predictions/") or application.draining:
            return None
        path = url.partition(b"?")[0]
        words = path[1:].split(b"/")
        route = _ROUTES.get(len(words))
        if route is None or b"%" in url:
            return None
        name, *version = (word.decode("latin-1") for word in words[1:])
        served = application.models.only(name, *version)
        if served is None or (full := served.service.full) is None:
            return None
        given = dict(headers)
        if not self._is_authorised(given):
            return None
        observation = Observation(
            request_id(given.get(b"x-request-id", b"").decode("latin-1")), route, served.name, served.version
        )
        began = time.monotonic()
        kind, response = _refusal(served.name, full)
        observation.status, observation.refusals = response.status, (kind,)
        return response, self._observe_response(response, observation, began)

    def unread(self, refused: RefusedError) -> tuple[Response, Headers]:
        """Return the response to data that is not a request, and all its headers. The connection closes after it."""
        response = refusal_response(refused)
        observation = Observation(request_id(""), status=refused.status, refusals=(refused.kind,))
        return response, self._observe_response(response, observation, time.monotonic())

    def _is_authorised(self, given: Mapping[bytes, bytes]) -> bool:
        """Whether a request has a valid token, or needs none."""
        tokens = self._application.tokens
        try:
            if tokens is not None:
                tokens.check(given.get(b"authorization", b"").decode("latin-1"))
        except RefusedError:
            return False
        return True

    def _observe_response(self, response: Response, observation: Observation, began: float) -> Headers:
        """Inform the observers of a response. Return all its headers."""
        headers = self._application.headers(response, observation, began)
        self._application.observe(observation, began)
        return headers


@functools.lru_cache(maxsize=256)
def _refusal(model: str, reason: str) -> tuple[str, Response]:
    """Return the kind and the response of a refusal, without the headers of one request.

    It is computed once for as long as a queue is full.
    """
    refused = queue_full(model, reason)
    return refused.kind, refusal_response(refused)
