"""One request to a model's service from the event loop, whatever protocol it came by."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING

from serve.asgi.http.messages import RefusedError, queue_full
from serve.runtime.errors import EngineError, PipelineError, one_line

if TYPE_CHECKING:
    from serve.asgi.http.served_models import Served
    from serve.runtime.service.pending_request import Answered
    from serve.runtime.service.protocol import Request


class ClientGoneError(Exception):
    """The client has gone: there is nobody to answer."""


class InferenceCall:
    """A request on its way through a service. Used in the event loop, once.

    It has until its deadline, and no longer than ``response_timeout_s`` of how the model is served.

    Args:
        served: who answers; held by the caller until there is an answer.
        request: what is asked.
        deadline: when the client will have gone, in seconds of `time.monotonic`; None: never.
        here: whether it may be computed in the event loop.
    """

    def __init__(self, served: Served, request: Request, deadline: float | None = None, *, here: bool = False) -> None:
        self._served = served
        self._request = request
        self._here = here
        limit = time.monotonic() + served.serving.response_timeout_s
        self._clients_deadline = deadline is not None and deadline <= limit
        self._deadline = limit if deadline is None else min(deadline, limit)
        self._loop = asyncio.get_running_loop()
        self._tell: Callable[[Answered | Exception], None] | None = None
        self._computing: Future[Answered] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._gone = False

    async def answered(self) -> Answered:
        """The service's answer. Where it is not waited for any more, or is cancelled, nothing more is computed for it.

        Raises:
            RefusedError: 503 (queue full, or closed), 504 (deadline), 500 (the engine failed).
            ClientGoneError: it was abandoned.
        """
        outcome: asyncio.Future[Answered] = self._loop.create_future()

        def tell(found: Answered | Exception) -> None:
            if outcome.done():  # its task was cancelled in this turn of the loop
                return
            if isinstance(found, Exception):
                outcome.set_exception(found)
            else:
                outcome.set_result(found)

        self.start(tell)
        try:
            return await outcome
        finally:
            self.end()

    def start(self, tell: Callable[[Answered | Exception], None]) -> None:
        """Have it answered.

        Args:
            tell: called once, later or, where it is computed here, at once, with the answer or what `answered` raises.

        Raises:
            RefusedError: 503 (queue full, or closed), 504 (deadline), 500 (the device was lost before).
            ClientGoneError: it was abandoned before.
        """
        if self._gone:
            raise ClientGoneError
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise self._late()
        self._computing = computing = self._submit()
        self._tell = tell
        if self._here and computing.done():
            self._settle(computing)
            return
        try:
            self._timer = self._loop.call_later(left, self._give_up)
            computing.add_done_callback(lambda done: self._loop.call_soon_threadsafe(self._settle, done))
        except BaseException:
            self.end()
            raise

    def abandon(self) -> None:
        """Say that the client has gone."""
        self._gone = True
        self._finish(ClientGoneError())

    def _submit(self) -> Future[Answered]:
        try:
            return self._served.service.submit(self._request, deadline=self._deadline, here=self._here)
        except EngineError as error:
            raise RefusedError(500, f"the model failed: {error}", "engine") from None
        except PipelineError as error:
            raise queue_full(self._served.name, str(error)) from None

    def _settle(self, computing: Future[Answered]) -> None:
        if self._tell is None:
            return
        # Asked for, not caught: its traceback would hold what has it, which waited for the garbage collector.
        error = CancelledError() if computing.cancelled() else computing.exception()
        if error is None:
            self._finish(computing.result())
        elif isinstance(error, TimeoutError | CancelledError):
            self._give_up()
        else:  # an engine's library may fail in any way
            self._finish(RefusedError(500, f"the model failed: {one_line(error)}", "engine"))

    def _give_up(self) -> None:
        self._finish(self._late())

    def _finish(self, found: Answered | Exception) -> None:
        if (tell := self._tell) is not None:
            self.end()
            tell(found)

    def end(self) -> None:
        """Have nothing more computed, and nobody told."""
        self._tell = None
        if self._computing is not None:
            self._computing.cancel()
            self._computing = None  # it holds what it calls, and would wait for the garbage collector
        if self._timer is not None:
            self._timer.cancel()

    def _late(self) -> RefusedError:
        if self._clients_deadline:
            message = "the deadline that came with the request is over: nothing more is computed"
            return RefusedError(504, message, "deadline")
        seconds = self._served.serving.response_timeout_s
        message = f"{self._served.name} did not answer within {seconds} s: nothing more is computed"
        return RefusedError(504, message, "timeout")
