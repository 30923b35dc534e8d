"""What an encoded image says of itself, read without decoding a pixel: its format, mode and size.

Pillow reads the headers. What it would read at length, or not count, is bounded here first.
"""

from __future__ import annotations

import io
import re
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from PIL import Image, UnidentifiedImageError

from .budget import Budget
from .errors import ImageError, first_line

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF")

# Pillow 13 reads what stands before the pixels in Python, a segment or a byte at a time (0.2 s per megabyte), and
# inflates each compressed text of a PNG up to a megabyte (2 ms for 1 kB). Photographs have some ten segments,
# or one for each 64 kB of metadata.
_JPEG_SEGMENTS = 4096
_JPEG_STRAY_BYTES = 65_536
_PNG_CHUNKS = 4096  # beside those of the pixels
_PNG_PIXEL_CHUNKS = 65_536
_PNG_COMPRESSED = 32

# A marker, and not a fill byte, an escaped FF of the coded data (FF00) or a restart (FFD0 to FFD7).
_JPEG_MARKER = re.compile(rb"\xff([\x01-\xcf\xd8-\xfe])")
_JPEG_START, _JPEG_END, _JPEG_SCAN, _JPEG_TEMPORARY = 0xD8, 0xD9, 0xDA, 0x01
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # ITU-T T.81, table B.1
_JPEG_PROGRESSIVE = frozenset((0xC2, 0xC6, 0xCA, 0xCE))

_STARVED = "this machine has too little memory left to decode the image"

_TIFF_TILE_WIDTH, _TIFF_TILE_LENGTH = 322, 323


@dataclass(frozen=True)
class Header:
    """What is known of an image before it is decoded.

    ``mode`` is Pillow's (``RGB``, ``L``, ``P``, ``I;16`` …); ``pixels`` is what decoding it has to make.
    """

    format: str
    mode: str
    width: int
    height: int
    pixels: int


def read_header(data: bytes, budget: Budget) -> Header:
    """Read the header of one encoded image (of a moving one, its first frame).

    Raises:
        ImageError: with status 400 (empty, broken), 413 (beyond ``budget``) or 415 (not an image, or a
            format that is not supported).
        MemoryError: this machine has too little memory; nothing is wrong with the image.
    """
    with opened(data, budget) as image:
        return _header(image)


@contextmanager
def opened(data: bytes, budget: Budget) -> Iterator[Image.Image]:
    """The image as Pillow opens it, its pixels not decoded yet, checked against ``budget``.

    What the block raises is told as a fault of the image, as `read_header` does.
    """
    if not data:
        raise ImageError("the image is empty (0 bytes)")
    with faults_named(budget):
        if data.startswith(b"\xff\xd8\xff"):
            _check_jpeg(data, budget)
        elif data.startswith(b"\x89PNG\r\n\x1a\n"):
            _check_png(data)
        with warnings.catch_warnings():
            # Pillow warns of large images long before our own limit, and of broken EXIF.
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                header = _header(image)
                if header.pixels > budget.image_pixels:
                    tiles = ", in tiles that have more" if header.pixels > header.width * header.height else ""
                    size = f"{header.width}x{header.height} pixels{tiles}"
                    raise ImageError(f"the image has {size}, more than the limit of {budget.image_pixels}", 413)
                yield image


@contextmanager
def faults_named(budget: Budget) -> Iterator[None]:
    """Tell whatever a decoder raises as an `ImageError` of one line, and want of memory as a MemoryError."""
    try:
        yield
    except ImageError:
        raise
    except MemoryError:
        raise MemoryError(_STARVED) from None
    except UnidentifiedImageError:
        raise ImageError(f"not an image in a supported format ({', '.join(FORMATS)})", 415) from None
    except Image.DecompressionBombError:  # before we see the size: Pillow has a limit of its own
        raise ImageError(f"the image has more than the limit of {budget.image_pixels} pixels", 413) from None
    except Exception as error:  # noqa: BLE001 - decoders raise OSError, SyntaxError, struct.error, RuntimeError …
        if _lacks_memory(error, budget):
            raise MemoryError(_STARVED) from None
        raise ImageError(f"the image is truncated or broken ({_reason(error)})") from None


