"""What is refused without a task: a request for a model whose queue is full, and what is no request.

Under overload most requests end with a full queue, and what they cost is taken from those that are answered.
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
    """Refuses for one application what needs no task. Used in its event loop.

    The answer, and what observers are told, are those that the application would give and tell.

    Args:
        application: whose routes, models and tokens these are.
    """

    def __init__(self, application: Application) -> None:
        self._application = application

    def __call__(
        self, method: bytes, url: bytes, headers: Sequence[tuple[bytes, bytes]]
    ) -> tuple[Response, Headers] | None:
        """The refusal of a request and all its headers; None: the application answers it.

        Args:
            method: in capitals.
            url: path and query, as they came.
            headers: with names in lower case.
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
        if not self._may_ask(given):
            return None
        observation = Observation(
            request_id(given.get(b"x-request-id", b"").decode("latin-1")), route, served.name, served.version
        )
        began = time.monotonic()
        kind, response = _refusal(served.name, full)
        observation.status, observation.refusals = response.status, (kind,)
        return response, self._observed(response, observation, began)

    def unread(self, refused: RefusedError) -> tuple[Response, Headers]:
        """The answer to what is no request, and all its headers. The connection is closed behind it."""
        response = refusal_response(refused)
        observation = Observation(request_id(""), status=refused.status, refusals=(refused.kind,))
        return response, self._observed(response, observation, time.monotonic())

    def _may_ask(self, given: Mapping[bytes, bytes]) -> bool:
        """Whether a request has a valid token, or needs none."""
        tokens = self._application.tokens
        try:
            if tokens is not None:
                tokens.check(given.get(b"authorization", b"").decode("latin-1"))
        except RefusedError:
            return False
        return True

    def _observed(self, response: Response, observation: Observation, began: float) -> Headers:
        """All headers of an answer, of which the observers are told."""
        headers = self._application.headers(response, observation, began)
        self._application.observe(observation, began)
        return headers


@functools.lru_cache(maxsize=256)
def _refusal(model: str, reason: str) -> tuple[str, Response]:
    """The word for a refusal, and its answer without what is this request's: as long as a queue is full, it is one."""
    refused = queue_full(model, reason)
    return refused.kind, refusal_response(refused)
