"""A connection that a client cannot keep for nothing: uvicorn's, with limits until a request is whole.

uvicorn 0.54 waits for ever for the first byte and for the end of the headers, takes headers of any size, and reads a
body of any length behind an answer that was given early.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serve.asgi.call import Limits
from serve.asgi.messages import RETRY_AFTER_S

# For what a client still sends when it has its answer (413, 401): closed at once, the answer would be lost with it.
_LINGER_S = 5.0

# For a request that was sent before its client could know that the server ends.
_ON_ITS_WAY_S = 1.0


class GuardedConnection(HttpToolsProtocol):
    """One connection; see `Limits`.

    Args:
        limits: what a client may cost.
        settings: uvicorn's own.
    """

    def __init__(self, limits: Limits, **settings: Any) -> None:
        super().__init__(**settings)
        self._limits = limits
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._in_body = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin, or turn the client away where there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections:
            self._end(b"503 Service Unavailable", b"too many connections: try again later", retry=True)
        else:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._head_is_there()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take in bytes."""
        if self.transport.is_closing():
            return
        if not self._in_body:
            self._await_head()
            self._head_bytes += len(data)
        super().data_received(data)
        if not self._in_body and self._head_bytes > self._limits.head_bytes and not self.transport.is_closing():
            self._end(b"431 Request Header Fields Too Large", b"the headers are too large")

    def on_message_begin(self) -> None:
        """A request begins."""
        self._await_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Its headers are there."""
        self._head_is_there()
        self._in_body = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Its body is there."""
        self._in_body = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Its answer is sent, perhaps before its body was there."""
        super().on_response_complete()
        if self._in_body:
            self.loop.call_later(_LINGER_S, self._end_lingering, self.cycle)

    def shutdown(self) -> None:
        """The server ends: answer the request that is coming or on its way, and close.

        The answer tells the client that the connection is closed. Where nothing comes for a moment, nothing is lost.
        """
        if self.cycle is None or self.cycle.response_complete:
            self.loop.call_later(_ON_ITS_WAY_S, self._end_idle)
        else:
            super().shutdown()

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
            self._end(b"408 Request Timeout", b"the headers did not arrive in time")
        elif not self.transport.is_closing():
            self.transport.close()

    def _end_idle(self) -> None:
        idle = self.cycle is None or self.cycle.response_complete
        if idle and not self._head_bytes and not self.transport.is_closing():
            self.transport.close()  # half a head is ended by its timer

    def _end_lingering(self, cycle: object) -> None:
        if self.cycle is cycle and self._in_body and not self.transport.is_closing():
            self.transport.close()

    def _end(self, status: bytes, reason: bytes, *, retry: bool = False) -> None:
        """Answer without a request, and close."""
        body = b'{"error": "' + reason + b'"}'
        again = b"retry-after: %d\r\n" % RETRY_AFTER_S if retry else b""
        self.transport.write(
            b"HTTP/1.1 " + status + b"\r\ncontent-type: application/json\r\ncontent-length: %d\r\n" % len(body)
            + again + b"connection: close\r\n\r\n" + body
        )  # fmt: skip
        self.transport.close()
