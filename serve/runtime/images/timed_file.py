"""A file in memory with a time limit for its reader. It ends a decoder that takes too long for one image."""

from __future__ import annotations

import io
import time

from ..errors import ImageError

# Reads between two looks at the clock. Each look is a system call, and a decoder in Python reads two bytes at a time.
_READS = 16


class TimedFile(io.BytesIO):
    """An encoded image that can no longer be read once its thread has computed for too long.

    Pillow's decoders, also those in Python, read a file piece by piece, so this limits each of them. Only the processor
    time of the reading thread counts, because a busy machine is not the image's fault. C decoders that get the whole
    file at once are not stopped (libjpeg-turbo in torchvision, libwebp, libtiff). `structure` and `headers` limit those
    by the file's parts.

    Args:
        data: the encoded image.
        seconds: limit in seconds of processor time, from now.
    """

    def __init__(self, data: bytes, seconds: float) -> None:
        super().__init__(data)
        self._seconds = seconds
        self._ends = time.thread_time() + seconds
        self._reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        """Read bytes like any file.

        Raises:
            ImageError: status 413, the time is over.
        """
        self._reads += 1
        if self._reads % _READS == 0 and time.thread_time() > self._ends:
            raise ImageError(f"decoding the image takes more than {self._seconds:g} s of processor time", 413)
        return super().read(size)
