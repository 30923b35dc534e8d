"""What decoding may cost: pixels and seconds of an image, a request and a batch, and who is refused for it.

Pixels are what images claim in their headers, known before anything is decoded. Seconds are for what no
header tells; those of one image are looked at while it is read (`timed_file`), the others between images.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ..display import Described
from ..errors import Refusal, UserError
from .fields import shown

# A year, and what no machine decodes in one.
_MOST_SECONDS, _MOST_COUNTED = 366 * 24 * 3600, 1 << 50


@dataclass(frozen=True)
class Budget(Described):
    """Limits of decoding; None is no limit.

    By itself it bounds each image only: who calls in process brings images of their own. A server that
    answers strangers takes `SERVING`.

    Attributes:
        image_pixels: of one image. A 20 kB PNG can claim a gigapixel.
        jpeg_scans: of one progressive JPEG. Encoders write about 10; each costs a pass over all pixels (18 ms
            at 49 megapixels) and may have 50 bytes. The authors of libjpeg-turbo know no use for more than 100
            ("Two Issues with the JPEG Standard", 2016).
        image_seconds: of processor time, of one image that Pillow decodes. The slowest that has as many pixels as it
            may takes about 2.
        request_pixels: of all images of one request together.
        batch_pixels: of all requests that the server answers together.
        request_seconds: spent on the images of one request.
        batch_seconds: from the batch's arrival; decoding that has not begun by then does not begin.
    """

    image_pixels: int = 50_000_000
    jpeg_scans: int = 100
    image_seconds: float = 5.0
    request_pixels: int | None = None
    batch_pixels: int | None = None
    request_seconds: float | None = None
    batch_seconds: float | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise UserError(f"budget: {field.name} must be above 0 and finite, got {value!r}")
            most = _MOST_SECONDS if field.name.endswith("_seconds") else _MOST_COUNTED
            if value > most:
                raise UserError(f"budget: {field.name} must be at most {most}, got {shown(value)}")


#: For a server. The slowest codings that were found (run-length BMP, WebP, PNG) decode 11 to 30 megapixels a
#: second on one core: a full request takes up to 15 s; no image of a batch is begun after 30, half of what TorchServe
#: gives its worker. A batch of 16 requests holds the largest image of each;
#: of more such at once (TorchServe's usual batch has 32 requests) some are told to try again.
SERVING = Budget(request_pixels=200_000_000, batch_pixels=800_000_000, request_seconds=15.0, batch_seconds=30.0)

# 503, and not 408 (the client was slow to send) or 413 (this request is too large, always): the same
# request may be answered where less is to be done beside it.
_TRY_AGAIN = 503


class Account:
    """The seconds that one request has used. Safe to share between threads.

    Args:
        budget: the limits.
        clock: seconds from any beginning.
    """

    def __init__(self, budget: Budget, clock: Callable[[], float] = time.perf_counter) -> None:
        self._budget = budget
        self._clock = clock
        self._started = clock()
        self._seconds = 0.0
        self._lock = threading.Lock()

    @contextmanager
    def charged(self) -> Iterator[None]:
        """Charge the time that the block takes."""
        begun = self._clock()
        try:
            yield
        finally:
            with self._lock:
                self._seconds += self._clock() - begun

    def late(self) -> Refusal | None:
        """The refusal of further images, if the request's time or that since it came is over."""
        limit = self._budget.request_seconds
        if limit is not None and self._seconds >= limit:
            return Refusal(
                _TRY_AGAIN,
                f"the request's images took more than {limit:g} s: send fewer or smaller ones, or try again later",
            )
        limit = self._budget.batch_seconds
        if limit is not None and self._clock() - self._started >= limit:
            return Refusal(
                _TRY_AGAIN, f"the requests that came with this one took more than {limit:g} s: try again later"
            )
        return None


class Backlog:
    """Pixels that are admitted and not decoded yet, of requests that come one by one.

    What lies here at once is what a batch would hold. A request that asks for no more than its equal share is always
    admitted, so that what one asks for is never taken from a smaller one. Not safe to share between threads: whoever
    shares it has a lock.

    Args:
        budget: the limits.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._requests = 0
        self._pixels = 0

    def admit(self, pixels: Sequence[int]) -> Refusal | None:
        """Take in a request by the pixels of each of its images, or say why not."""
        if (refusal := _too_large(self._budget, pixels)) is not None:
            return refusal
        asked, limit = sum(pixels), self._budget.batch_pixels
        if limit is not None and self._pixels + asked > limit and asked > limit // (self._requests + 1):
            return _left_too_little(limit, asked)
        self._requests += 1
        self._pixels += asked
        return None

    def leave(self, pixels: int) -> None:
        """A request that was admitted with so many pixels in all has none left to decode."""
        self._requests -= 1
        self._pixels -= pixels


def _too_large(budget: Budget, pixels: Sequence[int]) -> Refusal | None:
    asked = sum(pixels)
    if budget.request_pixels is None or asked <= budget.request_pixels:
        return None
    return Refusal(
        413,
        f"the request's {len(pixels)} images have {asked} pixels together, more than the limit of "
        f"{budget.request_pixels}: send fewer or smaller ones in one request",
    )


def _left_too_little(limit: int, asked: int) -> Refusal:
    return Refusal(
        _TRY_AGAIN,
        f"the requests that came with this one left too little of the batch's {limit} pixels for its {asked}: "
        f"try again later",
    )
