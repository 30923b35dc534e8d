"""Bytes to tensors: every format, mode and orientation, and no exception but `ImageError`."""

from __future__ import annotations

import gzip
import io
import struct
import time
import tracemalloc
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import ExifTags, Image, ImageOps
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as transforms

from benchmarks.codings import codings
from benchmarks.hostile.bombs import png_of
from benchmarks.hostile.pictures import encoded, picture
from serve.runtime.card.budget import Budget
from serve.runtime.card.card import Interpolation, Preprocessing
from serve.runtime.errors import ImageError
from serve.runtime.images import image_preprocessing
from serve.runtime.images.headers import read_header
from serve.runtime.images.image_preprocessing import decode, fit, load, normalise
from tests.serve.artifacts import PREPROCESSING, jpeg


def pixels(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "WEBP"])
def test_lossless_formats_give_the_picture_back(kind: str) -> None:
    image = picture(1)
    options = {"lossless": True} if kind == "WEBP" else {}
    assert torch.equal(decode(encoded(image, kind, **options)), pixels(image))


def test_jpeg_gives_the_integers_of_pillow() -> None:
    data = jpeg(2, (333, 250))
    assert torch.equal(decode(data), pixels(Image.open(io.BytesIO(data)).convert("RGB")))


@pytest.mark.parametrize("options", [{}, {"lossless": True}, {"lossless": True, "exact": True}, {"quality": 20}])
@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_a_webp_gives_the_integers_of_pillow_and_does_not_need_it(
    options: dict[str, object], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(3):
        image = picture(seed, (61, 44)).convert(mode)
        if mode == "RGBA":
            image.putalpha(picture(9, image.size).convert("L").point(lambda value: value if value > 90 else 0))
        for orientation in range(9):
            exif = Image.Exif()
            exif[ExifTags.Base.Orientation] = orientation
            turned = {"exif": exif} if orientation else {}
            data = encoded(image, "WEBP", method=0, **options, **turned)
            expected = pixels(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
            for name in ("_decode_with_pillow", "decode_webp"):  # the second: as where torchvision has no libwebp
                with monkeypatch.context() as patch:
                    patch.setattr(image_preprocessing, name, None)
                    assert torch.equal(decode(data), expected)


def test_each_coding_whose_cost_is_measured_is_decoded() -> None:
    found = {words: decode(make()) for words, make in codings(40)}
    assert len(found) == 20
    assert {image.shape for image in found.values()} == {(3, 40, 40)}
    for words in ("PNG", "WebP, lossless", "TIFF", "TIFF, LZW", "BMP"):
        assert torch.equal(found[words], found["PNG, alpha"])


def test_a_webp_that_moves_gives_its_first_frame_and_counts_twice() -> None:
    frames = [picture(seed) for seed in (1, 2)]
    data = encoded(frames[0], "WEBP", lossless=True, save_all=True, append_images=frames[1:])
    assert torch.equal(decode(data), pixels(frames[0]))
    size = 60 * 45
    assert read_header(data, Budget()).pixels == 2 * size
    with pytest.raises(
        ImageError, match="60x45 pixels, counted twice because it is animated, more than the limit"
    ) as caught:
        decode(data, budget=Budget(image_pixels=2 * size - 1))
    assert caught.value.status == 413
    still = encoded(frames[0], "WEBP", lossless=True)
    assert torch.equal(decode(still, budget=Budget(image_pixels=size)), pixels(frames[0]))


@given(st.integers(0, 5), st.data())
@settings(max_examples=60, deadline=None)
def test_a_damaged_webp_is_refused_where_pillow_refuses_it_and_else_gives_the_same(
    seed: int, data: st.DataObject
) -> None:
    options = {"lossless": True} if seed % 2 else {"quality": 50}
    whole = bytearray(encoded(picture(seed), "WEBP", **options))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(12, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        found = decode(bytes(whole))
    except ImageError:
        with pytest.raises(Exception):  # noqa: B017, PT011 - Pillow has many
            Image.open(io.BytesIO(whole), formats=("WEBP",)).convert("RGB")
    else:
        assert torch.equal(found, pixels(Image.open(io.BytesIO(whole)).convert("RGB")))


def test_a_gif_gives_its_first_frame() -> None:
    frames = [picture(seed).quantize(64) for seed in (1, 2)]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert torch.equal(decode(data), pixels(frames[0].convert("RGB")))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF"])
def test_grey_is_spread_over_three_channels_or_kept_as_one(kind: str) -> None:
    grey = picture(1).convert("L")
    data = encoded(grey, kind)
    colour = decode(data)
    assert colour.shape == (3, 45, 60)
    assert torch.equal(colour[0], colour[1])
    assert torch.equal(colour[0], colour[2])
    one = decode(data, channels=1)
    assert one.shape == (1, 45, 60)
    assert torch.equal(one[0], colour[0])


def test_palette_and_alpha_and_bilevel_are_converted() -> None:
    palette = picture(1).quantize(32)
    assert torch.equal(decode(encoded(palette, "PNG")), pixels(palette.convert("RGB")))
    alpha = picture(1).convert("RGBA")
    alpha.putalpha(100)
    assert torch.equal(decode(encoded(alpha, "PNG")), pixels(picture(1)))
    assert decode(encoded(Image.new("LA", (5, 4), (10, 0)), "PNG")).unique().tolist() == [10]
    assert decode(encoded(Image.new("1", (5, 4), 1), "PNG")).unique().tolist() == [255]


def test_cmyk_is_converted_to_the_colours_that_were_meant() -> None:
    red = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    for kind in ("JPEG", "TIFF"):
        mean = decode(encoded(red, kind)).float().mean(dim=(1, 2))
        assert mean[0] > 200
        assert mean[1:].max() < 60


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bit_greys_keep_their_range(kind: str) -> None:
    ramp = np.linspace(0, 65535, 64, dtype=np.uint16).reshape(8, 8)
    got = decode(encoded(Image.fromarray(ramp), kind))[0].numpy()
    assert np.abs(got.astype(int) - np.rint(ramp / 257.0).astype(int)).max() <= 1
    if kind == "TIFF":
        other = encoded(Image.frombytes("I;16B", (8, 8), ramp.astype(">u2").tobytes()), kind)
        assert other.startswith(b"MM"), "its numbers are big-endian"
        assert np.array_equal(decode(other)[0].numpy(), got)
    dark = np.full((8, 8), 200, dtype=np.uint16)  # nearly black in 16 bits
    assert decode(encoded(Image.fromarray(dark), kind)).max() <= 1


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.float32])
def test_deep_greys_are_converted_alike_in_bands_and_cost_little_memory(
    dtype: type[np.uint16 | np.int32 | np.float32],
) -> None:
    width, height = 2000, 1500  # several bands
    values = np.random.default_rng(1).integers(0, 65536, (height, width)).astype(dtype)
    expected = np.rint(values.astype(np.float64) / 257)
    data = encoded(Image.fromarray(values), "TIFF")
    assert np.array_equal(decode(data, 1, pixel_max=65535)[0].numpy(), expected.astype(np.uint8))
    tracemalloc.start()  # numpy's arrays; by way of float64 all at once they had 24 bytes a pixel
    decode(data, 1, pixel_max=65535)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < len(data) + 12 * width * height


def test_a_float_grey_without_a_number_is_black_there() -> None:
    values = np.array([[0.0, 1.0, np.nan, 0.5]], dtype=np.float32)
    assert decode(encoded(Image.fromarray(values), "TIFF"), 1).flatten().tolist() == [0, 255, 0, 128]


DEEP = {"PNG": ["uint16"], "TIFF": ["uint16", "int32", "float32"]}


@pytest.mark.parametrize(("kind", "dtype"), [(kind, dtype) for kind, types in DEEP.items() for dtype in types])
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_a_deep_grey_is_scaled_by_the_white_that_is_stated_whatever_else_an_image_holds(
    kind: str, dtype: str, data: st.DataObject
) -> None:
    white = data.draw(st.sampled_from([255, 1023, 4095, 65535]))
    numbers = np.array(data.draw(st.lists(st.integers(0, white), min_size=4, max_size=4)), dtype).reshape(2, 2)
    for values in (numbers, np.minimum(numbers, 1)):  # the scale is not of the largest value
        got = decode(encoded(Image.fromarray(values), kind), 1, pixel_max=white)[0].numpy()
        assert np.abs(got - values.astype(np.float64) * 255 / white).max() <= 0.5


@pytest.mark.parametrize(
    ("values", "dtype", "kind", "white", "message"),
    [
        ([[0.5, 1.01]], "float32", "TIFF", None, "is 1.01, not from 0 to 1: set the value of white with pixel_max"),
        ([[0.5, -0.01]], "float32", "TIFF", None, "is -0.01, not from 0 to 1"),
        ([[0.5, np.inf]], "float32", "TIFF", 4095, "is inf, not from 0 to 4095"),
        ([[5, 70000]], "int32", "TIFF", 65535, "is 70000, not from 0 to 65535"),
        ([[5, 200]], "int32", "TIFF", None, "32-bit or signed integers: set the value of white with pixel_max"),
        ([[5, 4200]], "uint16", "PNG", 4095, "is 4200, not from 0 to 4095"),
        ([[5, 4200]], "uint16", "TIFF", 4095, "is 4200, not from 0 to 4095"),
    ],
)
def test_a_deep_grey_outside_of_its_range_or_without_one_is_refused_in_one_line(
    values: list[list[float]], dtype: str, kind: str, white: float | None, message: str
) -> None:
    data = encoded(Image.fromarray(np.array(values, dtype)), kind)
    with pytest.raises(ImageError, match=message) as caught:
        decode(data, 1, pixel_max=white)
    assert caught.value.status == 400
    assert "\n" not in str(caught.value)


def test_a_stated_white_leaves_8_bits_alone_and_refuses_colours_of_16_bits() -> None:
    data = encoded(picture(1), "PNG")
    assert torch.equal(decode(data, pixel_max=4095), decode(data))
    rows = b"".join(b"\0" + struct.pack(">6H", 1, 2, 3, 4, 5, 6) for _ in range(2))
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", 2, 2, 16, 2, 0, 0, 0)), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    deep = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    )
    assert decode(deep).shape == (3, 2, 2)
    with pytest.raises(ImageError, match=r"colours have 16 bits, but pixel_max \(4095\) applies to greys"):
        decode(deep, pixel_max=4095)


def test_a_tiff_of_12_bits_is_scaled_by_12() -> None:
    packed = bytes([0xFF, 0xF8, 0x00])  # 4095 and 2048
    entries = [(256, 2), (257, 1), (258, 12), (259, 1), (262, 1), (273, 0), (277, 1), (278, 1), (279, 3)]
    place = 8 + 2 + 12 * len(entries) + 4
    body = b"".join(struct.pack("<HHII", tag, 4, 1, place if tag == 273 else value) for tag, value in entries)
    data = b"II*\0" + struct.pack("<IH", 8, len(entries)) + body + struct.pack("<I", 0) + packed
    assert decode(data, 1).flatten().tolist() == [255, 128]


# What a viewer does to show an image upright, by its orientation tag (EXIF 2.32, table 6), in tensor terms.
UPRIGHT = {
    1: lambda image: image,
    2: lambda image: image.flip(2),
    3: lambda image: image.flip(1, 2),
    4: lambda image: image.flip(1),
    5: lambda image: image.transpose(1, 2),
    6: lambda image: image.transpose(1, 2).flip(2),
    7: lambda image: image.transpose(1, 2).flip(1, 2),
    8: lambda image: image.transpose(1, 2).flip(1),
}


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_all_eight_orientations_are_honoured(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = picture(3)
    tagged = decode(encoded(image, kind, exif=exif))
    plain = decode(encoded(image, kind))
    assert torch.equal(tagged, UPRIGHT[orientation](plain))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF"])
def test_a_truncated_image_is_an_error_of_its_own(kind: str) -> None:
    data = encoded(picture(1, (300, 200)), kind)
    with pytest.raises(ImageError) as caught:
        decode(data[: len(data) // 2])
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("data", "status"), [(b"", 400), (b"\0" * 100, 415), (b"%PDF-1.7 ...", 415), (b"<svg/>", 415), (b"\xff\xd8", 415)]
)
def test_what_is_not_an_image_is_refused(data: bytes, status: int) -> None:
    with pytest.raises(ImageError) as caught:
        decode(data)
    assert caught.value.status == status


@pytest.mark.parametrize(
    ("data", "remedy"),
    [
        (gzip.compress(encoded(picture(1), "JPEG")), "send the image itself"),
        (b"data:image/png;base64,iVBORw0KGgo=", "send its bytes, or the URL as"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "save it as JPEG"),
        (b"%PDF-1.7 ...", "save a page as PNG"),
        (b'<?xml version="1.0"?><svg/>', "save it as PNG"),
        (b"\n <!DOCTYPE html>", "save it as PNG"),
    ],
)
def test_what_people_send_instead_of_an_image_is_told_the_remedy(data: bytes, remedy: str) -> None:
    with pytest.raises(ImageError, match="not an image in a supported format") as caught:
        decode(data)
    assert caught.value.status == 415
    assert remedy in str(caught.value)


@pytest.mark.parametrize("size", [(10_000, 10_000), (100_000, 1_000), (2**31 - 1, 2**31 - 1)])
def test_a_pixel_bomb_is_refused_before_it_is_decoded(size: tuple[int, int]) -> None:
    with pytest.raises(ImageError) as caught:
        decode(png_of(*size))
    assert caught.value.status == 413


def test_the_pixel_limit_is_the_callers() -> None:
    data = encoded(picture(1, (20, 10)), "PNG")
    assert decode(data, budget=Budget(image_pixels=200)).shape == (3, 10, 20)
    with pytest.raises(ImageError, match="20x10 pixels, more than the limit of 199"):
        decode(data, budget=Budget(image_pixels=199))


def resized_whole(image: torch.Tensor, preprocessing: Preprocessing) -> torch.Tensor:
    """What torchvision makes of it, without any short cut."""
    mode = InterpolationMode(preprocessing.interpolation)
    image = transforms.resize(image, [preprocessing.resize], interpolation=mode, antialias=True)
    return transforms.center_crop(image, list(preprocessing.crop))


def noise(height: int, width: int, channels: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(height * width)
    return torch.randint(0, 256, (channels, height, width), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "nearest"])
@pytest.mark.parametrize("size", [(375, 500), (500, 375), (64, 64), (40, 320), (700, 100), (224, 256), (20, 15)])
def test_an_ordinary_photograph_is_fitted_to_the_bit_as_torchvision_does(
    size: tuple[int, int], interpolation: Interpolation
) -> None:
    preprocessing = Preprocessing(resize=256, crop=(224, 224), interpolation=interpolation)
    image = noise(*size)
    assert torch.equal(fit(image, preprocessing), resized_whole(image, preprocessing))


@given(
    st.tuples(st.integers(1, 400), st.integers(1, 400)),
    st.sampled_from([1, 3]),
    st.sampled_from(["bilinear", "bicubic", "nearest"]),
    st.integers(2, 300),  # of one pixel torch's kernel cannot tell how it lies, and gives up (2.14)
)
@settings(max_examples=150)
def test_an_image_is_fitted_alike_however_its_pixels_lie(
    size: tuple[int, int], channels: int, interpolation: Interpolation, resize: int
) -> None:
    # A JPEG lies channel by channel, everything else pixel by pixel.
    mean = (0.5,) * channels
    preprocessing = Preprocessing(resize, (resize, resize), mean, mean, interpolation)
    planes = noise(*size, channels)
    fitted = fit(planes.permute(1, 2, 0).contiguous().permute(2, 0, 1), preprocessing)
    assert fitted.is_contiguous()
    assert torch.equal(fitted, fit(planes, preprocessing))


@given(
    shape=st.builds(
        lambda short, times, lies: ((short, int(short * times) + 1), (int(short * times) + 1, short))[lies],
        st.integers(1, 90),
        st.floats(8.05, 40),
        st.integers(0, 1),
    ),
    resize=st.integers(1, 80),
    crop=st.tuples(st.integers(1, 90), st.integers(1, 90)),
    channels=st.sampled_from((1, 3)),
    interpolation=st.sampled_from(("bilinear", "bicubic", "nearest")),
)
@settings(max_examples=300)
def test_an_elongated_image_is_fitted_as_if_it_were_resized_whole(
    shape: tuple[int, int], resize: int, crop: tuple[int, int], *, channels: int, interpolation: Interpolation
) -> None:
    mean = (0.5,) * channels
    preprocessing = Preprocessing(resize, crop, mean, mean, interpolation)
    image = noise(*shape, channels)
    got, expected = fit(image, preprocessing), resized_whole(image, preprocessing)
    assert got.shape == expected.shape
    # Pillow and torch round their weights differently; nearest picks, and rounds nothing.
    assert (got.int() - expected.int()).abs().max() <= (0 if interpolation == "nearest" else 2)


@pytest.mark.parametrize("size", [(762, 1), (1, 762), (40_000, 1), (1, 49_000_000), (6_000_000, 8)])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "nearest"])
def test_an_elongated_image_costs_no_more_than_its_middle(size: tuple[int, int], interpolation: Interpolation) -> None:
    image = torch.arange(256, dtype=torch.uint8).repeat(3 * size[0] * size[1] // 256 + 1)[: 3 * size[0] * size[1]]
    image = image.reshape(3, *size)
    preprocessing = Preprocessing(resize=256, crop=(224, 224), interpolation=interpolation)
    taken = []
    for _ in range(3):
        started = time.process_time()  # of all threads here: other processes use these cores too
        assert fit(image, preprocessing).shape == (3, 224, 224)
        taken.append(time.process_time() - started)
    assert min(taken) < 0.1, "whole, 762x1 makes 50 megapixels and takes 0.3 s"


@pytest.mark.parametrize("size", [(32, 32), (36, 36), (500, 40), (40, 500), (1, 1), (7, 3)])
def test_every_size_is_fitted_to_the_networks_input(size: tuple[int, int]) -> None:
    assert load(encoded(picture(1, size), "PNG"), PREPROCESSING).shape == (3, 32, 32)


def test_the_crop_is_the_middle_of_the_resized_image() -> None:
    image = torch.zeros((3, 36, 72), dtype=torch.uint8)
    image[:, 2:34, 20:52] = 200
    assert fit(image, PREPROCESSING).unique().tolist() == [200]


def test_normalise_is_the_textbook_formula() -> None:
    batch = torch.randint(0, 256, (2, 3, 4, 5), dtype=torch.uint8)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (PREPROCESSING.mean, PREPROCESSING.std))
    got = normalise(batch, PREPROCESSING, torch.device("cpu"), torch.float32)
    assert torch.allclose(got, (batch / 255 - mean) / std, atol=1e-5)


def only_an_image_error(data: bytes) -> None:
    refused: ImageError | None = None
    try:
        image = load(data, PREPROCESSING, Budget(image_pixels=1_000_000))
    except ImageError as error:
        refused = error
    if refused is None:
        assert image.shape == (3, 32, 32)
        assert image.dtype == torch.uint8
    else:
        assert refused.status in (400, 413, 415)
        assert "\n" not in str(refused)


@given(st.binary(max_size=300))
@settings(max_examples=100)
def test_any_bytes_give_a_tensor_or_an_image_error(data: bytes) -> None:
    only_an_image_error(data)


SEEDS = [encoded(picture(1, (40, 30)), kind) for kind in ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF")]
SEEDS += [encoded(picture(1, (40, 30)).convert("CMYK"), "JPEG"), encoded(picture(1).convert("I;16"), "TIFF")]


@given(st.sampled_from(SEEDS), st.lists(st.tuples(st.floats(0, 0.999), st.integers(0, 255)), max_size=8), st.data())
@settings(max_examples=300)
def test_any_damage_to_an_image_gives_a_tensor_or_an_image_error(
    seed: bytes, changes: list[tuple[float, int]], data: st.DataObject
) -> None:
    damaged = bytearray(seed)
    for place, value in changes:
        # Headers are where it hurts: half of the changes fall into the first 64 bytes.
        reach = data.draw(st.sampled_from((min(64, len(seed)), len(seed))))
        damaged[int(place * reach)] = value
    only_an_image_error(bytes(damaged[: data.draw(st.integers(len(seed) // 2, len(seed)))]))


def test_an_image_that_is_turned_costs_no_more_for_what_its_exif_has_beside() -> None:
    image = picture(1)
    numbers = 250_000
    tags = ((0x0112, 3, 1, 6), (0x9999, 5, numbers, 38))  # turned right; numbers of 8 bytes each
    exif = b"II*\0\x08\0\0\0" + struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", *tag) for tag in tags)
    data = encoded(image, "PNG")
    chunk = b"eXIf" + exif + bytes(4) + b"\1\0\0\0" * 2 * numbers
    head = data.index(b"IDAT") - 4
    data = data[:head] + struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) + data[head:]
    started = time.thread_time()
    found = decode(data)
    assert time.thread_time() - started < 0.3
    assert np.array_equal(found.permute(1, 2, 0).numpy(), np.asarray(image.transpose(Image.Transpose.ROTATE_270)))
