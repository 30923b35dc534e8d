"""Inference in the event loop itself, if no other request has to wait for it.

It saves a client that sends one image after the other two switches of threads: some 3 % of ResNet-18's time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from serve.asgi.http.served_models import Served
    from serve.runtime.service.protocol import Request

# The most seconds that an engine may take for an image. Requests that arrive meanwhile (health, metrics) hardly wait.
_QUICK_S = 0.01
# Only JPEG. One that is small enough costs at most 33 ms (100 scans) beyond what its header shows. A TIFF's strips and
# a PNG's texts cost 0.2 s.
_JPEG = b"\xff\xd8\xff"
# Seconds after concurrent requests in which the loop computes nothing. More may follow, and images are not decoded
# while the loop computes.
_CONCURRENT_PAUSE_S = 1.0


class ClientConnection(Protocol):
    """A connection. Another connection counts as another client."""

    @property
    def waiting(self) -> int:
        """Number of its requests that wait for the one being answered."""

    @property
    def is_only(self) -> bool:
        """Whether no other client is connected."""


class InlineInference:
    """Decides whether requests arrive one by one. Use it in the event loop; other threads may read ``job``.

    Attributes:
        job: the model that the loop runs now, and a unique number. None: it runs none.

    Args:
        in_flight: returns the number of requests that are being received or answered.
    """

    job: tuple[Served, int] | None = None

    def __init__(self, in_flight: Callable[[], int]) -> None:
        self._in_flight = in_flight
        self._last_concurrent = float("-inf")  # when two requests were last in flight at once
        # The client of the last inference, in this turn of the loop or the two before.
        self._last: ClientConnection | None = None
        self._computed = 0

    def allows(self, who: ClientConnection, served: Served, request: Request) -> bool:
        """Whether the loop may compute a request now.

        Args:
            who: the connection of the request.
            served: the model.
            request: the request.
        """
        now = time.monotonic()
        if self._in_flight() > 1 or self._last not in (None, who):  # or it arrived while the loop was computing
            self._last_concurrent = now
        (image, *more) = request.images
        quick = served.service.here_s <= _QUICK_S and isinstance(image, bytes) and image.startswith(_JPEG) and not more
        return quick and not who.waiting and now - self._last_concurrent > _CONCURRENT_PAUSE_S

    @contextmanager
    def computing(self, who: ClientConnection, served: Served) -> Iterator[None]:
        """Mark the block in which the loop computes."""
        self._computed += 1
        self._last, self.job = who, (served, self._computed)
        try:
            yield
        finally:
            self.job = None
            # Another client's request that arrived meanwhile is read in the next turn, behind the calls that are due
            # then. Its task calls `allows` in the turn after. Each turn is a system call, right after an engine that
            # has filled the caches, so a client without company is spared them.
            self._forget(turns=0 if who.is_only else 2)

    def _forget(self, turns: int) -> None:
        if turns:
            asyncio.get_running_loop().call_soon(self._forget, turns - 1)
        else:
            self._last = None
