"""Limits the parts of an encoded image beside its pixels: segments, chunks, tags, scans."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

from ..card.budget import Budget
from ..errors import ImageError
from .tiff_directories import check_exif, check_tiff

# Pillow 13 reads everything before the pixels in Python, a segment or a byte at a time (up to 0.25 s per megabyte). It
# inflates each compressed text of a PNG up to a megabyte (2 ms for 1 kB). Photographs have some ten segments, or one
# for each 64 kB of metadata.
_JPEG_SEGMENTS = 4096
_JPEG_STRAY_BYTES = 65_536
_JPEG_TAIL = 64
_JPEG_EXIF_BYTES = 131_072  # a segment holds 65,533; Pillow joins several, with a copy of everything for each
_JPEG_PARSED_BYTES = 4 << 20  # in the two kinds of segments that Pillow parses in Python, at 0.1 s a megabyte
_JPEG_PARSED = frozenset((0xDB, 0xED))
_JPEG_CODING_TABLES = frozenset((0xC4, 0xDB))  # Huffman tables, and quantization tables
_PNG_CHUNKS = 4096  # other than pixel chunks
_PNG_PIXEL_CHUNKS = 32_768
_PNG_COMPRESSED = 32
_GIF_BLOCKS = 32_768  # before the first image, each at most 255 bytes; stray bytes count too

# A marker: not a fill byte, an escaped FF in coded data (FF00), or a restart (FFD0 to FFD7).
_JPEG_MARKER = re.compile(rb"\xff([\x01-\xcf\xd8-\xfe])")
_JPEG_START, _JPEG_END, _JPEG_SCAN, _JPEG_TEMPORARY, _JPEG_EXIF = 0xD8, 0xD9, 0xDA, 0x01, 0xE1
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # ITU-T T.81, table B.1
_JPEG_PROGRESSIVE = frozenset((0xC2, 0xC6, 0xCA, 0xCE))
# Frames that libjpeg and Pillow read alike, and the segments allowed before the first scan: tables, comments, metadata.
_JPEG_USUAL_FRAMES = frozenset((0xC0, 0xC1, 0xC2))
_JPEG_USUAL_TABLES = frozenset((0xC4, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0)))


def check_structure(data: bytes, budget: Budget) -> None:
    """Check that Pillow opens ``data`` within milliseconds, and that decoding costs only the pixels' time.

    Broken files pass, because a decoder will report them. A BMP is checked after it is opened (`bmp_commands`). WebP
    needs no such limits.

    Raises:
        ImageError: status 413, it has more parts than any real image.
    """
    if data.startswith(b"\xff\xd8\xff"):
        _check_jpeg(data, budget)
    elif data.startswith(b"\x89PNG\r\n\x1a\n"):
        _check_png(data)
    elif data.startswith((b"GIF87a", b"GIF89a")):
        _check_gif(data)
    elif data.startswith((b"II", b"MM")) and len(data) > 8:
        check_tiff(data)


def plain_jpeg(data: bytes) -> tuple[int, int, int] | None:
    """Return width, height and components (1 or 3) of a usual JPEG. Pillow would take 0.1 ms for it.

    In a usual JPEG the segments follow each other without a gap up to the first scan. One of them is a frame of 8 bits
    with its size. None: the file is not a usual JPEG.
    """
    found: tuple[int, int, int] | None = None
    for kind, start, end in _jpeg_segments(data):
        if kind == _JPEG_SCAN:
            return found
        if kind in _JPEG_USUAL_FRAMES and found is None:
            if (found := _frame_size(data[start:end])) is None:
                break
        elif kind not in _JPEG_USUAL_TABLES:
            break
    return None


def whole_jpeg(data: bytes) -> bool:
    """Whether a JPEG has its decoding tables and its end marker, with at most some stray bytes behind it.

    Coded data never contain that marker (ITU-T T.81, B.1.1.5), so a file without it was cut off. A file with more bytes
    behind it, or without its tables, counts as incomplete.
    """
    if data.rfind(bytes((0xFF, _JPEG_END)), max(0, len(data) - _JPEG_TAIL)) < 0:
        return False
    return {kind for kind, _, _ in _jpeg_segments(data)} >= _JPEG_CODING_TABLES


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield kind, begin and end of the content of each segment of a JPEG, up to the first scan or gap."""
    position = 2 if data.startswith(b"\xff\xd8") else len(data)
    while position + 4 <= len(data) and data[position] == 0xFF:
        kind, length = data[position + 1], int.from_bytes(data[position + 2 : position + 4], "big")
        yield kind, position + 4, position + 2 + length
        if kind == _JPEG_SCAN or length < 2:
            return
        position += 2 + length


