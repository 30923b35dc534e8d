"""A connection that a client cannot keep for nothing: uvicorn's, with limits until a request is whole.

uvicorn 0.54 waits for ever for the first byte and for the end of the headers, takes headers of any size, lets a client
lie idle for ever that has not read its answer, and takes up all requests that come at once on a connection before it
answers the first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NoReturn

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serve.asgi.http.call import Limits
from serve.asgi.http.messages import RefusedError, no_memory, try_again

# Requests of a connection that wait for the one before them. Each is an object of 2.6 kB, and what is read at once, a
# quarter of a megabyte, has room for 14,000.
_MOST_WAITING = 32

# Chunks of a body beyond one for each `_SMALL_CHUNK` bytes of it. Each is a call from the parser, and what libuv reads
# of a connection before it looks at another, 8 MB, has room for 1.4 million of a byte: 3 s in which nobody is answered.
_MOST_CHUNKS = 4096
_SMALL_CHUNK = 64

# For what a client still sends when it has its answer (413, 401): closed at once, the answer would be lost with it.
_LINGER_S = 5.0


class _TooManyError(Exception):
    """More requests, chunks or trailers than may come on a connection: raised in its parser, which reads no further."""


class _Timer:
    """A call that is due later, one at a time. It knows nobody while none is."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._handle: asyncio.TimerHandle | None = None

    def begin(self, seconds: float, call: Callable[[], None]) -> None:
        """Have it made, if none is due."""
        if self._handle is None:
            self._handle = self._loop.call_later(seconds, call)

    def end(self) -> None:
        """Have none made."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


class LimitedConnection(HttpToolsProtocol):
    """One connection, of which a client has so much and for so long; see `Limits`. Who extends it answers.

    Args:
        limits: what a client may cost.
        settings: uvicorn's own.
    """

    def __init__(self, limits: Limits, **settings: Any) -> None:
        super().__init__(**settings)
        self._limits = limits
        self._head_timer, self._linger_timer, self._reader_timer = (_Timer(self.loop) for _ in range(3))
        self._head_bytes = 0
        self._head_again = False  # whether the parser reads a head for the second time
        self._in_body = False
        self._chunks = self._chunked_bytes = self._trailer_bytes = 0  # of the body that comes
        self._unread = 0  # bytes of answers when it was last looked whether the client reads
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
        for timer in (self._head_timer, self._linger_timer, self._reader_timer):
            timer.end()
        self._unset_keepalive_if_required()  # uvicorn 0.54 keeps it, and all this, for its time where the client resets
        super().connection_lost(exc)

    def _end(self, refused: RefusedError) -> None:
        """Read no further, and close when all that was asked before is answered; ``refused`` says why."""
        raise NotImplementedError

    def _begin_request(self) -> None:
        """Have the request answered whose head is read."""
        super().on_headers_complete()  # raises where a path is none that there can be: there is no cycle for it
        self._in_body = True

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
        self._begin_request()

    def on_chunk_header(self) -> None:
        """A chunk of its body begins."""
        self._chunks += 1
        if self._chunks > _MOST_CHUNKS + self._chunked_bytes // _SMALL_CHUNK:
            self._read_no_further()

    def on_response_complete(self) -> None:
        """Its answer is sent, perhaps before its body was there."""
        super().on_response_complete()
        if self._in_body:
            self._linger()

    def pause_writing(self) -> None:
        """The client does not read what it is answered: not for long."""
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        """It has."""
        self._reader_timer.end()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        """It has lain idle for too long; where it has not read its last answer, closing it would wait for that."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def _lie_idle(self) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _read_no_further(self) -> NoReturn:
        """Close, and end the parser in which this is called."""
        self.transport.close()
        raise _TooManyError

    def _await_reader(self) -> None:
        self._unread = self.transport.get_write_buffer_size()
        self._reader_timer.begin(self._limits.body_s, self._look_at_reader)

    def _look_at_reader(self) -> None:
        """Give up a client that has read nothing; one that reads slowly is waited for."""
        self._reader_timer.end()
        if self.transport.get_write_buffer_size() >= self._unread:
            self.transport.abort()
        else:
            self._await_reader()

    def _await_head(self) -> None:
        self._head_timer.begin(self._limits.head_s, self._head_too_late)

    def _head_is_there(self) -> None:
        self._head_bytes = 0
        self._head_timer.end()

    def _head_too_late(self) -> None:
        if self._head_bytes:
            self._end(RefusedError(408, "the headers did not arrive in time", "slow-client"))
        else:
            self._close()

    def _linger(self) -> None:
        self._linger_timer.begin(_LINGER_S, self._close)

    def _close(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
