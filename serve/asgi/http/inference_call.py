"""One call of a model's service from the event loop, for every protocol."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from serve.asgi.http.messages import RefusedError, queue_full
from serve.runtime.errors import EngineError, PipelineError, one_line

if TYPE_CHECKING:
    from serve.asgi.http.served_models import Served
    from serve.runtime.service.pending_request import Answered
    from serve.runtime.service.protocol import Request


class ClientGoneError(Exception):
    """The client disconnected, so nobody waits for the response."""


class InferenceCall:
    """A request on its way through a service. Use it in the event loop, once.

    It has time until its deadline, but at most the ``response_timeout_s`` of the model's serving settings.

    Args:
        served: the model. The caller holds it until there is an answer.
        request: the request.
        deadline: when the client gives up, in seconds of `time.monotonic`. None: never.
        here: the block in which the event loop may compute the answer itself. None: it may not.
    """

    def __init__(
        self,
        served: Served,
        request: Request,
        deadline: float | None = None,
        here: AbstractContextManager[None] | None = None,
    ) -> None:
        self._served = served
        self._request = request
        self._here = here
        limit = time.monotonic() + served.serving.response_timeout_s
        self._clients_deadline = deadline is not None and deadline <= limit
        self._deadline = limit if deadline is None else min(deadline, limit)
        self._outcome: asyncio.Future[Answered] | None = None
        self._gone = False

    async def answered(self) -> Answered:
        """Return the service's answer. On a timeout, a disconnect or a cancellation nothing more is computed.

        Raises:
            RefusedError: 503 (queue full, or closed), 504 (deadline), 500 (the engine failed).
            ClientGoneError: the call was abandoned.
        """
        if self._gone:
            raise ClientGoneError
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise self._late()
        computing = self._submit()
        loop = asyncio.get_running_loop()
        self._outcome = loop.create_future()
        timer = loop.call_later(left, self._end_late)
        try:
            if computing.done():
                self._settle(computing)
            else:
                computing.add_done_callback(lambda done: loop.call_soon_threadsafe(self._settle, done))
            return await self._outcome
        finally:
            timer.cancel()
            computing.cancel()
            self._outcome = None

    def abandon(self) -> None:
        """Give up the call, because the client disconnected."""
        self._gone = True
        self._fail(ClientGoneError())

    def _submit(self) -> Future[Answered]:
        try:
            if self._here is None:
                return self._served.service.submit(self._request, deadline=self._deadline)
            with self._here:
                return self._served.service.submit(self._request, deadline=self._deadline, here=True)
        except EngineError as error:
            raise RefusedError(500, f"the model failed: {error}", "engine") from None
        except PipelineError as error:
            raise queue_full(self._served.name, str(error)) from None

    def _settle(self, computing: Future[Answered]) -> None:
        if self._outcome is None or self._outcome.done():
            return
        # `exception()` returns the error. A caught one has a traceback that refers to its owner, which then stays until
        # the garbage collector runs.
        error = CancelledError() if computing.cancelled() else computing.exception()
        if error is None:
            self._outcome.set_result(computing.result())
        elif isinstance(error, TimeoutError | CancelledError):
            self._end_late()
        else:  # an engine's library may fail in any way
            self._fail(RefusedError(500, f"the model failed: {one_line(error)}", "engine"))

    def _end_late(self) -> None:
        self._fail(self._late())

    def _fail(self, error: Exception) -> None:
        if self._outcome is not None and not self._outcome.done():
            self._outcome.set_exception(error)

    def _late(self) -> RefusedError:
        if self._clients_deadline:
            message = "the request's deadline has passed: the server stopped computing"
            return RefusedError(504, message, "deadline")
        seconds = self._served.serving.response_timeout_s
        message = f"{self._served.name} did not answer within {seconds} s: the server stopped computing"
        return RefusedError(504, message, "timeout")
