"""The requests and responses of one connection: one write for each response, early refusals without a task.

uvicorn 0.54 reads a body of any length after an early response, and copies each body twice. Here neither happens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from serve.asgi.http.call import Held, Limits
from serve.asgi.http.limited_connection import LimitedConnection
from serve.asgi.http.messages import CONNECTION, FAULT, GONE, WHOLE, Headers, RefusedError, Response, no_memory

if TYPE_CHECKING:
    from serve.asgi.http.early_refusal import EarlyRefusal

_HEAD_END = b"\r\n\r\n"
_CLOSE = (b"connection", b"close")

# For a request that the client sent before it could know that the server shuts down.
_IN_TRANSIT_S = 1.0


class GuardedConnection(LimitedConnection):
    """One connection that keeps to `Limits` and answers.

    Args:
        limits: what a client may cost.
        held: see `LimitedConnection`.
        early_refusal: called for each request that has no other before it on the connection, and for data that is not a
            request.
        settings: uvicorn's own settings.
    """

    def __init__(self, limits: Limits, held: Held, early_refusal: EarlyRefusal, **settings: Any) -> None:
        super().__init__(limits, held, **settings)
        self._early_refusal = early_refusal
        self._refused_early = False  # the request was refused by its head and has no cycle
        self._to_drop = 0  # bytes of the refused request's body that are still to be skipped
        self._dropped = 0  # bytes of that body that the parser consumed
        self._on_disconnect: Callable[[], None] | None = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Inform the request's handler that the client disconnected."""
        super().connection_lost(exc)
        if self._on_disconnect is not None:
            self._on_disconnect()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, or skip them if they belong to the body of a refused request."""
        if self._unreadable:
            return
        rest = memoryview(data)
        if self._to_drop:
            rest = self._drop(rest)
        elif not self._in_body and (end := data.find(_HEAD_END) + len(_HEAD_END)) >= len(_HEAD_END):
            # The head goes to the parser alone: the body of a request that is refused by its head needs no parser.
            self._take(rest[:end])
            rest = self._drop_body(rest[end:])
        if rest:
            self._take(rest)
        if self._in_body:
            if self._refused_early:
                self._linger()
            elif len(self.cycle.body) > HIGH_WATER_LIMIT and not self.cycle.response_complete:
                self.flow.pause_reading()  # a body that nobody reads any more must still be drained

    def _drop_body(self, data: memoryview) -> memoryview:
        """Start to skip the body of a refused request, if its length is known. Return the data behind the body."""
        if self._refused_early and self._in_body:
            length = next(
                (int(value.lstrip(b"0") or b"0") for name, value in self.headers if name == b"content-length"), 0
            )
            self._to_drop = max(0, length - self._dropped)
        return self._drop(data) if self._to_drop else data

    def _drop(self, data: memoryview) -> memoryview:
        """Skip the body of a refused request. Return the data behind it."""
        self._unset_keepalive_if_required()
        passed = min(self._to_drop, len(data))
        self._to_drop -= passed
        if not self._to_drop:
            self._in_body = False
            self._linger_timer.end()
            self._renew_parser()
            if not self.transport.is_closing():
                self._start_keep_alive()
        return data[passed:]

    def _begin_request(self) -> None:
        found = None
        if self._is_plain():
            found = self._early_refusal(self.parser.get_method(), self.url, self.headers)
        if found is None:
            self._refused_early = False
            super()._begin_request()
            whole = functools.partial(self._answer, self.cycle)
            self.scope["extensions"] = cast("Any", {WHOLE: whole, GONE: self._call_on_disconnect, CONNECTION: self})
        else:
            self._refused_early, self._dropped = True, 0
            self._write(*found)
            self.on_response_complete()
            self._in_body = True  # mostly its end is here already: `data_received` handles the other case

    def on_body(self, body: bytes) -> None:
        """Keep a part of the request's body."""
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
        # Most bodies arrive in one part. The application then gets these bytes without a copy.
        cycle.body = body  # type: ignore[assignment]
        cycle.message_event.set()

    def on_message_complete(self) -> None:
        """Finish a request whose body is complete."""
        if self.parser.should_upgrade():  # only its head is complete: see `_read_upgrade_body`
            return
        self._in_body = False
        self._linger_timer.end()
        if not self._refused_early:
            super().on_message_complete()
        idle = self.timeout_keep_alive_task is None and not self.pipeline and not self.transport.is_closing()
        if idle and (self._refused_early or self.cycle.response_complete):
            self._start_keep_alive()

    @property
    def waiting(self) -> int:
        """Number of requests on this connection that wait for the one being answered."""
        return len(self.pipeline)

    @property
    def is_only(self) -> bool:
        """Whether no other client is connected."""
        return len(self.connections) == 1

    def shutdown(self) -> None:
        """Shut the connection down: answer the request that is arriving, and close.

        The response tells the client that the connection closes. If nothing arrives within a moment, nothing is lost.
        """
        if self._is_idle:
            self.loop.call_later(_IN_TRANSIT_S, self._end_idle)
        else:
            super().shutdown()

    def _call_on_disconnect(self, tell: Callable[[], None] | None) -> None:
        self._on_disconnect = tell
        if tell is not None and self.transport.is_closing():
            tell()

    def _answer(self, cycle: RequestResponseCycle, response: Response, headers: Headers) -> bool:
        """Write a response at once if its client still reads. Return whether it was written.

        uvicorn's ``send`` writes head and body one after the other. A client then wakes up for each of two segments.
        """
        if self.flow.write_paused or cycle.disconnected or cycle.response_started:
            return False
        self._write(response, headers, head_only=cycle.scope["method"] == "HEAD", last=not cycle.keep_alive)
        cycle.response_started = cycle.response_complete = True
        cycle.message_event.set()
        cycle.on_response()
        cycle.scope["extensions"] = {}  # they refer to the cycle, which would stay until the garbage collector runs
        return True

    def _refuse(self, refused: RefusedError) -> None:
        """Let the application refuse the request whose body is arriving, in its turn. Drop the rest of the body."""
        self.cycle.body = bytearray()
        _extensions(self.cycle)[FAULT] = refused
        self.cycle.message_event.set()

    def _write(self, response: Response, headers: Headers, *, head_only: bool = False, last: bool = False) -> None:
        """Write a response. Close the connection after it if it is the last or its headers say so."""
        if last and _CLOSE not in headers:
            headers = [*headers, _CLOSE]
        lines = [b"%s: %s\r\n" % pair for pair in (*self.server_state.default_headers, *headers)]
        body = b"" if head_only else response.body
        self.transport.write(b"".join((STATUS_LINE[response.status], *lines, b"\r\n", body)))
        if _CLOSE in headers:
            self.transport.close()

    @property
    def _is_idle(self) -> bool:
        """Whether every request has its response."""
        return self.cycle is None or self.cycle.response_complete

    def _is_plain(self) -> bool:
        """Whether no request is before this one and the connection stays open after it."""
        return (
            self._is_idle
            and not self.flow.write_paused
            and self.parser.should_keep_alive()
            and not self.parser.should_upgrade()
            and self.parser.get_http_version() == "1.1"
        )

    def _end_idle(self) -> None:
        if self._is_idle and not self._head_bytes:  # the head's timer ends an incomplete head
            self._close()

    def _end(self, refused: RefusedError) -> None:
        """Stop reading, and close once all earlier requests are answered.

        If the body of a request is at fault, that request is refused. If there is no request, the client gets the
        refusal as a response, provided that nothing is before it and no request could be confused with it.
        """
        self._unreadable = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False
            if self._in_body:
                self._refuse(refused)
                return
        elif not self._in_body:  # else it has its response, and `_linger` closes it in a moment
            self._write(*self._early_refusal.unread(refused), last=True)
            return
        self._early_refusal.unread(refused)


def _extensions(cycle: RequestResponseCycle) -> dict[str, Any]:
    """Return the ASGI extensions of a request. ASGI's types do not know the project's own."""
    return cast("dict[str, Any]", cycle.scope["extensions"])
