"""Inference in the event loop itself, where nobody else would wait for it meanwhile.

For a client that asks one image after the other, two changes of threads are some 3 % of ResNet-18's time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

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


class InlineInference:
    """Decides which requests are computed in the event loop. Used there; ``job`` is read by other threads.

    Attributes:
        job: what the loop computes now, and a number that is given once; None: nothing.
    """

    job: tuple[Served, int] | None = None

    def __init__(self) -> None:
        self._crowded = float("-inf")  # when two were seen at once
        self._last: object | None = None  # who was computed in this turn of the loop or the one before
        self._computed = 0

    def allows(self, who: object, served: Served, request: Request, in_flight: int) -> bool:
        """Whether the loop may compute a request now.

        Args:
            who: asks; another one is another client.
            served: the model.
            request: what is asked.
            in_flight: requests that are being received or answered, with this one.
        """
        now = time.monotonic()
        if in_flight > 1 or self._last not in (None, who):  # or it came while the loop was computing
            self._crowded = now
        (image, *more) = request.images
        quick = served.service.here_s <= _QUICK_S and isinstance(image, bytes) and image.startswith(_JPEG) and not more
        return quick and now - self._crowded > _CROWDED_S

    @contextmanager
    def computing(self, who: object, served: Served) -> Iterator[None]:
        """For the block in which the loop computes."""
        self._computed += 1
        self._last, self.job = who, (served, self._computed)
        try:
            yield
        finally:
            self.job = None
            # What has come meanwhile is read in the next turn: behind what is to be called then, before what is after.
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, self._forget)

    def _forget(self) -> None:
        self._last = None
