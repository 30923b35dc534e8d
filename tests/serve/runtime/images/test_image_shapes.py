"""Images scaled to a height and a width, and images of one to four channels: every decoder gives the same pixels."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as v2

from serve.asgi.protocols.oip import _bitmap
from serve.runtime.card.budget import Budget
from serve.runtime.card.card import Preprocessing
from serve.runtime.decoders.reduced import ReducedDecoder
from serve.runtime.errors import CardError
from serve.runtime.images.headers import read_header
from serve.runtime.images.image_preprocessing import decode, fit, load, normalise
from serve.runtime.images.placement import Placement

MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}


def drawn(mode: str, height: int = 30, width: int = 50) -> Image.Image:
    """A smooth picture with noise, of Pillow's mode."""
    generator = np.random.default_rng(5)
    y, x, band = np.mgrid[0:height, 0:width, 0 : len(Image.new(mode, (1, 1)).getbands())]
    smooth = 128 + 90 * np.sin(x / 9 + band) * np.cos(y / 7 - band)
    pixels = np.clip(smooth + generator.normal(0, 4, smooth.shape), 0, 255).astype(np.uint8)
    return Image.frombytes(mode, (width, height), pixels.tobytes())


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


@pytest.mark.parametrize("channels", MODES)
@pytest.mark.parametrize(
    ("mode", "kind"),
    [("RGBA", "PNG"), ("RGB", "PNG"), ("L", "PNG"), ("LA", "PNG"), ("P", "GIF"), ("RGB", "JPEG"), ("L", "JPEG"),
     ("CMYK", "JPEG"), ("RGBA", "WEBP"), ("RGB", "WEBP"), ("RGBA", "TIFF"), ("RGB", "BMP")],
)  # fmt: skip
def test_an_image_of_any_kind_has_the_channels_that_the_network_reads(channels, mode, kind):
    picture = drawn("RGB").convert("P") if mode == "P" else drawn(mode)
    data = encoded(picture, kind)
    with Image.open(io.BytesIO(data)) as image:
        expected = np.asarray(image.convert(MODES[channels]))
    found = decode(data, channels).permute(1, 2, 0).numpy()
    assert found.shape == (30, 50, channels)
    grey_of_jpeg = channels < 3 and kind == "JPEG"  # libjpeg's own Y
    assert np.abs(found.astype(int) - expected.reshape(found.shape)).max() <= (3 if grey_of_jpeg else 0)


def test_without_alpha_an_image_is_opaque_and_with_it_the_alpha_comes_through():
    assert (decode(encoded(drawn("RGB"), "JPEG"), 4)[3] == 255).all()
    assert (decode(encoded(drawn("L"), "PNG"), 2)[1] == 255).all()
    picture = drawn("RGBA")
    alpha = torch.from_numpy(np.array(picture))[..., 3]
    assert torch.equal(decode(encoded(picture, "PNG"), 4)[3], alpha)
    assert torch.equal(decode(encoded(picture, "PNG"), 2)[1], alpha)


@pytest.mark.parametrize("channels", MODES)
def test_each_channel_is_resized_and_normalised_by_itself(channels):
    mean, std = tuple(0.1 * (band + 1) for band in range(channels)), tuple(0.2 + 0.1 * band for band in range(channels))
    wanted = Preprocessing(resize=12, crop=(10, 11), mean=mean, std=std)
    data = encoded(drawn(MODES[channels]), "PNG")
    batch = normalise(load(data, wanted)[None], wanted, torch.device("cpu"), torch.float32)
    assert batch.shape == (1, channels, 10, 11) == (1, *wanted.shape)
    whole = decode(data, channels)
    for band in range(channels):
        alone = Preprocessing(resize=12, crop=(10, 11), mean=mean[band : band + 1], std=std[band : band + 1])
        expected = normalise(fit(whole[band][None], alone)[None], alone, torch.device("cpu"), torch.float32)
        assert torch.allclose(batch[:, band], expected[:, 0], atol=1e-6)


@pytest.mark.parametrize("channels", MODES)
def test_very_long_images_are_cut_first_whatever_their_channels(channels):
    image = decode(encoded(drawn(MODES[channels], 12, 300), "PNG"), channels)
    wanted = Preprocessing(resize=20, crop=(20, 20), mean=(0.5,) * channels, std=(0.5,) * channels)
    expected = v2.center_crop(v2.resize(image, [20], antialias=True), [20, 20])
    assert (fit(image, wanted).int() - expected.int()).abs().max() <= 2


