"""A persistent HTTP/1.1 connection that never blocks: it sends bytes and returns complete answers."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass

from serve.runtime.errors import UserError

_TIMING = re.compile(r"([\w.-]+)\s*(?:;[^,]*?)?;\s*dur=([0-9.eE+-]+)")
_LINE = b"\r\n"
_FIRST = re.compile(rb"HTTP/1\.([01]) ([1-5]\d\d)")
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]+)[ \t]*\r\n", re.IGNORECASE)
_CLOSES = re.compile(rb"\r\nconnection:[ \t]*close[ \t]*\r\n", re.IGNORECASE)
_SERVER_TIMING = re.compile(rb"\r\nserver-timing:[ \t]*([^\r\n]*)", re.IGNORECASE)
_READ = 1 << 16
_LONGEST_HEAD = 1 << 16


@dataclass(frozen=True)
class Answer:
    """A complete answer. ``closes``: whether the server closes the connection after it."""

    status: int
    body: bytes
    timing: str
    closes: bool


class BrokenWireError(Exception):
    """The connection ended, or received data that are no HTTP/1.1 answer with a length."""


def connect(address: str, timeout_s: float = 10.0) -> socket.socket:
    """Return a non-blocking connection.

    Args:
        address: ``host:port`` or ``unix:/path``.
        timeout_s: longest wait for the server to accept it.

    Raises:
        UserError: the address is invalid.
        OSError: no server listens there.
    """
    if address.startswith("unix:"):
        opened = socket.socket(socket.AF_UNIX)
        opened.settimeout(timeout_s)
        opened.connect(address.removeprefix("unix:"))
    else:
        host, _, port = address.rpartition(":")
        if not (host and port.isdecimal()):
            raise UserError(f"an address must be host:port or unix:/path, got {address!r}")
        opened = socket.create_connection((host, int(port)), timeout_s)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    opened.setblocking(False)
    return opened


class Wire:
    """A connection with at most one request at a time. Use it in one thread."""

    def __init__(self, address: str) -> None:
        self.socket = connect(address)
        self._out = memoryview(b"")
        self._in = bytearray()
        self._head = -1  # where the body begins, once the head is complete
        self._length = 0
        self._first = (0, "", False)

    def start(self, request: bytes) -> bool:
        """Start to send a request. Return whether all of it was sent."""
        self._out = memoryview(request)
        self._in.clear()
        self._head = -1
        return self.push()

    def push(self) -> bool:
        """Send more. Return whether all of it was sent.

        Raises:
            BrokenWireError: the server stopped reading.
        """
        try:
            while self._out:
                self._out = self._out[self.socket.send(self._out) :]
        except BlockingIOError:
            return False
        except OSError as error:
            raise BrokenWireError(f"the server stopped reading ({error.strerror or error})") from None
        return True

    @property
    def sending(self) -> bool:
        """Whether a part of the request is not sent yet."""
        return bool(self._out)

    def pull(self) -> Answer | None:
        """Read received data. Return the answer if it is complete.

        Raises:
            BrokenWireError: the connection ended, or the data are no answer.
        """
        try:
            data = self.socket.recv(_READ)
        except BlockingIOError:
            return None
        except OSError as error:
            raise BrokenWireError(f"the connection broke ({error.strerror or error})") from None
        if not data:
            raise BrokenWireError(f"the connection was closed after {len(self._in)} bytes of a response")
        self._in += data
        if self._head < 0 and not self._read_head():
            return None
        if len(self._in) - self._head < self._length:
            return None
        status, timing, closes = self._first
        # An early answer is the last on this connection: the rest of the request would be taken for another.
        return Answer(status, bytes(self._in[self._head :]), timing, closes or self.sending)

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()

    def _read_head(self) -> bool:
        end = self._in.find(b"\r\n\r\n")
        if end < 0:
            if len(self._in) > _LONGEST_HEAD:
                raise BrokenWireError(f"the headers of a response have more than {_LONGEST_HEAD} bytes")
            return False
        # Searched, not split into fields, because this process shares the cores with the measured server.
        head = bytes(self._in[: end + 2])
        first = _FIRST.match(head)
        if first is None:
            raise BrokenWireError(f"not an HTTP/1.1 response: {head.partition(_LINE)[0][:80].decode('latin-1')!r}")
        length = _LENGTH.search(head)
        if length is None:
            raise BrokenWireError("a response has no Content-Length, which this client needs")
        self._head, self._length = end + 4, int(length[1])
        timing = _SERVER_TIMING.search(head)
        closes = first[1] == b"0" or _CLOSES.search(head) is not None
        self._first = (int(first[2]), timing[1].decode("latin-1") if timing else "", closes)
        return True


def stages(timing: str) -> dict[str, float]:
    """Return a ``Server-Timing`` header's durations in ms by name (W3C Server Timing, section 3)."""
    return {name: float(duration) for name, duration in _TIMING.findall(timing)}
