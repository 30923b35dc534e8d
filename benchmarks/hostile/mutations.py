"""Images as nobody would send them: of every format and mode that Pillow writes, damaged by a seed."""

from __future__ import annotations

import io
import random
import struct
import warnings
import zlib
from functools import cache

import numpy as np
from PIL import Image, features

from benchmarks.hostile import bombs
from benchmarks.hostile.pictures import encoded, picture

MODES = (
    "1",
    "L",
    "P",
    "RGB",
    "RGBA",
    "LA",
    "PA",
    "CMYK",
    "YCbCr",
    "LAB",
    "HSV",
    "I",
    "F",
    "I;16",
    "I;16B",  # as a TIFF the only one whose numbers are big-endian
    "I;16L",
    "I;16N",
    "La",
    "RGBa",
    "RGBX",
)


@cache
def seeds() -> tuple[bytes, ...]:
    """A tiny image of every format and mode that Pillow writes, and some with what formats have beside pixels."""
    Image.init()
    found: list[bytes] = []
    for mode in MODES:
        image = (
            Image.new(mode, (12, 9), 1)
            if mode in ("La", "RGBa", "RGBX", "PA", "LAB") or mode.startswith("I;16")
            else picture(1, (12, 9)).convert(mode)
        )
        for kind in sorted(Image.SAVE):
            if kind == "PDF" and not features.check("jpg"):
                continue
            stream = io.BytesIO()
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    image.save(stream, kind)
            except Exception:  # noqa: BLE001 - it does not write this mode so
                continue
            found.append(stream.getvalue())
    small = picture(2, (20, 15))
    exif = Image.Exif()
    exif[0x0112] = 6
    found += [encoded(small, "JPEG", progressive=True), encoded(small, "JPEG", exif=exif, comment=b"x" * 50)]
    found += [
        encoded(small, "TIFF", compression=name) for name in ("tiff_lzw", "tiff_adobe_deflate", "jpeg", "packbits")
    ]
    found += [encoded(small, "TIFF", exif=exif), encoded(Image.fromarray(np.eye(9, dtype=np.float32)), "TIFF")]
    found += [encoded(small.quantize(9), "GIF", save_all=True, append_images=[picture(3, (20, 15)).quantize(9)])]
    found += [encoded(small, kind, save_all=True, append_images=[picture(3, (20, 15))]) for kind in ("PNG", "WEBP")]
    found += [encoded(small, "WEBP", lossless=True), encoded(small.convert("1"), "TIFF", compression="group4")]
    found += [encoded(small, "PNG", icc_profile=b"x" * 60), bombs.progressive(12, 16), bombs.sequential(3, 16)]
    return tuple(found)


def mutated(number: int) -> bytes:
    """One damaged image; the same number gives the same bytes."""
    chance = random.Random(number)
    data = bytearray(chance.choice(seeds()))
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        chance.choice((_truncate, _flip, _flip, _flip_early, _lie, _lie, _glue, _insert, _repeat))(data, chance)
    return bytes(data)


def sample() -> list[bytes]:
    """A few hundred, the same each time: every seed as it is, damaged, and as a file that is two."""
    found: list[bytes] = []
    for number, seed in enumerate(seeds()):
        chance = random.Random(number)
        damaged, glued = bytearray(seed), bytearray(seed)
        chance.choice((_truncate, _flip, _flip_early, _lie, _insert, _repeat))(damaged, chance)
        _glue(glued, chance)
        found += [seed, bytes(damaged), bytes(glued)]
    return found


def _truncate(data: bytearray, chance: random.Random) -> None:
    del data[chance.randrange(len(data) + 1) :]


def _flip(data: bytearray, chance: random.Random) -> None:
    for _ in range(chance.randint(1, 12)):
        if data:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def _flip_early(data: bytearray, chance: random.Random) -> None:
    for _ in range(chance.randint(1, 4)):
        if data:
            data[chance.randrange(min(64, len(data)))] = chance.randrange(256)


def _lie(data: bytearray, chance: random.Random) -> None:
    """Put a number where a header has one: a size, a length, an offset, a count."""
    value = chance.choice((0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x10000, 0x7FFFFFFF, 0xFFFFFFFF, 700, 3000, 70_000))
    form = chance.choice((">I", "<I", ">H", "<H"))
    packed = struct.pack(form, value & (0xFFFFFFFF if form[1] == "I" else 0xFFFF))
    start = chance.randrange(min(120, len(data)) + 1)
    data[start : start + len(packed)] = packed
    if data[:8] == bombs.SIGNATURE and len(data) > 33:  # and make the checksum of a PNG's header right again
        data[29:33] = struct.pack(">I", zlib.crc32(bytes(data[12:29])))


def _glue(data: bytearray, chance: random.Random) -> None:
    """A file that is two: one behind the other, one within the other, or the head of one on the body of the other."""
    other = chance.choice(
        (*seeds(), b"%PDF-1.7\n", b"PK\3\4", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"GIF89a", b"MZ")
    )
    kind = chance.randrange(4)
    if kind == 0:
        data += other
    elif kind == 1:
        data[:0] = other
    elif kind == 2:
        data[: chance.randint(2, 40)] = other[: chance.randint(2, 40)]
    else:
        start = chance.randrange(len(data) + 1)
        data[start:start] = other


def _insert(data: bytearray, chance: random.Random) -> None:
    start = chance.randrange(len(data) + 1)
    data[start:start] = chance.choice(
        (b"\0", b"\xff", b"\xff\xd8", b"\xff\xda", b"\xff\xc0", b"IDAT", b"\n")
    ) * chance.choice((1, 2, 50, 5000))


def _repeat(data: bytearray, chance: random.Random) -> None:
    if data:
        start = chance.randrange(len(data))
        data[start:start] = data[start : start + chance.randint(1, 60)] * chance.choice((1, 20))
