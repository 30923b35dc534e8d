"""Counts the commands of a run-length encoded BMP, before Pillow executes them one by one in Python.

Pillow 13 (``BmpRleDecoder``) takes 0.2 µs for a command, however many pixels it sets. A file with 40 MB of commands
without pixels would block a thread, and Python's lock, for 16 s. A file needs no more commands than it has pixels and
rows.
"""

from __future__ import annotations

from PIL import Image

from ..errors import ImageError

# Pillow's name for the decoder of these files.
_DECODER = "bmp_rle"
# Most commands of any image: 0.3 s in Pillow, including the reads through `TimedFile`.
_MOST_COMMANDS = 1 << 18
# Ineffective commands that a careless encoder may write.
_SPARE = 1024


def check_commands(data: bytes, image: Image.Image) -> None:
    """Check that a run-length encoded BMP has no more commands than its pixels and rows need.

    Each useful command sets at least a pixel, ends a row, or moves on by a pixel (Microsoft, "Bitmap Compression").
    Counting stops at the limit, so a larger file takes no longer.

    Args:
        data: the file.
        image: the file opened by Pillow, with undecoded pixels.

    Raises:
        ImageError: status 413, there are more commands.
    """
    _, _, offset, arguments = image.tile[0]  # type: ignore[attr-defined]
    width, height = image.size
    most = min(width * height + height + _SPARE, _MOST_COMMANDS)
    half = bool(arguments[1])  # two pixels in a byte
    if _count(data, offset, half, most) > most:
        raise ImageError(
            f"the BMP of {width}x{height} pixels has more than {most} run-length commands: send it as PNG", 413
        )


def is_run_length_encoded(image: Image.Image) -> bool:
    """Whether Pillow has opened such a file and decoded nothing of it."""
    return any(tile.codec_name == _DECODER for tile in getattr(image, "tile", ()))


def _count(data: bytes, position: int, half: bool, most: int) -> int:
    """Count the commands up to the end of the bitmap or the file. Stop beyond ``most``."""
    commands = 0
    while position + 1 < len(data) and commands <= most:
        commands += 1
        repeated, kind = data[position], data[position + 1]
        position += 2
        if repeated:
            continue
        if kind == 1:  # end of bitmap
            break
        if kind == 2:  # delta: right and up
            position += 2
        elif kind:  # literal pixels, padded to a word of the file
            position += (kind + 1) // 2 if half else kind
            position += position % 2
    return commands
