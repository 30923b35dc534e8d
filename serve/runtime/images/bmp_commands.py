"""Counts the commands of a run-length encoded BMP, before Pillow carries them out one by one in Python.

Pillow 13 (``BmpRleDecoder``) takes 0.2 µs for a command, however many pixels it makes: 40 MB of commands that make none
hold a thread, and Python's lock, for 16 s. A file needs no more commands than it has pixels and rows.
"""

from __future__ import annotations

from PIL import Image

from ..errors import ImageError

# Pillow's name for the decoder of these files.
_DECODER = "bmp_rle"
# The most that any image may have: 0.3 s of Pillow's, with the file that counts them (`timed_file`).
_MOST_COMMANDS = 1 << 18
# Commands without effect that a careless encoder may write.
_SPARE = 1024


def check_commands(data: bytes, image: Image.Image) -> None:
    """See that a run-length encoded BMP has no more commands than its pixels and rows need.

    Each command that makes progress makes a pixel at least, or ends a row, or moves on by a pixel (Microsoft, "Bitmap
    Compression"). Counting stops at the limit, so that this takes no longer for a larger file.

    Args:
        data: the file.
        image: the same, as Pillow has opened it, its pixels not decoded yet.

    Raises:
        ImageError: with status 413, it has more.
    """
    _, _, offset, arguments = image.tile[0]  # type: ignore[attr-defined]
    width, height = image.size
    most = min(width * height + height + _SPARE, _MOST_COMMANDS)
    half = bool(arguments[1])  # two pixels a byte
    if _count(data, offset, half, most) > most:
        raise ImageError(
            f"the BMP of {width}x{height} pixels has more than {most} run-length commands: send it as PNG", 413
        )


def is_run_length_encoded(image: Image.Image) -> bool:
    """Whether Pillow has opened such a file, and decoded nothing of it."""
    return any(tile.codec_name == _DECODER for tile in getattr(image, "tile", ()))


def _count(data: bytes, position: int, half: bool, most: int) -> int:
    """How many commands there are up to the end of the bitmap, or of the file; beyond ``most`` it stops."""
    commands = 0
    while position + 1 < len(data) and commands <= most:
        commands += 1
        repeated, kind = data[position], data[position + 1]
        position += 2
        if repeated:
            continue
        if kind == 1:  # the end of the bitmap
            break
        if kind == 2:  # right and up
            position += 2
        elif kind:  # as many pixels as they are, to a whole word of the file
            position += (kind + 1) // 2 if half else kind
            position += position % 2
    return commands