def _header(image: Image.Image) -> Header:
    width, height = image.size
    pixels = width * height
    if image.format == "TIFF":
        # libtiff decodes whole tiles, and one may be larger than the image.
        tags = image.tag_v2  # type: ignore[attr-defined]
        pixels = max(pixels, tags.get(_TIFF_TILE_WIDTH, 0) * tags.get(_TIFF_TILE_LENGTH, 0))
    return Header(image.format or "", image.mode, width, height, pixels)


def _check_jpeg(data: bytes, budget: Budget) -> None:
    """Bound a JPEG's segments before its first scan, and its scans.

    Raises:
        ImageError: 413, there are more than anybody writes.
    """
    position = 2
    segments = stray = scans = components = 0
    progressive = False
    while (marker := _JPEG_MARKER.search(data, position)) is not None:
        kind = marker[1][0]
        segments += 1
        stray += marker.start() - position if scans == 0 else 0
        if segments > _JPEG_SEGMENTS:
            raise ImageError(f"the JPEG has more than {_JPEG_SEGMENTS} segments", 413)
        if stray > _JPEG_STRAY_BYTES:
            break
        position = marker.end()
        if kind == _JPEG_END:
            return
        if kind in (_JPEG_START, _JPEG_TEMPORARY):  # they have no length
            continue
        if kind in _JPEG_FRAMES:
            progressive = kind in _JPEG_PROGRESSIVE
            components = data[position + 7] if position + 7 < len(data) else 0
        if kind == _JPEG_SCAN:
            scans += 1
            if not progressive and data[position + 2 : position + 3] >= bytes((components,)):
                return  # the first scan has all components: libjpeg reads no other
            if scans > budget.jpeg_scans:
                raise ImageError(f"the JPEG has more than {budget.jpeg_scans} scans", 413)
        position += max(2, int.from_bytes(data[position : position + 2], "big"))
    if scans == 0 and stray + len(data) - position > _JPEG_STRAY_BYTES:
        raise ImageError(f"the JPEG has more than {_JPEG_STRAY_BYTES} stray bytes between its segments", 413)


def _check_png(data: bytes) -> None:
    """Bound a PNG's chunks, and those that Pillow inflates while it opens the file.

    Raises:
        ImageError: 413, there are more than anybody writes.
    """
    position = 8
    chunks = pixel_chunks = compressed = 0
    while position + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, position)
        if kind in (b"IDAT", b"fdAT"):
            pixel_chunks += 1
        else:
            chunks += 1
            compressed += kind in (b"iCCP", b"zTXt", b"iTXt")
        if chunks > _PNG_CHUNKS or pixel_chunks > _PNG_PIXEL_CHUNKS or compressed > _PNG_COMPRESSED:
            raise ImageError(
                f"the PNG has more than {_PNG_CHUNKS} chunks ({_PNG_PIXEL_CHUNKS} of pixels, "
                f"{_PNG_COMPRESSED} of text or colour profiles)",
                413,
            )
        if kind == b"IEND":
            return
        position += 12 + length


def _lacks_memory(error: Exception, budget: Budget) -> bool:
    # Words of torch 2.14 (which has no type for it on the CPU), of libjpeg and of Pillow 13.
    if re.search("can't allocate memory|Insufficient memory|out of memory", str(error)) is not None:
        return True
    try:
        # Others, such as libwebp, say no more than that they failed. Asked for and not touched, this costs nothing:
        # what the largest image may need, RGBA twice.
        np.empty(8 * budget.image_pixels, dtype=np.uint8)
    except MemoryError:
        return True
    return False


def _reason(error: Exception) -> str:
    # torchvision's C++ errors begin with the function and the source line that raised them.
    return re.sub(r"^\w+, \S+:\d+, ", "", first_line(error))[:120]
