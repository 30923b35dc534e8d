"""Inference in the event loop itself, where nobody else would wait for it meanwhile.

For a client that asks one image after the other, two changes of threads are some 3 % of ResNet-18's time.
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

# The most that an engine may take for an image, so that whoever comes meanwhile (health, metrics) hardly waits.
_QUICK_S = 0.01
# What its header does not tell of a JPEG as small as a service takes for lone costs 33 ms at most (100 scans); a TIFF's
# strips and a PNG's texts cost 0.2 s.
_JPEG = b"\xff\xd8\xff"
# For so long after two asked at once, others may again: with the loop computing, images were not decoded meanwhile.
_CROWDED_S = 1.0


class Asker(Protocol):
    """A connection: another one is another client."""

    @property
    def waiting(self) -> int:
        """How many of its requests wait for the one that is being answered."""


class InlineInference:
    """Who asks, and whether they ask one by one. Used in the event loop; ``job`` is read by other threads.

    Attributes:
        job: what the loop computes now, and a number that is given once; None: nothing.

    Args:
        in_flight: how many requests are being received or answered.
    """

    job: tuple[Served, int] | None = None

    def __init__(self, in_flight: Callable[[], int]) -> None:
        self._in_flight = in_flight
        self._crowded = float("-inf")  # when two were seen at once
        self._last: Asker | None = None  # for whom it has computed in this turn of the loop or the two before
        self._computed = 0

    def allows(self, who: Asker, served: Served, request: Request) -> bool:
        """Whether the loop may compute a request now.

        Args:
            who: asks.
            served: the model.
            request: what is asked.
        """
        now = time.monotonic()
        if self._in_flight() > 1 or self._last not in (None, who):  # or it came while the loop was computing
            self._crowded = now
        (image, *more) = request.images
        quick = served.service.here_s <= _QUICK_S and isinstance(image, bytes) and image.startswith(_JPEG) and not more
        return quick and not who.waiting and now - self._crowded > _CROWDED_S

    @contextmanager
    def computing(self, who: Asker, served: Served) -> Iterator[None]:
        """For the block in which the loop computes."""
        self._computed += 1
        self._last, self.job = who, (served, self._computed)
        try:
            yield
        finally:
            self.job = None
            # What has come meanwhile is read in the next turn, behind what is to be called then, and asked for by its
            # task in the one after.
            self._forget(turns=2)

    def _forget(self, turns: int) -> None:
        if turns:
            asyncio.get_running_loop().call_soon(self._forget, turns - 1)
        else:
            self._last = None
