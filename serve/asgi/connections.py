"""A connection that a client cannot keep for nothing: uvicorn's, with limits until a request is whole.

uvicorn 0.54 waits for ever for the first byte and for the end of the headers, takes headers of any size, reads a
body of any length behind an answer that was given early, lets a connection lie idle for ever after that, takes up all
requests that come at once on a connection before it answers the first, and copies each body twice.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, cast

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from serve.asgi.call import Limits
from serve.asgi.direct import Direct
from serve.asgi.messages import FAULT, GONE, WHOLE, Headers, RefusedError, Response, no_memory, try_again

if TYPE_CHECKING:
    from serve.asgi.early import Early

_HEAD_END = b"\r\n\r\n"
_CLOSE = (b"connection", b"close")

# Requests of a connection that wait for the one before them. Each is an object of 2.6 kB, and what is read at once, a
# quarter of a megabyte, has room for 14,000.
_MOST_WAITING = 32

# Chunks of a body beyond one for each `_SMALL_CHUNK` bytes of it. Each is a call from the parser, and what libuv reads
# of a connection before it looks at another, 8 MB, has room for 1.4 million of a byte: 3 s in which nobody is answered.
_MOST_CHUNKS = 4096
_SMALL_CHUNK = 64

# For what a client still sends when it has its answer (413, 401): closed at once, the answer would be lost with it.
_LINGER_S = 5.0

# For a request that was sent before its client could know that the server ends.
_ON_ITS_WAY_S = 1.0


class _TooManyError(Exception):
    """More requests, chunks or trailers than may come on a connection: raised in its parser, which reads no further."""


class GuardedConnection(HttpToolsProtocol):
    """One connection; see `Limits`.

    Args:
        limits: what a client may cost.
        early: asked for each request that nothing is before on the connection, and told of what is no request.
        settings: uvicorn's own.
    """

    def __init__(self, limits: Limits, early: Early, **settings: Any) -> None:
        super().__init__(**settings)
        self._limits = limits
        self._early = early
        self._head_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._in_body = False
        self._to_drop = 0  # bytes of the body of a request that was answered early
        self._dropped = 0  # those of them that the parser had
        self._answered_early = False  # by `early`: of this request there is no cycle
        self._chunks = self._chunked_bytes = self._trailer_bytes = 0  # of the body that comes
        self._head_alone = False  # whether the parser has a head, and nothing behind it
        self._head_again = False  # whether the parser reads a head for the second time
        self._unread = 0  # bytes of answers when it was last looked whether the client reads
        self._reader_timer: asyncio.TimerHandle | None = None
        self._tell_gone: Callable[[], None] | None = None
        self._direct: Direct | None = None  # the request that is answered so
        self._behind = bytearray()  # what has come behind it
        self._ending = False  # whether the connection is closed behind it
        self._unreadable = False  # whatever comes now: nothing of it is read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin, or turn the client away where there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections:
            self._end(try_again("too many connections: try again later", "connections"))
        else:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._head_is_there()
        self._body_is_there()
        self._reader_is_there()
        if self._direct is not None:
            self._direct.abandon()
            self._direct = None
        self._unset_keepalive_if_required()  # uvicorn 0.54 keeps it, and all this, for its time where the client resets
        super().connection_lost(exc)
        if self._tell_gone is not None:
            self._tell_gone()

    def data_received(self, data: bytes) -> None:
        """Take in bytes."""
        if self._unreadable:
            return
        rest = memoryview(data)
        if self._direct is not None:
            rest = self._receive(self._direct, rest)
        elif self._to_drop:
            rest = self._drop(rest)
        elif not self._in_body and (end := data.find(_HEAD_END) + len(_HEAD_END)) >= len(_HEAD_END):
            # By itself: the body of a request that is refused by its head, or is one image, needs no parser.
            self._head_alone = not self._head_bytes  # or what was found may be the end of the next one
            self._take(rest[:end])
            self._head_alone = False
            rest = rest[end:]
            rest = self._drop_body(rest) if self._direct is None else self._receive(self._direct, rest)
        if rest:
            self._take(rest)
        if self._answered_early and self._in_body:
            self._linger()

    def _take(self, data: memoryview) -> None:
        """Parse what has come."""
        if self.transport.is_closing():
            return
        if not self._in_body:
            self._head_bytes += len(data)
        self._feed(data)
        if self._in_body or not self._head_bytes or self._unreadable or self.transport.is_closing():
            return
        if self._head_bytes > self._limits.head_bytes:
            self._end(RefusedError(431, "the headers are too large", "large-head"))
        else:
            self._await_head()  # most come whole, and need no timer

    def _feed(self, data: memoryview) -> None:
        """As uvicorn, but for a head with ``Upgrade``: nothing else is spoken here, and what follows it is its body."""
        self._unset_keepalive_if_required()
        while data:
            try:
                try:
                    self.parser.feed_data(data)
                    return
                except httptools.HttpParserUpgrade as stopped:
                    data = data[stopped.args[0] :]
                    self._read_on()
            except httptools.HttpParserError as error:
                if isinstance(error.__context__, MemoryError):  # of a callback: ours, and not the client's
                    self._end(no_memory())
                elif not self.transport.is_closing():  # as `_read_no_further` has it
                    self._end(RefusedError(400, f"the request is not valid HTTP ({error})", "bad-http"))
                return

    def _read_on(self) -> None:
        """Have the body read of a head with ``Upgrade``, behind which httptools 0.9 takes all for another protocol.

        A client that offers one (curl --http2, Java's) sends its body, and a body that is read as the next request is
        one that whoever is before this server has not seen.
        """
        self._renew_parser()
        framing = [pair for pair in self.headers if pair[0] in (b"content-length", b"transfer-encoding")]
        self._head_again = True
        try:
            self.parser.feed_data(b"POST / HTTP/1.1\r\n%s\r\n" % b"".join(b"%s: %s\r\n" % pair for pair in framing))
        finally:
            self._head_again = False

    def _receive(self, direct: Direct, data: memoryview) -> memoryview:
        """Take in the body of a request that is answered without a task; what the parser is to read now."""
        data = direct.receive(data)
        if self._direct is None:
            return data
        if data:
            looked = len(self._behind) - len(_HEAD_END)
            self._behind += data
            # Read on until there is a request: of a client that is not read it is not known that it has gone.
            if self._behind.find(_HEAD_END, max(0, looked)) >= 0 or len(self._behind) > HIGH_WATER_LIMIT:
                self.flow.pause_reading()
        return data[:0]

    def answer_direct(self, direct: Direct, response: Response, headers: Headers) -> None:
        """Answer it."""
        self._direct = None
        self._write(response, headers, last=self._ending)
        if direct.left:  # what still comes of its body is passed over
            self._answered_early, self._in_body, self._to_drop = True, True, direct.left
        else:
            self._renew_parser()
        self.on_response_complete()

    def go_on(self) -> None:
        """Take up what has come behind it."""
        behind, self._behind = self._behind.lstrip(b"\r\n"), bytearray()  # RFC 9112, 2.2
        if behind and not self.transport.is_closing():
            self.data_received(bytes(behind))

    def end_direct(self) -> None:
        """Wait no longer for a request that is answered without a task: the time for the server's end is over."""
        if self._direct is not None:
            self._direct.fail(try_again("the server is ending: try again later", "ending"))

    def _drop_body(self, data: memoryview) -> memoryview:
        """Begin to pass over a body behind its head, where its request is answered and its length known."""
        if self._answered_early and self._in_body:
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
            self._body_is_there()
            self._renew_parser()
            if not self.transport.is_closing():
                self._lie_idle()
        return data[passed:]

    def _renew_parser(self) -> None:
        """Begin at a message: the parser at hand waits for a body that was passed over."""
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn 0.54

    def on_message_begin(self) -> None:
        """A request begins."""
        if self._head_again:
            return
        self._head_bytes = self._head_bytes or 1  # behind the end of a body
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A part of its path is there."""
        if not self._head_again:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One of its headers is there. What comes behind a body is no header (RFC 9110, 6.5.1), and none is kept."""
        if self._head_again:
            return
        if not self._in_body:
            super().on_header(name, value)
            return
        self._trailer_bytes += len(name) + len(value) + 4
        if self._trailer_bytes > self._limits.head_bytes:
            self._read_no_further()

    def on_headers_complete(self) -> None:
        """Its headers are there."""
        if self._head_again:
            return
        self._head_is_there()
        if len(self.pipeline) >= _MOST_WAITING:
            self._read_no_further()
        self._chunks = self._chunked_bytes = self._trailer_bytes = 0
        found = None
        if self._is_plain():
            found = self._early(self.parser.get_method(), self.url, self.headers, whole=self._head_alone)
        if found is None:
            self._to_application()
            return
        if isinstance(found, Direct):
            self._direct, found.connection = found, self
            return
        self._answered_early, self._dropped = True, 0
        self._in_body = True
        self._write(*found)
        super().on_response_complete()

    def _to_application(self) -> None:
        """Have the application answer the request whose head is read."""
        self._answered_early = False
        super().on_headers_complete()  # raises where a path is none that there can be: there is no cycle for it
        self._in_body = True
        whole = functools.partial(self._answer, self.cycle)
        self.scope["extensions"] = cast("Any", {WHOLE: whole, GONE: self._when_gone})

    def on_chunk_header(self) -> None:
        """A chunk of its body begins."""
        self._chunks += 1
        if self._chunks > _MOST_CHUNKS + self._chunked_bytes // _SMALL_CHUNK:
            self._read_no_further()

    def on_body(self, body: bytes) -> None:
        """A part of its body is there."""
        self._chunked_bytes += len(body)
        if self._answered_early:
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
        self._body_is_there()
        if not self._answered_early:
            super().on_message_complete()
        idle = self.timeout_keep_alive_task is None and not self.pipeline and not self.transport.is_closing()
        if idle and (self._answered_early or self.cycle.response_complete):
            self._lie_idle()

    def _lie_idle(self) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def on_response_complete(self) -> None:
        """Its answer is sent, perhaps before its body was there."""
        super().on_response_complete()
        if self._in_body:
            self._linger()

    def pause_writing(self) -> None:
        """The client does not read what it is answered: not for long."""
        super().pause_writing()
        self._unread = self.transport.get_write_buffer_size()
        self._await_reader()

    def resume_writing(self) -> None:
        """It has."""
        self._reader_is_there()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        """It has lain idle for too long; where it has not read its last answer, closing it would wait for that."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def shutdown(self) -> None:
        """The server ends: answer the request that is coming or on its way, and close.

        The answer tells the client that the connection is closed. Where nothing comes for a moment, nothing is lost.
        """
        if self._direct is not None:
            self._ending = True
        elif self._is_idle:
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
        return self._direct is None and (self.cycle is None or self.cycle.response_complete)

    def _is_plain(self) -> bool:
        """Whether nothing is before this request, and nothing ends after it."""
        return (
            self._is_idle
            and not self.flow.write_paused
            and self.parser.should_keep_alive()
            and not self.parser.should_upgrade()
            and self.parser.get_http_version() == "1.1"
        )

    def _read_no_further(self) -> NoReturn:
        """Close, and end the parser in which this is called."""
        self.transport.close()
        raise _TooManyError

    def _await_reader(self) -> None:
        self._reader_timer = self.loop.call_later(self._limits.body_s, self._look_at_reader)

    def _reader_is_there(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    def _look_at_reader(self) -> None:
        """Give up a client that has read nothing; one that reads slowly is waited for."""
        left = self.transport.get_write_buffer_size()
        if left >= self._unread:
            self.transport.abort()
        else:
            self._unread = left
            self._await_reader()

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._limits.head_s, self._head_too_late)

    def _head_is_there(self) -> None:
        self._head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_too_late(self) -> None:
        if self._head_bytes:
            self._end(RefusedError(408, "the headers did not arrive in time", "slow-client"))
        elif not self.transport.is_closing():
            self.transport.close()

    def _end_idle(self) -> None:
        if self._is_idle and not self._head_bytes and not self.transport.is_closing():
            self.transport.close()  # half a head is ended by its timer

    def _linger(self) -> None:
        if self._linger_timer is None:
            self._linger_timer = self.loop.call_later(_LINGER_S, self._end_lingering)

    def _body_is_there(self) -> None:
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None

    def _end_lingering(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()

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
            self._write(*self._early.unread(refused), last=True)
            return
        self._early.unread(refused)


def _extensions(cycle: RequestResponseCycle) -> dict[str, Any]:
    """What the application is told beside the request; ASGI's types know none of ours."""
    return cast("dict[str, Any]", cycle.scope["extensions"])
