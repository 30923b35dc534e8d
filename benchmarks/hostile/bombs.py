"""Images of a few kilobytes that are expensive to decode, one or more for each format."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from functools import cache

from PIL import Image

from benchmarks.hostile.pictures import encoded, picture

SIGNATURE = b"\x89PNG\r\n\x1a\n"


def chunk(kind: bytes, data: bytes) -> bytes:
    """A chunk of a PNG with its checksum."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of(width: int, height: int, *extra: bytes, interlaced: bool = False) -> bytes:
    """A PNG that claims a size, whose pixels are missing."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, interlaced))
    return SIGNATURE + header + b"".join(extra) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@cache
def webp(side: int = 7000) -> bytes:
    """A black square in 34 bytes, within the limit of one image."""
    return encoded(Image.new("RGB", (side, side)), "WEBP", lossless=True, method=0)


def webp_that_claims(side: int) -> bytes:
    """The header of a VP8X file; what would follow is missing."""
    size = (side - 1).to_bytes(3, "little")
    body = b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4) + size + size
    return b"RIFF" + struct.pack("<I", len(body)) + body


def gif_that_claims(side: int) -> bytes:
    """A GIF whose screen claims a size."""
    data = bytearray(encoded(picture(1).quantize(8), "GIF"))
    data[6:10] = struct.pack("<HH", side, side)
    return bytes(data)


def gif_with_a_frame_of(side: int) -> bytes:
    """A small screen, and a frame that is larger than it."""
    data = bytearray(encoded(picture(1).quantize(8), "GIF"))
    frame = data.index(b",", 13 + 3 * 8)
    data[frame + 5 : frame + 9] = struct.pack("<HH", side, side)
    return bytes(data)


def gif_of(blocks: bytes) -> bytes:
    """A small GIF with extensions, or bytes that are nothing, before its image."""
    data = encoded(picture(1).quantize(8), "GIF")
    colours = 13 + 3 * 8
    return data[:colours] + blocks + data[colours:]


def bmp_that_claims(side: int) -> bytes:
    """A BMP whose header claims a size."""
    data = bytearray(encoded(picture(1), "BMP"))
    data[18:26] = struct.pack("<ii", side, side)
    return bytes(data)


def bmp_of(commands: bytes, width: int = 16, height: int = 16, *, half: bool = False) -> bytes:
    """A BMP of a palette whose pixels are run-length encoded: 8 bits of a pixel, or 4 (``half``)."""
    colours = bytes(4 * (16 if half else 256))
    begins = 54 + len(colours)
    opening = b"BM" + struct.pack("<IHHI", begins + len(commands), 0, 0, begins)
    size = struct.pack("<IiiHHII", 40, width, height, 1, 4 if half else 8, 2 if half else 1, len(commands))
    return opening + size + struct.pack("<iiII", 0, 0, len(colours) // 4, 0) + colours + commands


def jpeg_that_claims(side: int) -> bytes:
    """A JPEG whose frame claims a size."""
    data = bytearray(encoded(picture(1), "JPEG"))
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = struct.pack(">HH", side, side)
    return bytes(data)


def tiff(*tags: tuple[int, int, int, int]) -> bytes:
    """The header of a TIFF with these tags (number, type, count, value)."""
    entries = b"".join(struct.pack("<HHII", *tag) for tag in sorted(tags))
    return b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", len(tags)) + entries + bytes(4)


def tiff_that_claims(side: int) -> bytes:
    """An uncompressed TIFF in one strip that claims a size; its pixels are missing."""
    size = ((256, 4, 1, side), (257, 4, 1, side), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (277, 3, 1, 1))
    strip = ((273, 4, 1, 8), (278, 4, 1, side), (279, 4, 1, 100))
    return tiff(*size, *strip)


def tiff_with_a_tile_of(side: int) -> bytes:
    """100x100 pixels, deflated, in one tile that is larger."""
    data = zlib.compress(bytes(1_000_000))
    tags = ((256, 4, 1, 100), (257, 4, 1, 100), (258, 3, 1, 8), (259, 3, 1, 8), (262, 3, 1, 1), (277, 3, 1, 1))
    tile = ((322, 4, 1, side), (323, 4, 1, side), (324, 4, 1, 200), (325, 4, 1, len(data)))
    opening = tiff(*tags, *tile)
    return opening + bytes(200 - len(opening)) + data


def tiff_of_strips(strips: int) -> bytes:
    """10x10 pixels, whose directory lists far more strips than rows; all strips lie in one place."""
    tags = ((256, 4, 1, 10), (257, 4, 1, 10), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (277, 3, 1, 1))
    opening = tiff(*tags, (278, 4, 1, 1), (273, 4, strips, 200), (279, 4, strips, 200 + 4 * strips))
    places, sizes = struct.pack("<I", 200) * strips, struct.pack("<I", 10) * strips
    return opening + bytes(200 - len(opening)) + places + sizes


def tiff_of_tiles(tiles: int, side: int, *, shared: bool) -> bytes:
    """One row of pixels in tiles that are as high as 3,000,000 of them: all in one place, or each in its own."""
    data = zlib.compress(bytes(side * 3_000_000), 1)
    tags = ((256, 4, 1, tiles * side), (257, 4, 1, 1), (258, 3, 1, 8), (259, 3, 1, 8), (262, 3, 1, 1), (277, 3, 1, 1))
    begins = 8 + 2 + 12 * (len(tags) + 4) + 4
    tile = ((322, 4, 1, side), (323, 4, 1, 3_000_000), (324, 4, tiles, begins), (325, 4, tiles, begins + 4 * tiles))
    first = begins + 8 * tiles
    places = [first + (0 if shared else number * len(data)) for number in range(tiles)]
    lists = struct.pack(f"<{tiles}I", *places) + struct.pack("<I", len(data)) * tiles
    return tiff(*tags, *tile) + lists + data * (1 if shared else tiles)


def tiff_of_one_strip_for_all(rows: int, blocks: int) -> bytes:
    """16 pixels a row, each row a strip: the same deflated bytes, of which most are blocks of nothing."""
    data = b"\x78\x9c" + b"\0\0\0\xff\xff" * blocks + zlib.compress(bytes(16))[2:]
    tags = ((256, 4, 1, 16), (257, 4, 1, rows), (258, 3, 1, 8), (259, 3, 1, 8), (262, 3, 1, 1), (277, 3, 1, 1))
    begins = 8 + 2 + 12 * (len(tags) + 3) + 4
    strips = ((278, 4, 1, 1), (273, 4, rows, begins), (279, 4, rows, begins + 4 * rows))
    lists = struct.pack("<I", begins + 8 * rows) * rows + struct.pack("<I", len(data)) * rows
    return tiff(*tags, *strips) + lists + data


_RATIONAL = struct.pack("<II", 1, 1)
_SMALL = ((256, 4, 1, 16), (257, 4, 1, 16), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (277, 3, 1, 1))
_SMALL_STRIP = ((273, 4, 1, 8), (278, 4, 1, 16), (279, 4, 1, 256))


def tiff_of_rationals(numbers: int) -> bytes:
    """16x16 pixels, whose resolution is so many numbers."""
    begins = 8 + 2 + 12 * (len(_SMALL) + len(_SMALL_STRIP) + 1) + 4
    return tiff(*_SMALL, *_SMALL_STRIP, (282, 5, numbers, begins)) + _RATIONAL * numbers


def tiff_with_exif_of(tags: int) -> bytes:
    """16x16 pixels, with a directory of EXIF that has so many entries."""
    begins = 8 + 2 + 12 * (len(_SMALL) + len(_SMALL_STRIP) + 1) + 4
    inner = struct.pack("<H", tags) + b"".join(struct.pack("<HHII", tag, 5, 8, 9) for tag in range(tags)) + bytes(4)
    return tiff(*_SMALL, *_SMALL_STRIP, (34665, 4, 1, begins)) + inner


def exif_of_rationals(numbers: int) -> bytes:
    """EXIF whose orientation is so many numbers."""
    return tiff((0x0112, 5, numbers, 26)) + _RATIONAL * numbers


def tiff_of_tags(tags: int) -> bytes:
    """A TIFF whose directory has so many entries."""
    return tiff(*((60_000 - tags + number, 4, 1, 1) for number in range(tags)))


def progressive(scans: int, side: int = 2000) -> bytes:
    """A progressive JPEG whose last scan is repeated, at 50 bytes each time."""
    data = encoded(Image.new("RGB", (side, side)), "JPEG", progressive=True)
    last = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + last * (scans - data.count(b"\xff\xda")) + data[-2:]


def sequential(scans: int, side: int = 2000) -> bytes:
    """A baseline JPEG in scans of one component each, one of them repeated and empty."""
    data = encoded(Image.new("L", (side, side)), "JPEG")
    frame, scan = data.index(b"\xff\xc0"), data.index(b"\xff\xda")
    size = data[frame + 5 : frame + 9]
    three = b"\xff\xc0" + struct.pack(">HB", 17, 8) + size + b"\3" + b"\1\x11\0\2\x11\0\3\x11\0"
    ended = frame + 2 + int.from_bytes(data[frame + 2 : frame + 4], "big")
    empty = b"\xff\xda\0\x08\1\1\0\0\x3f\0"
    return data[:frame] + three + data[ended:scan] + data[scan:-2] + empty * (scans - 1) + data[-2:]


@cache
def _inflates() -> bytes:
    return b"k\0\0" + zlib.compress(bytes(1 << 20), 9)


def _behind(start: bytes) -> bytes:
    """A JPEG with something behind its first marker."""
    data = encoded(picture(1), "JPEG")
    return data[:2] + start + data[2:]


def segment(data: bytes, kind: int = 0xE1) -> bytes:
    """A segment of a JPEG, of EXIF where nothing else is said."""
    return b"\xff" + bytes((kind,)) + struct.pack(">H", 2 + len(data)) + data


#: By name: what makes the encoded images that must be refused with 413, and quickly. They take a second together.
_MAKERS: dict[str, Callable[[], bytes]] = {
    "webp": lambda: webp(7100),
    "webp header": lambda: webp_that_claims(16_000),
    "png": lambda: png_of(10_000, 10_000),
    "png of 16 bits": lambda: encoded(Image.new("I;16", (8000, 7000)), "PNG"),
    "interlaced png": lambda: png_of(60_000, 60_000, interlaced=True),
    "png with texts": lambda: png_of(10, 10, chunk(b"zTXt", _inflates()) * 60),
    "png with colour profiles": lambda: png_of(10, 10, chunk(b"iCCP", _inflates()) * 2000),
    "png of empty chunks": lambda: png_of(10, 10, chunk(b"abCd", b"") * 100_000),
    "png of empty pixels": lambda: png_of(10, 10, chunk(b"IDAT", b"") * 100_000),
    "tiff": lambda: tiff_that_claims(60_000),
    "tiff with a tile": lambda: tiff_with_a_tile_of(30_000),
    "tiff of strips": lambda: tiff_of_strips(500_000),
    "tiff of tags": lambda: tiff_of_tags(60_000),
    "gif": lambda: gif_that_claims(60_000),
    "gif with a frame": lambda: gif_with_a_frame_of(60_000),
    "gif of comments": lambda: gif_of(b"!\xfe\x01a\0" * 200_000),
    "gif of a comment in bytes": lambda: gif_of(b"!\xfe" + b"\x01a" * 500_000 + b"\0"),
    "gif of stray bytes": lambda: gif_of(b"\x01" * 1_000_000),
    "bmp": lambda: bmp_that_claims(60_000),
    "bmp of moves by nothing": lambda: bmp_of(b"\0\2\0\0" * 1_000_000),
    "bmp of ends of rows": lambda: bmp_of(b"\0\0" * 2_000_000),
    "bmp of runs beyond the row": lambda: bmp_of(b"\1\0" * 2_000_000),
    "bmp of runs, large": lambda: bmp_of((b"\xff\x12" * 28 + b"\0\0") * 7000, 7000, 7000, half=True),
    "bmp of a row that ends at once": lambda: bmp_of(b"\1\1\0\0", 49_000_000, 1),
    "tiff of tiles in one place": lambda: tiff_of_tiles(1000, 16, shared=True),
    "tiff of large tiles": lambda: tiff_of_tiles(40, 16, shared=False),
    "tiff of strips in one place": lambda: tiff_of_one_strip_for_all(1000, 200_000),
    "tiff of numbers": lambda: tiff_of_rationals(500_000),
    "tiff with tags of exif": lambda: tiff_with_exif_of(60_000),
    "png with exif of numbers": lambda: png_of(10, 10, chunk(b"eXIf", exif_of_rationals(500_000))),
    "jpeg with exif of numbers": lambda: _behind(segment(b"Exif\0\0" + tiff((0x0112, 5, 100_000, 26)))),
    "jpeg with exif in parts": lambda: _behind(segment(b"Exif\0\0" + bytes(65_000)) * 60),
    "jpeg of tables": lambda: _behind(segment((b"\0" + b"\1" * 64) * 1000, 0xDB) * 80),
    "jpeg": lambda: jpeg_that_claims(60_000),
    "progressive jpeg": lambda: progressive(2000),
    "jpeg of many scans": lambda: sequential(2000),
    "jpeg of segments": lambda: _behind(b"\xff\xe5\0\2" * 500_000),
    "jpeg of fill bytes": lambda: _behind(b"\xff" * 2_000_000),
    "jpeg of stray bytes": lambda: _behind(b"\xff\xe0\0\2" + b"\1" * 2_000_000),
    "jpeg that ends": lambda: b"\xff\xd8\xff\xd9" + bytes(2_000_000),
    "jpeg of nothing": lambda: b"\xff\xd8\xff" + bytes(2_000_000),
}  # fmt: skip

BOMBS = tuple(_MAKERS)


@cache
def bomb(name: str) -> bytes:
    """One of them."""
    return _MAKERS[name]()


def each() -> Iterator[tuple[str, bytes]]:
    """All of them, with their names."""
    for name in BOMBS:
        yield name, bomb(name)
