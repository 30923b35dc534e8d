"""What an image makes a decoder do beside its pixels is bounded, and what honest encoders write is decoded as ever."""

from __future__ import annotations

import contextlib
import io
import struct
import time
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import ExifTags, Image

from benchmarks.hostile import bombs
from benchmarks.hostile.pictures import encoded, picture
from serve.runtime.card.budget import SERVING, Budget
from serve.runtime.errors import ImageError
from serve.runtime.images.headers import read_header
from serve.runtime.images.image_preprocessing import decode

NOTHING = {"moves by nothing": b"\0\2\0\0", "ends of rows": b"\0\0", "runs beyond the row": b"\1\0"}


def least_seconds(data: bytes, message: str) -> float:
    """Processor time of refusing an image with 413: the least of some, for other processes use these cores too."""
    taken = []
    for _ in range(5):
        begun = time.thread_time()
        with pytest.raises(ImageError, match=message) as caught:
            decode(data, budget=SERVING)
        taken.append(time.thread_time() - begun)
        assert caught.value.status == 413
    return min(taken)


@pytest.mark.parametrize("commands", NOTHING.values(), ids=NOTHING)
def test_forty_megabytes_of_commands_that_make_no_pixel_are_refused_in_milliseconds(commands: bytes) -> None:
    data = bombs.bmp_of(commands * (40_000_000 // len(commands)))
    assert least_seconds(data, "more than 1296 run-length commands") < 0.1


def runs(row: np.ndarray, *, half: bool) -> Iterator[bytes]:
    """A row in runs of equal pixels; or (``half``), two pixels a byte, as they are."""
    values = row.tolist()
    if half:
        packed = bytes(left << 4 | right for left, right in zip(values[::2], values[1::2], strict=True))
        yield bytes([0, len(values)]) + packed + bytes(len(packed) % 2)
    else:
        start = 0
        for place in range(1, len(values) + 1):
            if place == len(values) or values[place] != values[start]:
                yield bytes([place - start, values[start]])
                start = place
    yield b"\0\0"


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("size", [(16, 16), (40, 3), (6, 200)])
def test_a_run_length_encoded_bmp_has_the_pixels_that_were_encoded(size: tuple[int, int], half: bool) -> None:
    width, height = size
    pixels = np.random.default_rng(width).integers(0, 16, (height, width), dtype=np.uint8)
    commands = b"".join(b"".join(runs(row, half=half)) for row in pixels[::-1]) + b"\0\1"  # the last row comes first
    data = bytearray(bombs.bmp_of(commands, width, height, half=half))
    grey = b"".join(bytes((16 * level, 16 * level, 16 * level, 0)) for level in range(16))
    data[54 : 54 + len(grey)] = grey
    found = decode(bytes(data), channels=1, budget=SERVING)
    assert np.array_equal(found[0].numpy(), 16 * pixels)


class CountedFile(io.BytesIO):
    """How often a command was read of it, which Pillow does a byte at a time."""

    bytes_read = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self.bytes_read += size == 1
        return super().read(size)


COMMANDS = st.sampled_from([*NOTHING.values(), b"\2\7", b"\0\3abc\0", b"\0\4abcd", b"\0\2\1\0", b"\0\2\0\1", b"\0\1"])


@given(
    st.lists(st.tuples(COMMANDS, st.sampled_from([1, 1, 40, 5000])), max_size=12),
    st.integers(1, 40),
    st.integers(1, 40),
    st.booleans(),
)
def test_pillow_carries_out_no_more_commands_than_there_are_pixels_and_rows(
    commands: list[tuple[bytes, int]], width: int, height: int, half: bool
) -> None:
    data = bombs.bmp_of(b"".join(command * times for command, times in commands), width, height, half=half)
    try:
        read_header(data, SERVING)
    except ImageError as error:
        assert error.status == 413  # noqa: PT017 - either is right
        return
    file = CountedFile(data)
    with Image.open(file) as image:
        before = file.bytes_read
        with contextlib.suppress(OSError, ValueError):  # there are too few pixels
            image.load()
        assert (file.bytes_read - before) / 2 <= width * height + height + 1024 + 1


def test_decoding_one_image_ends_when_its_processor_time_is_over() -> None:
    data = encoded(Image.effect_noise((3000, 3000), 50), "PNG", compress_level=1)
    assert decode(data, budget=SERVING).shape == (3, 3000, 3000)
    with pytest.raises(ImageError, match=r"takes more than 0\.001 s of processor time") as caught:
        decode(data, budget=Budget(image_seconds=0.001))
    assert caught.value.status == 413


def tiled(pixels: np.ndarray, side: int) -> bytes:
    """A deflated TIFF of greys, in square tiles."""
    height, width = pixels.shape
    across, down = -(-width // side), -(-height // side)
    whole = np.zeros((down * side, across * side), dtype=np.uint8)
    whole[:height, :width] = pixels
    tiles = [
        zlib.compress(whole[row : row + side, column : column + side].tobytes())
        for row in range(0, down * side, side)
        for column in range(0, across * side, side)
    ]
    size = ((256, 4, 1, width), (257, 4, 1, height), (258, 3, 1, 8), (259, 3, 1, 8), (262, 3, 1, 1), (277, 3, 1, 1))
    begins, count = 8 + 2 + 12 * (len(size) + 4) + 4, len(tiles)
    lists = ((322, 4, 1, side), (323, 4, 1, side), (324, 4, count, begins), (325, 4, count, begins + 4 * count))
    places = np.cumsum([begins + 8 * count, *map(len, tiles[:-1])])
    numbers = struct.pack(f"<{2 * count}I", *places, *map(len, tiles))
    return bombs.tiff(*size, *lists) + numbers + b"".join(tiles)


def test_an_honest_tiff_in_tiles_is_decoded_and_its_pixels_are_those_of_whole_tiles() -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (70, 90), dtype=np.uint8)
    data = tiled(pixels, 32)
    assert read_header(data, SERVING).pixels == 96 * 96
    assert np.array_equal(decode(data, channels=1, budget=SERVING)[0].numpy(), pixels)


def test_a_tiff_in_tiles_is_refused_by_what_all_of_them_have_together() -> None:
    with pytest.raises(ImageError, match="640x1 pixels, stored in larger tiles, more than the limit") as caught:
        read_header(bombs.tiff_of_tiles(40, 16, shared=False), SERVING)
    assert caught.value.status == 413


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_exif_as_cameras_write_it_is_read(kind: str) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    exif[ExifTags.Base.XResolution] = 72.0
    exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.ExposureTime] = 0.01
    exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.MakerNote] = bytes(20_000)
    exif.get_ifd(ExifTags.IFD.GPSInfo)[ExifTags.GPS.GPSLatitude] = (52.0, 31.0, 12.0)
    image = picture(3, (40, 30))
    assert decode(encoded(image, kind, exif=exif), budget=SERVING).shape == (3, 40, 30)  # turned


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_exif_of_half_a_million_numbers_is_refused_in_milliseconds_whoever_reads_it(kind: str) -> None:
    exif = bombs.exif_of_rationals(500_000)
    data = encoded(picture(3), kind, exif=b"Exif\0\0" + exif)
    assert least_seconds(data, "the EXIF has 500000 numbers in its tags, more than 16384") < 0.1
