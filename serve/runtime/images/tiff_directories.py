"""Limits the contents of a TIFF's directories. EXIF data are such directories too.

Pillow 13 creates a Python object for each number in a directory while it holds Python's lock: 0.7 s for a megabyte of
rationals. libtiff (4.7) reads each strip where the directory says, also the same bytes many times.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..errors import ImageError

_MOST_TAGS = 4096
_MOST_PARTS = 32_768  # strips or tiles; a million takes 10 s
_MOST_NUMBERS = 16_384
_MOST_DIRECTORIES = 8

_PLACES, _SIZES = (273, 324), (279, 325)  # where strips and tiles begin, and their bytes
_READ = (274, 282, 283, 296)  # orientation, and resolution with its unit
_INNER = (34665, 34853, 40965)  # the directories of EXIF, GPS and interoperability, which Pillow reads
# Bytes of a number by its type (TIFF 6.0, section 2, and BigTIFF). Bytes and text become no numbers.
_WIDTHS = {3: 2, 4: 4, 5: 8, 6: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8}


def check_exif(data: bytes) -> None:
    """Check that Pillow reads orientation and resolution from EXIF within milliseconds. It reads nothing else.

    Broken data pass, because Pillow will report them.

    Raises:
        ImageError: status 413, there is more than in any real image.
    """
    file = _File.of(data.removeprefix(b"Exif\0\0"))
    if file is not None:
        entries = file.entries(file.first, "EXIF")
        _check_numbers(sum(count for tag, kind, count, _ in entries if tag in _READ and kind in _WIDTHS), "EXIF")


def check_tiff(data: bytes) -> None:
    """Limit the first directory of a TIFF and those inside it: tags, numbers, strips and tiles, and the bytes of these.

    Broken files pass, because a decoder will report them.

    Raises:
        ImageError: status 413, there is more than in any real image.
    """
    if (file := _File.of(data)) is None:
        return
    waiting, seen, numbers = [file.first], set[int](), 0
    while waiting and len(seen) < _MOST_DIRECTORIES:
        if (position := waiting.pop()) in seen:
            continue
        seen.add(position)
        for tag, kind, count, value in file.entries(position, "TIFF"):
            if tag in _PLACES or tag in _SIZES:
                if count > _MOST_PARTS:
                    raise ImageError(f"the TIFF has {count} strips or tiles, more than {_MOST_PARTS}", 413)
                if tag in _SIZES and file.sum_of(kind, count, value) > 2 * len(data):
                    raise ImageError("the TIFF's strips or tiles have more than twice the bytes of the file", 413)
            elif tag in _INNER:
                waiting.append(value)
            elif kind in _WIDTHS:
                numbers += count
        _check_numbers(numbers, "TIFF")


def _check_numbers(numbers: int, what: str) -> None:
    if numbers > _MOST_NUMBERS:
        raise ImageError(f"the {what} has {numbers} numbers in its tags, more than {_MOST_NUMBERS}", 413)


@dataclass(frozen=True)
class _File:
    """A TIFF as `struct` reads it: its byte order, whether it is a BigTIFF, and the position of its first directory."""

    data: bytes
    order: str
    big: bool
    first: int

    @classmethod
    def of(cls, data: bytes) -> _File | None:
        """Read the header of a TIFF. None: the data end within it."""
        order = ">" if data.startswith(b"MM") else "<"
        big = data[2:3] == b"\x2b"  # Pillow's own test
        try:
            return cls(data, order, big, *struct.unpack_from(order + ("8xQ" if big else "4xL"), data))
        except struct.error:
            return None

    def entries(self, position: int, what: str) -> Iterator[tuple[int, int, int, int]]:
        """Yield tag, type, count and value (or its position) of each complete entry of a directory.

        Raises:
            ImageError: status 413, there are more than in any real image.
        """
        number, entry = ("Q", "HHQQ") if self.big else ("H", "HHLL")
        try:
            (tags,) = struct.unpack_from(self.order + number, self.data, position)
        except (struct.error, OverflowError):
            return
        if tags > _MOST_TAGS:
            raise ImageError(f"the {what} has {tags} tags, more than {_MOST_TAGS}", 413)
        begin, size = position + struct.calcsize(self.order + number), struct.calcsize(self.order + entry)
        there = min(tags, max(0, len(self.data) - begin) // size)
        yield from struct.iter_unpack(self.order + entry, self.data[begin : begin + there * size])

    def sum_of(self, kind: int, count: int, value: int) -> int:
        """Return the sum of ``count`` whole numbers at ``value``. 0 for the few that fit into the entry itself."""
        width = _WIDTHS.get(kind, 0)
        if kind not in (3, 4, 16) or width * count <= (8 if self.big else 4):
            return 0
        there = max(0, min(count, (len(self.data) - value) // width))
        return sum(map(int, np.frombuffer(self.data, f"{self.order}u{width}", there, value if there else 0)))
