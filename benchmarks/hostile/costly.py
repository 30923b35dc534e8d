"""Images that cost a decoder as much as it lets anybody make it: per byte, or per pixel that they claim.

What these files do is what attackers find: commands and blocks that make no pixel, metadata that is taken apart in
Python, parts that lie in one place and are read again and again, and pixels of the slowest coding.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator

import numpy as np
from PIL import Image

from benchmarks.hostile import bombs
from benchmarks.hostile.pictures import encoded, picture

#: Megabytes of a file whose cost is in its bytes.
_MEGABYTES = 8


def costly() -> Iterator[tuple[str, str, Callable[[], bytes]]]:
    """The format, the words for each file, and what makes it."""
    many = _MEGABYTES << 20
    for title, command in (("moves by nothing", b"\0\2\0\0"), ("ends of rows", b"\0\0"), ("runs of nothing", b"\1\0")):
        yield "BMP", f"16x16 pixels, run-length {title}", _call(bombs.bmp_of, command * (many // len(command)))
    short = (b"\1\0" * 510 + b"\0\0") * 510
    yield "BMP", "260,000 pixels in runs of one", _call(bombs.bmp_of, short, 510, 510)
    yield "BMP", "1 megapixel in runs of one", _call(bombs.bmp_of, short * 4, 510, 2040)
    runs = (b"\xff\x12" * 14 + b"\0\0") * 3400
    yield "BMP", "11 megapixels, run-length encoded with 4 bits", lambda: bombs.bmp_of(runs, 3400, 3400, half=True)
    yield "BMP", "12 megapixels in a row that ends at once", lambda: bombs.bmp_of(b"\1\1\0\0", 12_000_000, 1)
    yield "BMP", "49 megapixels of one bit", lambda: encoded(_noise(7000).convert("1"), "BMP")
    yield "GIF", "codes that begin anew and again", lambda: _gif(_codes([256] * 8, 9) * (many // 9), 255)
    yield "GIF", "the same in blocks of a byte", lambda: _gif(_codes([256] * 8, 9) * (many // 18), 1)
    yield "GIF", "25 megapixels of noise", lambda: encoded(_noise(5000), "GIF")
    yield "GIF", "comments before the image", lambda: bombs.gif_of(b"!\xfe\x01a\0" * (many // 5))
    yield "JPEG", "segments that Pillow puts together", lambda: _jpeg(bombs.segment(b"Exif\0\0" + bytes(65_000)) * 120)
    yield "JPEG", "4 MB of tables", lambda: _jpeg(bombs.segment((b"\0" + b"\1" * 64) * 1000, 0xDB) * 64)
    photoshop = b"Photoshop 3.0\0" + b"8BIM\x04\x04\0\0\0\0\0\0" * 5400
    yield "JPEG", "4 MB of Photoshop's resources", lambda: _jpeg(bombs.segment(photoshop, 0xED) * 64)
    yield "JPEG", "4,000 comments", lambda: _jpeg(bombs.segment(b"x", 0xFE) * 4000)
    yield "JPEG", "49 megapixels in 100 scans", lambda: bombs.progressive(100, 7000)
    yield "JPEG", "25 megapixels of noise, CMYK", lambda: encoded(_colours(5000).convert("CMYK"), "JPEG", quality=95)
    yield "PNG", "16x16 pixels behind tables for no pixel", lambda: _png(_tables(many // 11))
    yield "PNG", "16x16 pixels behind empty blocks", lambda: _png(_blocks(many // 5))
    yield "PNG", "texts", lambda: _png(zlib.compress(bytes(16 * 49)), bombs.chunk(b"tEXt", b"k\0" + bytes(2000)) * 4000)
    inflating = b"k\0\0" + zlib.compress(bytes(1 << 20), 9)
    yield "PNG", "32 texts of a megabyte", lambda: _png(_plain(), bombs.chunk(b"zTXt", inflating) * 32)
    yield "PNG", "EXIF of numbers", lambda: _png(_plain(), bombs.chunk(b"eXIf", bombs.exif_of_rationals(many // 8)))
    yield "PNG", "49 megapixels with alpha", lambda: encoded(Image.new("RGBA", (7000, 7000), "red"), "PNG")
    yield (
        "PNG",
        "12 million rows of one pixel",
        lambda: _png(zlib.compress(bytes(4 * 12_000_000), 1), size=(1, 12_000_000)),
    )
    yield "PNG", "25 megapixels of noise", lambda: encoded(_colours(5000), "PNG", compress_level=1)
    yield "TIFF", "numbers in its tags", lambda: bombs.tiff_of_rationals(many // 8)
    yield "TIFF", "16,000 numbers in its tags", lambda: bombs.tiff_of_rationals(16_000)
    yield "TIFF", "tags of EXIF", lambda: bombs.tiff_with_exif_of(60_000)
    yield "TIFF", "strips in one place", lambda: bombs.tiff_of_one_strip_for_all(1000, many // 5)
    yield "TIFF", "tiles in one place", lambda: bombs.tiff_of_tiles(1000, 16, shared=True)
    yield "TIFF", "32,000 strips", lambda: _strips(32_000)
    for coding in ("group4", "lzma", "tiff_lzw", "jpeg"):
        yield "TIFF", f"25 megapixels of noise, {coding}", _call(_tiff, coding)
    yield "TIFF", "49 megapixels of one bit", lambda: encoded(_noise(7000).convert("1"), "TIFF")
    yield (
        "WEBP",
        "EXIF of numbers",
        lambda: encoded(picture(), "WEBP", exif=b"Exif\0\0" + bombs.exif_of_rationals(many // 8)),
    )
    yield "WEBP", "metadata", lambda: encoded(picture(), "WEBP", xmp=b"tiff:Orientation" * (many // 16))
    yield "WEBP", "12 megapixels of noise", lambda: encoded(_colours(3500), "WEBP", quality=90, method=0)
    yield (
        "WEBP",
        "25 megapixels of noise, lossless",
        lambda: encoded(_colours(5000), "WEBP", lossless=True, quality=0, method=0),
    )
    yield "WEBP", "24 megapixels that move", lambda: _moving(4900)


def _call(function: Callable[..., bytes], *arguments: object) -> Callable[[], bytes]:
    return lambda: function(*arguments)


def _noise(side: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(side).integers(0, 256, (side, side), dtype=np.uint8))


def _colours(side: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(side).integers(0, 256, (side, side, 3), dtype=np.uint8))


def _tiff(coding: str) -> bytes:
    return encoded(_noise(5000).convert("1") if coding == "group4" else _colours(5000), "TIFF", compression=coding)


def _moving(side: int) -> bytes:
    one, other = Image.new("RGB", (side, side)), Image.new("RGB", (side, side), "white")
    return encoded(one, "WEBP", save_all=True, append_images=[other], method=0)


def _jpeg(segments: bytes) -> bytes:
    """A small JPEG of CMYK, which Pillow opens, with segments behind its first marker."""
    data = encoded(picture().convert("CMYK"), "JPEG")
    return data[:2] + segments + data[2:]


def _plain() -> bytes:
    return zlib.compress(bytes(16 * 49))


def _png(pixels: bytes, extra: bytes = b"", size: tuple[int, int] = (16, 16)) -> bytes:
    header = bombs.chunk(b"IHDR", struct.pack(">IIBBBBB", *size, 8, 2, 0, 0, 0))
    return bombs.SIGNATURE + header + extra + bombs.chunk(b"IDAT", pixels) + bombs.chunk(b"IEND", b"")


def _blocks(blocks: int) -> bytes:
    """A zlib stream with stored blocks of no byte before its pixels (RFC 1951, 3.2.4)."""
    return b"\x78\x9c" + b"\0\0\0\xff\xff" * blocks + _plain()[2:]


def _tables(blocks: int) -> bytes:
    """The same, of blocks that have Huffman tables and no byte (RFC 1951, 3.2.7): what zlib makes of one costs most."""
    fields = [(0, 1), (2, 2), (0, 5), (0, 5), (14, 4)]  # not the last; own tables; 257 literals, 1 distance, 18 lengths
    lengths = {18: 1, 1: 2, 0: 2}
    fields += [(lengths.get(word, 0), 3) for word in (16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1)]
    fields += [(0, 1), (138 - 11, 7), (0, 1), (118 - 11, 7)]  # no literal
    fields += [(0b11, 2), (0b11, 2), (0, 1)]  # the end of a block, and a distance, of one bit each; the end
    bits = "".join(format(value, f"0{width}b")[::-1] for value, width in fields)
    whole = bits * 8  # ends with a byte
    packed = bytes(int(whole[place : place + 8][::-1], 2) for place in range(0, len(whole), 8))
    return b"\x78\x9c" + packed * (blocks // 8) + _plain()[2:]


def _gif(codes: bytes, block: int) -> bytes:
    blocks = b"".join(
        bytes((len(codes[place : place + block]),)) + codes[place : place + block]
        for place in range(0, len(codes), block)
    )
    screen = b"GIF89a" + struct.pack("<HHBBB", 16, 16, 0xF7, 0, 0) + bytes(768)
    return screen + b"," + struct.pack("<HHHHB", 0, 0, 16, 16, 0) + b"\x08" + blocks + b"\0;"


def _codes(codes: list[int], width: int) -> bytes:
    bits = "".join(format(code, f"0{width}b")[::-1] for code in codes)
    return bytes(int(bits[place : place + 8][::-1], 2) for place in range(0, len(bits), 8))


def _strips(strips: int) -> bytes:
    """One pixel a row, each row a strip of its own."""
    size = ((256, 4, 1, 1), (257, 4, 1, strips), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (277, 3, 1, 1))
    begins = 8 + 2 + 12 * (len(size) + 3) + 4
    first = begins + 8 * strips
    lists = struct.pack(f"<{strips}I", *range(first, first + strips)) + struct.pack("<I", 1) * strips
    places = ((278, 4, 1, 1), (273, 4, strips, begins), (279, 4, strips, begins + 4 * strips))
    return bombs.tiff(*size, *places) + lists + bytes(strips)
