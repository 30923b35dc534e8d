"""A file in memory that is read for a limited time: ends a decoder that goes on and on within one image."""

from __future__ import annotations

import io
import time

from ..errors import ImageError

# Looking at the clock is a system call, and a decoder in Python reads two bytes at a time.
_READS = 16


class TimedFile(io.BytesIO):
    """An encoded image that refuses to be read once its thread has computed for too long.

    Pillow's decoders ask for a file piece by piece, those in Python too, so that this bounds each of them, whatever
    the file makes it do. It counts the processor time of the reading thread: a busy machine is not the image's fault.
    Decoders in C that are given the whole file (libjpeg-turbo by torchvision, libwebp, libtiff) are not ended: what
    bounds those is known from the file's parts (see `structure` and `headers`).

    Args:
        data: the encoded image.
        seconds: of processor time from now.
    """

    def __init__(self, data: bytes, seconds: float) -> None:
        super().__init__(data)
        self._seconds = seconds
        self._ends = time.thread_time() + seconds
        self._reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        """As of any file.

        Raises:
            ImageError: with status 413, the time is over.
        """
        self._reads += 1
        if self._reads % _READS == 0 and time.thread_time() > self._ends:
            raise ImageError(f"decoding the image takes more than {self._seconds:g} s of processor time", 413)
        return super().read(size)
