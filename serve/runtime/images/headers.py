"""Reads an encoded image's format, mode and size without decoding a pixel.

Pillow reads the headers, after `structure` has checked that this is fast. `structure` itself reads those of plain JPEGs
and WebPs.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from PIL import Image, UnidentifiedImageError

from ..card.budget import Budget
from ..device.device_faults import lacks_memory
from ..errors import ImageError, first_line
from .bmp_commands import check_commands, is_run_length_encoded
from .structure import check_structure, plain_jpeg, plain_webp
from .timed_file import TimedFile

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF")

_TOO_LITTLE_MEMORY = "this machine does not have enough memory to decode the image"

_TIFF_TILE_WIDTH, _TIFF_TILE_LENGTH = 322, 323

# Why an image of some formats may have more pixels to decode than it shows.
_MORE = {
    "TIFF": ", stored in larger tiles",
    "WEBP": ", counted twice because it is animated",
    "BMP": ", counted four times because it is run-length encoded",
}


#: Common mistakes of clients, and what to send instead.
_NO_IMAGES = {
    "it is compressed with gzip, send the image itself": re.compile(rb"\x1f\x8b"),
    'it is a data: URL, send its bytes, or the URL as {"instances": [{"b64": "data:…"}]}': re.compile(rb"\s*data:"),
    "it is HEIF or AVIF, save it as JPEG": re.compile(rb".{4}ftyp", re.DOTALL),
    "it is PDF, save a page as PNG": re.compile(rb"%PDF"),
    "it is SVG or HTML, save it as PNG": re.compile(rb"\s*<(?:\?xml|svg|!doctype|html)", re.IGNORECASE),
}


@dataclass(frozen=True)
class Header:
    """The facts about an image before it is decoded.

    ``mode`` is Pillow's (``RGB``, ``L``, ``P``, ``I;16`` …). ``pixels`` is the number that a decoder must produce.
    """

    format: str
    mode: str
    width: int
    height: int
    pixels: int


def read_header(data: bytes, budget: Budget) -> Header:
    """Read the header of one encoded image. Of an animation it is the first frame's.

    Raises:
        ImageError: status 400 (empty, broken), 413 (beyond ``budget``) or 415 (not an image, or an unsupported format).
        MemoryError: this machine has too little memory. The image is not at fault.
    """
    with faults_named(budget):
        _check_parts(data, budget)
        if (header := _plain_header(data)) is not None:
            _check_pixels(header, budget)
            return header
        with _open_with_pillow(data, budget) as image:
            return _header(image)


@contextmanager
def opened(data: bytes, budget: Budget) -> Iterator[Image.Image]:
    """Open an image with Pillow without decoding its pixels, and check it against ``budget``.

    Exceptions in the block are converted to faults of the image, like in `read_header`.
    """
    with faults_named(budget):
        _check_parts(data, budget)
        with _open_with_pillow(data, budget) as image:
            yield image


@contextmanager
def faults_named(budget: Budget) -> Iterator[None]:
    """Convert any exception of a decoder to an `ImageError` of one line, or to a MemoryError for too little memory."""
    try:
        yield
    except ImageError:
        raise
    except MemoryError:
        raise MemoryError(_TOO_LITTLE_MEMORY) from None
    except Image.DecompressionBombError:  # Pillow has its own limit, and raises before the size is known
        raise ImageError(f"the image has more than the limit of {budget.image_pixels} pixels", 413) from None
    except Exception as error:  # noqa: BLE001 - decoders raise OSError, SyntaxError, struct.error, RuntimeError …
        if lacks_memory(error) or not _has_room(budget):
            raise MemoryError(_TOO_LITTLE_MEMORY) from None
        raise ImageError(f"the image is truncated or broken ({_reason(error)})") from None


def _check_parts(data: bytes, budget: Budget) -> None:
    """Check that the image is not empty, and that its parts beside the pixels are limited.

    Raises:
        ImageError: status 400, it is empty. Or see `check_structure`.
    """
    if not data:
        raise ImageError("the image is empty (0 bytes)")
    check_structure(data, budget)


def _plain_header(data: bytes) -> Header | None:
    """Return the header if `structure` can read it without Pillow."""
    if (jpeg := plain_jpeg(data)) is not None:
        width, height, components = jpeg
        return Header("JPEG", "RGB" if components == 3 else "L", width, height, width * height)
    if (webp := plain_webp(data)) is not None:
        width, height, alpha = webp
        return Header("WEBP", "RGBA" if alpha else "RGB", width, height, width * height)
    return None


@contextmanager
def _open_with_pillow(data: bytes, budget: Budget) -> Iterator[Image.Image]:
    with warnings.catch_warnings():
        # Pillow warns of large images long before the project's limit, and of broken EXIF.
        warnings.simplefilter("ignore")
        try:
            picture = Image.open(TimedFile(data, budget.image_seconds), formats=FORMATS)
        except UnidentifiedImageError:
            remedy = next((f": {what}" for what, sign in _NO_IMAGES.items() if sign.match(data)), "")
            raise ImageError(f"not an image in a supported format ({', '.join(FORMATS)}){remedy}", 415) from None
        with picture as image:
            _check_pixels(_header(image), budget)
            if is_run_length_encoded(image):
                check_commands(data, image)
            yield image


def _check_pixels(header: Header, budget: Budget) -> None:
    """Check that an image has no more pixels than allowed.

    Raises:
        ImageError: status 413, it has more.
    """
    if header.pixels > budget.image_pixels:
        more = _MORE[header.format] if header.pixels > header.width * header.height else ""
        size = f"{header.width}x{header.height} pixels{more}"
        raise ImageError(f"the image has {size}, more than the limit of {budget.image_pixels}", 413)


def _header(image: Image.Image) -> Header:
    width, height = image.size
    pixels = width * height
    if image.format == "TIFF":
        # libtiff decodes whole tiles. They may be larger than the image, and there may be thousands.
        tags = image.tag_v2  # type: ignore[attr-defined]
        across, down = tags.get(_TIFF_TILE_WIDTH, 0), tags.get(_TIFF_TILE_LENGTH, 0)
        if across > 0 and down > 0:
            pixels = max(pixels, -(-width // across) * across * -(-height // down) * down)
    if image.format == "WEBP" and getattr(image, "is_animated", False):
        pixels *= 2  # libwebp composes an animation on two canvases: twice the bytes of any other format
    if is_run_length_encoded(image):
        pixels *= 4  # Pillow decodes them in Python: 70 ns for each pixel, 10 to 30 in other formats
    return Header(image.format or "", image.mode, width, height, pixels)


def _has_room(budget: Budget) -> bool:
    """Whether memory for the largest image is free, RGBA twice. libwebp reports only that it failed."""
    try:
        np.empty(8 * budget.image_pixels, dtype=np.uint8)  # an untouched allocation costs nothing
    except MemoryError:
        return False
    return True


def _reason(error: Exception) -> str:
    # torchvision's C++ errors begin with the function and the source line.
    return re.sub(r"^\w+, \S+:\d+, ", "", first_line(error))[:120]
