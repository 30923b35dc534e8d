"""uvicorn's connection with limits on what a client may hold before its request is complete.

uvicorn 0.54 waits without a limit for the first byte and for the end of the headers. It accepts headers of any size. A
client that does not read its response may stay idle for ever. And uvicorn parses all requests that arrive together on a
connection before it answers the first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NoReturn

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serve.asgi.http.call import Held, Limits
from serve.asgi.http.messages import RefusedError, no_memory, try_again

# Requests of a connection that wait for the one before them. Each is an object of 2.6 kB. One read is a quarter of a
# megabyte and has room for 14,000 requests.
_MOST_WAITING = 32

# Chunks of a body, beyond one for each `_SMALL_CHUNK` bytes of it. Each is a call from the parser. libuv reads up to 8
# MB of a connection before it turns to another. That is room for 1.4 million chunks of one byte: for 3 s nobody would
# be answered.
_MOST_CHUNKS = 4096
_SMALL_CHUNK = 64

# Seconds for data that a client still sends after its response (413, 401). A connection that closes at once would lose
# the response.
_LINGER_S = 5.0


class _TooManyError(Exception):
    """Too many requests, chunks or trailers on a connection. Raised inside the parser, which then stops reading."""


class _Timer:
    """A single delayed call. Without a pending call it refers to nothing."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._handle: asyncio.TimerHandle | None = None

    def begin(self, seconds: float, call: Callable[[], None]) -> None:
        """Schedule the call, unless one is pending."""
        if self._handle is None:
            self._handle = self._loop.call_later(seconds, call)

    def end(self) -> None:
        """Cancel the pending call."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


class LimitedConnection(HttpToolsProtocol):
    """One connection with limits on size and time; see `Limits`. A subclass answers the requests.

    Args:
        limits: what a client may cost.
        held: counts the bytes that the client has not read.
        settings: uvicorn's own settings.
    """

    def __init__(self, limits: Limits, held: Held, **settings: Any) -> None:
        super().__init__(**settings)
        self._limits = limits
        self._held = held
        self._counted = 0  # bytes of responses that count as unread
        self._head_timer, self._linger_timer, self._reader_timer = (_Timer(self.loop) for _ in range(3))
        self._head_bytes = 0
        self._repeats_head = False  # the parser reads the same head for the second time
        self._in_body = False
        self._chunks = self._chunked_bytes = self._trailer_bytes = 0  # of the body that is arriving
        self._unread = 0  # bytes of responses that the client had not read at the last check
        self._unreadable = False  # ignore everything that arrives from now on

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the connection, or refuse it if too many are open."""
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections:
            self._end(try_again("too many connections: try again later", "connections"))
        else:
            self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers of a closed connection."""
        for timer in (self._head_timer, self._linger_timer, self._reader_timer):
            timer.end()
        self._count_unread(0)
        self._unset_keepalive_if_required()  # else uvicorn 0.54 keeps all this until the timeout if the client resets
        super().connection_lost(exc)

    def _end(self, refused: RefusedError) -> None:
        """Stop reading, and close once all earlier requests are answered. ``refused`` is the reason."""
        raise NotImplementedError

    def _begin_request(self) -> None:
        """Start the answer to a request whose head is complete."""
        super().on_headers_complete()  # raises for an invalid path: then there is no cycle
        self._in_body = True

    def _take(self, data: memoryview) -> None:
        """Parse received data."""
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
            self._start_head_timer()  # most heads arrive whole and need no timer

    def _feed(self, data: memoryview) -> None:
        """Feed the parser as uvicorn does, but ignore ``Upgrade``: the server speaks no other protocol."""
        self._unset_keepalive_if_required()
        while data:
            try:
                try:
                    self.parser.feed_data(data)
                    return
                except httptools.HttpParserUpgrade as stopped:
                    data = data[stopped.args[0] :]
                    self._read_upgrade_body()
            except httptools.HttpParserError as error:
                if isinstance(error.__context__, MemoryError):  # raised in a callback: not the client's fault
                    self._end(no_memory())
                elif not self.transport.is_closing():  # `_stop_reading` has closed the connection else
                    self._end(RefusedError(400, f"the request is not valid HTTP ({error})", "bad-http"))
                return

    def _read_upgrade_body(self) -> None:
        """Read the body of a request with ``Upgrade``.

        httptools 0.9 takes everything behind such a head for another protocol.

        A client that offers an upgrade (curl --http2, Java's client) still sends its body. If the server parsed that
        body as the next request, a proxy in front of it would not have seen that request.
        """
        self._renew_parser()
        framing = [pair for pair in self.headers if pair[0] in (b"content-length", b"transfer-encoding")]
        self._repeats_head = True
        try:
            self.parser.feed_data(b"POST / HTTP/1.1\r\n%s\r\n" % b"".join(b"%s: %s\r\n" % pair for pair in framing))
        finally:
            self._repeats_head = False

    def _renew_parser(self) -> None:
        """Start a new parser. The current one expects a body that was skipped."""
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn 0.54 does

    def on_message_begin(self) -> None:
        """Start a request."""
        if self._repeats_head:
            return
        self._head_bytes = self._head_bytes or 1  # the head may begin in the data behind a body
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Keep a part of the request's path."""
        if not self._repeats_head:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header. A field behind the body is a trailer (RFC 9110, 6.5.1) and is only counted."""
        if self._repeats_head:
            return
        if not self._in_body:
            super().on_header(name, value)
            return
        self._trailer_bytes += len(name) + len(value) + 4
        if self._trailer_bytes > self._limits.head_bytes:
            self._stop_reading()

    def on_headers_complete(self) -> None:
        """Start the answer to a request whose headers are complete, unless too many wait."""
        if self._repeats_head:
            return
        self._finish_head()
        if len(self.pipeline) >= _MOST_WAITING:
            self._stop_reading()
        self._chunks = self._chunked_bytes = self._trailer_bytes = 0
        self._begin_request()

    def on_chunk_header(self) -> None:
        """Count a chunk of the body, and close the connection if there are too many."""
        self._chunks += 1
        if self._chunks > _MOST_CHUNKS + self._chunked_bytes // _SMALL_CHUNK:
            self._stop_reading()

    def on_response_complete(self) -> None:
        """Go on after a response, which may be sent before the body is complete."""
        super().on_response_complete()
        if self._in_body:
            self._linger()

    def pause_writing(self) -> None:
        """Start the time limit for a client that does not read its response."""
        super().pause_writing()
        self._count_unread(self.transport.get_write_buffer_size())
        self._start_reader_timer()

    def resume_writing(self) -> None:
        """Stop the time limit: the client reads its response."""
        self._reader_timer.end()
        self._count_unread(0)
        super().resume_writing()

    def _count_unread(self, size: int) -> None:
        self._held.unread += size - self._counted
        self._counted = size

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, or abort it if its last response is unread: a close would wait for the client."""
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def _start_keep_alive(self) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _stop_reading(self) -> NoReturn:
        """Close the connection, and stop the parser that calls this."""
        self.transport.close()
        raise _TooManyError

    def _start_reader_timer(self) -> None:
        self._unread = self.transport.get_write_buffer_size()
        self._reader_timer.begin(self._limits.body_s, self._check_reader)

    def _check_reader(self) -> None:
        """Abort the connection of a client that read nothing since the last look. A slow client may go on."""
        self._reader_timer.end()
        if self.transport.get_write_buffer_size() >= self._unread:
            self.transport.abort()
        else:
            self._start_reader_timer()

    def _start_head_timer(self) -> None:
        self._head_timer.begin(self._limits.head_s, self._end_late_head)

    def _finish_head(self) -> None:
        self._head_bytes = 0
        self._head_timer.end()

    def _end_late_head(self) -> None:
        if self._head_bytes:
            self._end(RefusedError(408, "the headers did not arrive in time", "slow-client"))
        else:
            self._close()

    def _linger(self) -> None:
        self._linger_timer.begin(_LINGER_S, self._close)

    def _close(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