@pytest.mark.parametrize("size", [(30, 50), (50, 30), (4, 200), (1, 1)])
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic"])
def test_a_height_and_a_width_are_what_every_image_is_scaled_to(size, interpolation):
    data = encoded(drawn("RGB", *size), "PNG")
    wanted = Preprocessing(resize=(24, 18), crop=(24, 18), interpolation=interpolation)
    expected = v2.resize(decode(data), [24, 18], interpolation=v2.InterpolationMode(interpolation), antialias=True)
    assert torch.equal(load(data, wanted), expected)
    cropped = Preprocessing(resize=(24, 18), crop=(20, 18), interpolation=interpolation)
    assert torch.equal(load(data, cropped), expected[:, 2:22])


@pytest.mark.parametrize("size", [(30, 50), (50, 30), (31, 50), (4, 200), (1, 1), (24, 18), (300, 1)])
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic"])
def test_a_letterbox_keeps_the_whole_image_in_its_proportions_on_grey(size, interpolation):
    data = encoded(drawn("RGB", *size), "PNG")
    found = load(data, Preprocessing("letterbox", (24, 18), interpolation=interpolation))
    gain = min(24 / size[0], 18 / size[1])
    height, width = (max(1, round(side * gain)) for side in size)
    top, left = (24 - height) // 2, (18 - width) // 2
    expected = torch.full((3, 24, 18), 114, dtype=torch.uint8)
    expected[:, top : top + height, left : left + width] = v2.resize(
        decode(data), [height, width], interpolation=v2.InterpolationMode(interpolation), antialias=True
    )
    assert torch.equal(found, expected)


def test_the_grey_of_a_letterbox_is_opaque():
    wanted = Preprocessing("letterbox", (9, 9), mean=(0.5,) * 4, std=(0.5,) * 4)
    found = load(encoded(Image.new("RGBA", (9, 3), (1, 2, 3, 4)), "PNG"), wanted)
    assert found[:, 0, 0].tolist() == [114, 114, 114, 255]
    assert found[:, 4, 4].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("size", "accepted"),
    [((640, 400), True), ((400, 640), True), ((640, 90), True), ((640, 70), False), ((159, 90), False)],
)
def test_reduced_decoding_fits_a_letterbox(size, accepted):
    data, decoder = encoded(drawn("RGB", *size), "JPEG", quality=95), ReducedDecoder()
    wanted, header = Preprocessing("letterbox", (40, 40)), read_header(data, Budget())
    assert decoder.accepts(header, wanted) == accepted
    if accepted:
        (found,) = decoder.load([data], [header], wanted)
        assert found is not None
        assert (found.pixels.int() - load(data, wanted).int()).abs().float().mean() < 4
        assert found.placement == Placement.of(size[0], size[1], wanted)


def test_reduced_decoding_scales_to_a_height_and_a_width_too():
    data, decoder = encoded(drawn("RGB", 400, 640), "JPEG", quality=95), ReducedDecoder()
    wanted, header = Preprocessing(resize=(40, 24), crop=(40, 24)), read_header(data, Budget())
    assert decoder.accepts(header, wanted)
    (found,) = decoder.load([data], [header], wanted)
    assert found is not None
    assert found.pixels.shape == (3, 40, 24)
    assert found.placement == Placement.of(400, 640, wanted)
    assert (found.pixels.int() - load(data, wanted).int()).abs().float().mean() < 4
    assert not decoder.accepts(header, Preprocessing(resize=(40, 240), crop=(40, 24)))
    assert not decoder.accepts(header, Preprocessing(resize=40, crop=(40, 24), mean=(0.5,) * 4, std=(0.5,) * 4))


@pytest.mark.parametrize("channels", MODES)
def test_pixels_that_are_sent_as_a_tensor_come_back_as_they_are(channels):
    pixels = np.array(drawn(MODES[channels])).reshape(30, 50, channels)
    assert np.array_equal(decode(_bitmap(pixels), channels).permute(1, 2, 0).numpy(), pixels)


@pytest.mark.parametrize("resize", [(1, 2, 3), (), (0, 8), (8, "x"), [8], True, (8, 1 << 20), "stretch"])
def test_other_sizes_are_refused_in_one_line(resize):
    with pytest.raises(CardError, match="preprocessing: resize") as caught:
        Preprocessing(resize=resize, crop=(1, 1))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("channels", [0, 5])
def test_other_numbers_of_channels_are_refused(channels):
    with pytest.raises(CardError, match=r"one number per channel \(1 to 4\)"):
        Preprocessing(8, (8, 8), mean=(0.5,) * channels, std=(0.5,) * channels)