def plain_webp(data: bytes) -> tuple[int, int, bool] | None:
    """Return width, height and whether it has alpha, for a WebP of one chunk, without Pillow.

    Pillow 13 opens every WebP as an animation. libwebp allocates its whole canvas before a pixel is read: 196 MB and 1
    to 2 ms for 49 megapixels. None: the file has metadata, is animated, incomplete, or not a WebP.

    The layouts are in RFC 9649, section 2.5 and 3.1, and RFC 6386, section 9.1.
    """
    size = int.from_bytes(data[16:20], "little")
    whole = len(data) >= 30 and len(data) == 20 + size + size % 2 == 8 + int.from_bytes(data[4:8], "little")
    if not whole or data[:4] != b"RIFF" or data[8:12] != b"WEBP":
        return None
    if data[12:16] == b"VP8L" and data[20] == 0x2F:
        bits = int.from_bytes(data[21:25], "little")
        return ((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1, bool(bits >> 28 & 1)) if bits >> 29 == 0 else None
    if data[12:16] == b"VP8 " and data[20] & 1 == 0 and data[23:26] == b"\x9d\x01\x2a":
        width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", data, 26))
        return (width, height, False) if width and height else None
    return None


def _frame_size(frame: bytes) -> tuple[int, int, int] | None:
    """Return width, height and components of a frame header. None: more than 8 bits, no size, or other components."""
    if len(frame) < 6:
        return None
    bits, height, width, components = struct.unpack_from(">BHHB", frame)
    usual = bits == 8 and height and width and components in (1, 3) and len(frame) == 6 + 3 * components
    return (width, height, components) if usual else None


def _check_jpeg(data: bytes, budget: Budget) -> None:
    """Limit a JPEG's segments before its first scan, and its scans.

    Raises:
        ImageError: status 413, there are more than in any real image.
    """
    position = 2
    segments = stray = scans = components = 0
    progressive, metadata = False, _JpegMetadata()
    # Before the first scan the search ends at the limit for stray bytes.
    while marker := _JPEG_MARKER.search(data, position, len(data) if scans else position + _JPEG_STRAY_BYTES + 2):
        kind = marker[1][0]
        segments += 1
        stray += marker.start() - position if scans == 0 else 0
        if segments > _JPEG_SEGMENTS:
            raise ImageError(f"the JPEG has more than {_JPEG_SEGMENTS} segments", 413)
        if stray > _JPEG_STRAY_BYTES:
            break
        position = marker.end()
        if kind == _JPEG_END and scans:
            return
        if kind in (_JPEG_START, _JPEG_END, _JPEG_TEMPORARY):  # these have no length
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
        length = max(2, int.from_bytes(data[position : position + 2], "big"))
        if scans == 0:
            metadata.add(kind, data[position + 2 : position + length])
        position += length
    if scans == 0 and stray + len(data) - position > _JPEG_STRAY_BYTES:
        raise ImageError(f"the JPEG has more than {_JPEG_STRAY_BYTES} stray bytes between its segments", 413)


class _JpegMetadata:
    """Counts the segments before a JPEG's first scan that Pillow parses in Python."""

    def __init__(self) -> None:
        self._exif = self._parsed = 0

    def add(self, kind: int, content: bytes) -> None:
        """Count a segment.

        Raises:
            ImageError: status 413, there is more than in any real image.
        """
        if kind == _JPEG_EXIF and content.startswith(b"Exif\0\0"):
            self._exif += len(content)
            check_exif(content)
        elif kind in _JPEG_PARSED:
            self._parsed += len(content)
        if self._exif > _JPEG_EXIF_BYTES:
            raise ImageError(f"the JPEG has more than {_JPEG_EXIF_BYTES} bytes of EXIF", 413)
        if self._parsed > _JPEG_PARSED_BYTES:
            raise ImageError(f"the JPEG has more than {_JPEG_PARSED_BYTES} bytes of tables or of Photoshop data", 413)


def _check_png(data: bytes) -> None:
    """Limit a PNG's chunks, and those that Pillow inflates when it opens the file.

    Raises:
        ImageError: status 413, there are more than in any real image.
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
        if kind == b"eXIf":
            check_exif(data[position + 8 : position + 8 + length])
        if chunks > _PNG_CHUNKS or pixel_chunks > _PNG_PIXEL_CHUNKS or compressed > _PNG_COMPRESSED:
            raise ImageError(
                f"the PNG has more than {_PNG_CHUNKS} chunks (limits: {_PNG_PIXEL_CHUNKS} for pixels, "
                f"{_PNG_COMPRESSED} for text or colour profiles)",
                413,
            )
        if kind == b"IEND":
            return
        position += 12 + length


def _check_gif(data: bytes) -> None:
    """Limit the data before a GIF's first image: comments and other extensions, and stray bytes.

    Raises:
        ImageError: status 413, there is more than in any real image.
    """
    position = 13 + (3 << (data[10] & 7) + 1 if data[10:11] > b"\x7f" else 0)
    blocks = 0
    while position < len(data) and data[position] not in b",;":
        extension = data[position] == 0x21
        position += 2 if extension else 1
        blocks += 1
        while extension and position < len(data) and data[position] and blocks <= _GIF_BLOCKS:
            position += 1 + data[position]
            blocks += 1
        position += extension
        if blocks > _GIF_BLOCKS:
            raise ImageError(f"the GIF has more than {_GIF_BLOCKS} blocks before its first image", 413)
