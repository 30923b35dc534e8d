"""A connection's requests and answers: an answer in one write, a refusal by its head without a task, no body twice.

uvicorn 0.54 reads a body of any length behind an answer that was given early, and copies each body twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from serve.asgi.http.call import Limits
from serve.asgi.http.limited_connection import LimitedConnection
from serve.asgi.http.messages import CONNECTION, FAULT, GONE, WHOLE, Headers, RefusedError, Response, no_memory

if TYPE_CHECKING:
    from serve.asgi.http.early_refusal import EarlyRefusal

_HEAD_END = b"\r\n\r\n"
_CLOSE = (b"connection", b"close")

# For a request that was sent before its client could know that the server ends.
_ON_ITS_WAY_S = 1.0


class GuardedConnection(LimitedConnection):
    """One connection; see `Limits`.

    Args:
        limits: what a client may cost.
        early_refusal: asked for each request that nothing is before on the connection, and told of what is no request.
        settings: uvicorn's own.
    """

    def __init__(self, limits: Limits, early_refusal: EarlyRefusal, **settings: Any) -> None:
        super().__init__(limits, **settings)
        self._early_refusal = early_refusal
        self._refused_early = False  # by its head: of this request there is no cycle
        self._to_drop = 0  # bytes of the body of a request that was answered so
        self._dropped = 0  # those of them that the parser had
        self._tell_gone: Callable[[], None] | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        super().connection_lost(exc)
        if self._tell_gone is not None:
            self._tell_gone()

    def data_received(self, data: bytes) -> None:
        """Take in bytes."""
        if self._unreadable:
            return
        rest = memoryview(data)
        if self._to_drop:
            rest = self._drop(rest)
        elif not self._in_body and (end := data.find(_HEAD_END) + len(_HEAD_END)) >= len(_HEAD_END):
            # By itself: the body of a request that is refused by its head needs no parser.
            self._take(rest[:end])
            rest = self._drop_body(rest[end:])
        if rest:
            self._take(rest)
        if self._refused_early and self._in_body:
            self._linger()

    def _drop_body(self, data: memoryview) -> memoryview:
        """Begin to pass over a body behind its head, where its request is answered and its length known."""
        if self._refused_early and self._in_body:
            length = next(
                (int(value.lstrip(b"0") or b"0") for name, value in self.headers if name == b"content-length"), 0
            )
            self._to_drop = max(0, length - self._dropped)
        return self._drop(data) if self._to_drop else data

    def _drop(self, data: memoryview) -> memoryview:
        """Pass over the body of a refused request; what is behind it."""
        self._unset_keepalive_if_required()
        passed = min(self._to_drop, len(data))
        self._to_drop -= passed
        if not self._to_drop:
            self._in_body = False
            self._linger_timer.end()
            self._renew_parser()
            if not self.transport.is_closing():
                self._lie_idle()
        return data[passed:]

    def _begin_request(self) -> None:
        found = None
        if self._is_plain():
            found = self._early_refusal(self.parser.get_method(), self.url, self.headers)
        if found is None:
            self._refused_early = False
            super()._begin_request()
            whole = functools.partial(self._answer, self.cycle)
            self.scope["extensions"] = cast("Any", {WHOLE: whole, GONE: self._when_gone, CONNECTION: self})
        else:
            self._refused_early, self._dropped = True, 0
            self._write(*found)
            self.on_response_complete()
            self._in_body = True  # its end has mostly come, too: see `data_received` for one that has not

    def on_body(self, body: bytes) -> None:
        """A part of its body is there."""
        self._chunked_bytes += len(body)
        if self._refused_early:
            self._dropped += len(body)
            return
        cycle = self.cycle
        if FAULT in _extensions(cycle):
            return
        before = cast("bytes | bytearray", cycle.body)
        if before or cycle.response_complete:
            try:
                if isinstance(before, bytes):
                    cycle.body = bytearray(before)
                super().on_body(body)
            except MemoryError:
                self._refuse(no_memory())
            return
        # Most bodies come in one part: the application gets the very bytes.
        cycle.body = body  # type: ignore[assignment]
        if len(body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        cycle.message_event.set()

    def on_message_complete(self) -> None:
        """Its body is there."""
        if self.parser.should_upgrade():  # its head is: see `_read_on`
            return
        self._in_body = False
        self._linger_timer.end()
        if not self._refused_early:
            super().on_message_complete()
        idle = self.timeout_keep_alive_task is None and not self.pipeline and not self.transport.is_closing()
        if idle and (self._refused_early or self.cycle.response_complete):
            self._lie_idle()

    @property
    def waiting(self) -> int:
        """How many requests wait for the one that is being answered."""
        return len(self.pipeline)

    def shutdown(self) -> None:
        """The server ends: answer the request that is coming or on its way, and close.

        The answer tells the client that the connection is closed. Where nothing comes for a moment, nothing is lost.
        """
        if self._is_idle:
            self.loop.call_later(_ON_ITS_WAY_S, self._end_idle)
        else:
            super().shutdown()

    def _when_gone(self, tell: Callable[[], None] | None) -> None:
        self._tell_gone = tell
        if tell is not None and self.transport.is_closing():
            tell()

    def _answer(self, cycle: RequestResponseCycle, response: Response, headers: Headers) -> bool:
        """Answer a request in one write, where its client reads on; whether it was done.

        uvicorn's ``send`` writes head and body one after the other: two segments, for each of which a client wakes up.
        """
        if self.flow.write_paused or cycle.disconnected or cycle.response_started:
            return False
        self._write(response, headers, head_only=cycle.scope["method"] == "HEAD", last=not cycle.keep_alive)
        cycle.response_started = cycle.response_complete = True
        cycle.message_event.set()
        cycle.on_response()
        cycle.scope["extensions"] = {}  # they hold the cycle, which would wait for the garbage collector
        return True

    def _refuse(self, refused: RefusedError) -> None:
        """Have the application refuse the request whose body comes, in its turn; what still comes of it is dropped."""
        self.cycle.body = bytearray()
        _extensions(self.cycle)[FAULT] = refused
        self.cycle.message_event.set()

    def _write(self, response: Response, headers: Headers, *, head_only: bool = False, last: bool = False) -> None:
        """Write an answer, and close where it is the last, which it may say itself."""
        if last and _CLOSE not in headers:
            headers = [*headers, _CLOSE]
        lines = [b"%s: %s\r\n" % pair for pair in (*self.server_state.default_headers, *headers)]
        body = b"" if head_only else response.body
        self.transport.write(b"".join((STATUS_LINE[response.status], *lines, b"\r\n", body)))
        if _CLOSE in headers:
            self.transport.close()

    @property
    def _is_idle(self) -> bool:
        """Whether every request has its answer."""
        return self.cycle is None or self.cycle.response_complete

    def _is_plain(self) -> bool:
        """Whether nothing is before this request, and nothing ends after it."""
        return (
            self._is_idle
            and not self.flow.write_paused
            and self.parser.should_keep_alive()
            and not self.parser.should_upgrade()
            and self.parser.get_http_version() == "1.1"
        )

    def _end_idle(self) -> None:
        if self._is_idle and not self._head_bytes:  # half a head is ended by its timer
            self._close()

    def _end(self, refused: RefusedError) -> None:
        """Read no further, and close when all that was asked before is answered.

        Where a body ends so, its request is refused; where no request does, nothing is before it and its answer would
        not be taken for another's, this is told to the client.
        """
        self._unreadable = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False
            if self._in_body:
                self._refuse(refused)
                return
        elif not self._in_body:  # or it has its answer, and is closed in a moment: see `_linger`
            self._write(*self._early_refusal.unread(refused), last=True)
            return
        self._early_refusal.unread(refused)


def _extensions(cycle: RequestResponseCycle) -> dict[str, Any]:
    """What the application is told beside the request; ASGI's types know none of ours."""
    return cast("dict[str, Any]", cycle.scope["extensions"])
