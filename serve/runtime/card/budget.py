"""Limits for decoding: pixels and seconds of an image, a request and a batch, and the refusals beyond them.

Pixels come from the images' headers, before anything is decoded. Seconds are for costs that no header shows. The time
of one image is checked while it is read (`timed_file`), other times between images.
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

# A year, and more pixels than any machine decodes in one.
_MOST_SECONDS, _MOST_COUNTED = 366 * 24 * 3600, 1 << 50


@dataclass(frozen=True)
class Budget(Described):
    """Limits for decoding. None is no limit.

    By default only each image is limited, because callers in the same process bring their own images. A server for
    strangers uses `SERVING`.

    Attributes:
        image_pixels: pixels of one image. A 20 kB PNG can claim a gigapixel.
        jpeg_scans: scans of one progressive JPEG. Encoders write about 10. Each scan is a pass over all pixels (18 ms
            at 49 megapixels) and may have only 50 bytes. The authors of libjpeg-turbo know no use for more than 100
            ("Two Issues with the JPEG Standard", 2016).
        image_seconds: processor time of one image that Pillow decodes. The slowest image with the allowed pixels takes
            about 2 s.
        request_pixels: pixels of all images of one request together.
        batch_pixels: pixels of all requests that the server answers together.
        request_seconds: time for the images of one request.
        batch_seconds: time since the batch arrived. After it no decoding begins.
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


#: For a server. The slowest codings that were found (run-length BMP, WebP, PNG) decode 11 to 30 megapixels a second on
#: one core. A full request then takes up to 15 s. No image of a batch begins after 30 s, half of TorchServe's timeout
#: for its worker. A batch of 16 requests may have the largest image in each. TorchServe's usual batch has 32 requests.
#: If more than 16 of them are that large, some must try again.
SERVING = Budget(request_pixels=200_000_000, batch_pixels=800_000_000, request_seconds=15.0, batch_seconds=30.0)

# 503, because the same request may succeed under less load. 408 would mean a slow client, 413 a request that is always
# too large.
_TRY_AGAIN = 503


class Account:
    """The seconds that one request has used. Threads may share it.

    Args:
        budget: the limits.
        clock: returns seconds from any beginning.
    """

    def __init__(self, budget: Budget, clock: Callable[[], float] = time.perf_counter) -> None:
        self._budget = budget
        self._clock = clock
        self._started = clock()
        self._seconds = 0.0
        self._lock = threading.Lock()

    @contextmanager
    def charged(self) -> Iterator[None]:
        """Charge the time of the block."""
        begun = self._clock()
        try:
            yield
        finally:
            with self._lock:
                self._seconds += self._clock() - begun

    def late(self) -> Refusal | None:
        """Return the refusal of further images, if the time of the request or of its batch is over."""
        limit = self._budget.request_seconds
        if limit is not None and self._seconds >= limit:
            return Refusal(
                _TRY_AGAIN,
                f"the request's images took more than {limit:g} s: send fewer or smaller ones, or try again later",
            )
        limit = self._budget.batch_seconds
        if limit is not None and self._clock() - self._started >= limit:
            return Refusal(_TRY_AGAIN, f"the requests in the same batch took more than {limit:g} s: try again later")
        return None


class Backlog:
    """Pixels that are admitted and not decoded yet, and bytes of kept answers, of requests that arrive one by one.

    Together they count as a batch. A request within its equal share is always admitted, so a large request takes
    nothing from a smaller one. Not thread-safe: share it under a lock.

    Args:
        budget: the limits.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._requests = 0
        self._pixels = 0

    def admit(self, pixels: Sequence[int], answers: int = 0) -> Refusal | None:
        """Admit a request by the pixels of each of its images and its answers' bytes, or return the refusal."""
        if (refusal := _too_large(self._budget, pixels)) is not None:
            return refusal
        pixel_count, limit = sum(pixels) + answers, self._budget.batch_pixels
        if limit is not None and self._pixels + pixel_count > limit and pixel_count > limit // (self._requests + 1):
            return _no_pixels_left(limit, pixel_count)
        self._requests += 1
        self._pixels += pixel_count
        return None

    def leave(self, pixels: int) -> None:
        """Remove an admitted request with this total of pixels, once nothing of it remains to be decoded."""
        self._requests -= 1
        self._pixels -= pixels


def _too_large(budget: Budget, pixels: Sequence[int]) -> Refusal | None:
    pixel_count = sum(pixels)
    if budget.request_pixels is None or pixel_count <= budget.request_pixels:
        return None
    return Refusal(
        413,
        f"the request's {len(pixels)} images have {pixel_count} pixels in total, more than the limit of "
        f"{budget.request_pixels}: send fewer or smaller images per request",
    )


def _no_pixels_left(limit: int, pixel_count: int) -> Refusal:
    return Refusal(
        _TRY_AGAIN,
        f"the batch may have {limit} pixels, and other requests in it leave too few for the {pixel_count} of this "
        "one: try again later",
    )
