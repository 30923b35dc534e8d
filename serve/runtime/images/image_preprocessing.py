"""Bytes to batch tensor: decode, resize, crop, normalise. The only preprocessing there is.

Two halves, so that only bytes travel to the device: `decode` and `fit` make a ``uint8`` image on the
host; `normalise` turns a batch of them into floats wherever the network runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import ExifTags, Image

from ..card.budget import Budget
from ..card.card import Preprocessing
from ..errors import ImageError
from .headers import Header, faults_named, opened, read_header
from .lean_torchvision import InterpolationMode, decode_jpeg, decode_webp
from .lean_torchvision import functional as transforms
from .structure import plain_webp
from .tiff_directories import check_exif

_NO_BUDGET = Budget()

#: Longer side over shorter one from which `fit` resizes the middle only.
ELONGATED = 8

# Pixels to each side that an output pixel is made of when it is not made smaller (Pillow's `filters`).
_REACH = {"bilinear": (Image.Resampling.BILINEAR, 1), "bicubic": (Image.Resampling.BICUBIC, 2)}

# torchvision's ``ImageReadMode.RGB``; it has no grey for WebP.
_RGB = 3

#: Pillow's mode of so many channels; alpha is the last of two and of four.
MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}

_WITH_ALPHA = (2, 4)

# What EXIF's orientations ask for, of ``(C, H, W)`` (CIPA DC-008, 4.6.4): as `ImageOps.exif_transpose`.
_UPRIGHT: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {
    2: lambda image: image.flip(2),
    3: lambda image: image.flip(1, 2),
    4: lambda image: image.flip(1),
    5: lambda image: image.transpose(1, 2),
    6: lambda image: image.transpose(1, 2).flip(2),
    7: lambda image: image.transpose(1, 2).flip(1, 2),
    8: lambda image: image.transpose(1, 2).flip(1),
}

# The same, of an image of Pillow's, whose `exif_transpose` writes all of the EXIF anew (6 s for 4 MB of it).
_TURNED = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

# Black is 0 and white this in greys of more than 8 bits, by Pillow's modes; of others no file says what is white.
_WHITE = {"I;16": 65535.0, "I;16L": 65535.0, "I;16B": 65535.0, "I;16N": 65535.0, "F": 1.0}
_TIFF_BITS = 258

# Pixels of 16 bits that are converted at once, by way of 8 bytes each.
_BAND_PIXELS = 1 << 18


def decode(
    data: bytes,
    channels: int = 3,
    budget: Budget = _NO_BUDGET,
    header: Header | None = None,
    pixel_max: float | None = None,
) -> torch.Tensor:
    """Decode one encoded image to ``uint8`` of shape ``(channels, H, W)``.

    JPEG, PNG, WebP, BMP, TIFF and the first frame of a GIF; grey, palette, CMYK and 16-bit images are
    converted as Pillow's ``Image.convert`` does, which is what training pipelines see, and EXIF
    orientation is honoured. ``channels`` is 1 (grey), 2 (grey and alpha), 3 (RGB) or 4 (RGB and alpha): without
    its channel, alpha is dropped, and an image that has none is opaque (255). ``header`` is what `read_header` gave for
    the same bytes and budget, if that was asked before; ``pixel_max`` is as in `eight_bit`.

    Raises:
        ImageError: with status 400 (empty, truncated, broken), 413 (beyond ``budget``) or 415 (not an
            image, or a format that is not supported).
        MemoryError: this machine has too little memory; nothing is wrong with the image.
    """
    header = header or read_header(data, budget)
    # torchvision's JPEG decoder gives the same integers as Pillow's and is faster; CMYK stays with Pillow,
    # whose handling of Adobe's inverted inks is the reference.
    if header.format == "JPEG" and header.mode in ("RGB", "L"):
        colours = channels - 1 if channels in _WITH_ALPHA else channels
        with faults_named(budget):
            seen = decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), colours, True)
            return torch.cat([seen, torch.full_like(seen[:1], 255)]) if channels in _WITH_ALPHA else seen
    if header.format == "WEBP" and channels == 3 and (picture := _decode_webp(data, budget)) is not None:
        return picture
    # Left as its pixels lie: a copy by channels takes longer than resizing them, and as much memory again.
    return torch.from_numpy(_decode_with_pillow(data, channels, budget, pixel_max)).permute(2, 0, 1)


def fit(image: torch.Tensor, preprocessing: Preprocessing) -> torch.Tensor:
    """Resize and centre-crop a ``uint8`` ``(C, h, w)`` image to ``uint8`` ``preprocessing.shape``.

    An image that is more than `ELONGATED` times longer than wide is cropped before it is resized; the
    result is within 2 of 255 levels of resizing it whole, which for 762x1 would make 50 megapixels.
    """
    height, width = image.shape[-2:]
    if (height, width) != (scaled := preprocessing.scaled(height, width)):
        if isinstance(preprocessing.resize, int) and max(height, width) > ELONGATED * min(height, width):
            # Of an image with alpha Pillow resizes what is seen, and torch each channel by itself.
            parts = [channel[None] for channel in image] if len(image) in _WITH_ALPHA else [image]
            image = torch.cat([_resize_middle(part, preprocessing, preprocessing.resize) for part in parts])
        else:
            mode = InterpolationMode(preprocessing.interpolation)
            image = transforms.resize(image, list(scaled), interpolation=mode, antialias=True)
    if tuple(image.shape[-2:]) != preprocessing.crop:
        image = transforms.center_crop(image, list(preprocessing.crop))
    return image.contiguous()


def load(
    data: bytes, preprocessing: Preprocessing, budget: Budget = _NO_BUDGET, header: Header | None = None
) -> torch.Tensor:
    """`decode` then `fit`: bytes to ``uint8`` of shape ``preprocessing.shape``."""
    image = decode(data, preprocessing.channels, budget, header, preprocessing.pixel_max)
    with faults_named(budget):
        return fit(image, preprocessing)


def normalise(
    batch: torch.Tensor, preprocessing: Preprocessing, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Turn ``uint8`` ``(N, C, H, W)`` into the network's input of ``dtype`` on ``device``."""
    batch = batch.to(device, non_blocking=True).to(torch.float32)
    # (x / 255 - mean) / std in one multiply-add.
    std = torch.tensor(preprocessing.std, device=device).view(1, -1, 1, 1)
    mean = torch.tensor(preprocessing.mean, device=device).view(1, -1, 1, 1)
    return batch.mul_(1 / (255 * std)).sub_(mean / std).to(dtype)


def _decode_webp(data: bytes, budget: Budget) -> torch.Tensor | None:
    """A WebP that does not move, as Pillow decodes it; None: it does, or libwebp is not there but by Pillow.

    Pillow 13 has libwebp decode any WebP as a film, on canvases with alpha: 18 bytes a pixel and more. Asked for the
    picture alone it takes 3 (lossy) to 9, and a half to a ninth of the time.
    """
    plain, turned = plain_webp(data) is not None, 1
    if decode_webp is None:
        return None
    if not plain:
        with opened(data, budget) as image:
            if getattr(image, "is_animated", False):
                return None
            turned = _orientation(image)
    with faults_named(budget):
        try:
            picture = decode_webp(torch.frombuffer(bytearray(data), dtype=torch.uint8), _RGB)
        except RuntimeError:
            if plain:
                raise
            return None  # a film of one picture, or what only Pillow reads
        return _UPRIGHT[turned](picture) if turned in _UPRIGHT else picture


def _decode_with_pillow(data: bytes, channels: int, budget: Budget, pixel_max: float | None) -> NDArray[np.uint8]:
    """``uint8`` of shape ``(H, W, channels)``. The image is closed on return, so that its memory is not held twice."""
    with opened(data, budget) as image:
        if pixel_max is not None and _is_deep_colour(image):
            raise ImageError(
                f"its colours have 16 bits, and pixel_max ({pixel_max:g}) is for greys: of colours the upper 8 are read"
            )
        mode = MODES[channels]
        grey = eight_bit(upright(image), pixel_max)
        pixels = np.array(grey if grey.mode == mode else grey.convert(mode))  # a copy of 4 bytes a pixel, else
    return pixels if channels > 1 else pixels[..., None]


def _resize_middle(image: torch.Tensor, preprocessing: Preprocessing, resize: int) -> torch.Tensor:
    """What `center_crop` will keep of the longer side of the resized image, and no more.

    The rules of where it lies are torchvision's: the longer side becomes ``int(resize * long / short)``,
    and the crop begins at ``round((side - crop) / 2)``.
    """
    height, width = image.shape[-2:]
    lies = width > height
    crop = preprocessing.crop[1 if lies else 0]
    source = max(height, width)
    target = int(resize * source / min(height, width))
    kept = min(crop, target)
    first = round((target - kept) / 2)
    size = (resize, kept) if lies else (kept, resize)
    axis = -1 if lies else -2
    if preprocessing.interpolation == "nearest":
        # torch's "nearest" takes floor(i * scale), in single precision as far as that counts; Pillow's the middle.
        single = target < 1 << 24
        index = torch.arange(first, first + kept, dtype=torch.float32 if single else torch.float64)
        index *= torch.tensor(source, dtype=index.dtype) / target
        image = image.index_select(axis, index.long().clamp_(max=source - 1))
        nearest: torch.Tensor = transforms.resize(image, list(size), interpolation=InterpolationMode.NEAREST)
        return nearest
    # Pillow resizes a box with fractional edges, and reads the neighbours that lie outside of it.
    resample, reach = _REACH[preprocessing.interpolation]
    scale = source / target
    begin, end = first * scale, (first + kept) * scale
    margin = reach * max(scale, 1.0) + 1
    low, high = max(0, math.floor(begin - margin)), min(source, math.ceil(end + margin))
    middle = image.narrow(axis, low, high - low).permute(1, 2, 0).numpy()
    cut = Image.fromarray(np.ascontiguousarray(middle if middle.shape[-1] == 3 else middle[..., 0]))
    along = (begin - low, min(end, high) - low)
    # Columns first, as torch does; with a box Pillow 13 may take rows first, and where bicubic overshoots and is
    # cut off to 8 bits between the two, the order makes up to 22 levels of difference.
    left, right = along if lies else (0, cut.width)
    top, bottom = (0, cut.height) if lies else along
    narrowed = cut.resize((size[1], cut.height), resample, box=(left, 0, right, cut.height))
    resized = np.array(narrowed.resize((size[1], size[0]), resample, box=(0, top, size[1], bottom)))
    return torch.from_numpy(resized if resized.ndim == 3 else resized[..., None]).permute(2, 0, 1)


def upright(image: Image.Image) -> Image.Image:
    """An image of Pillow's as its EXIF says that it is seen; itself where that is how it lies."""
    image.load()  # which turns a TIFF, and says so in its EXIF
    turned = _TURNED.get(_orientation(image))
    return image if turned is None else image.transpose(turned)


def _orientation(image: Image.Image) -> int:
    """EXIF's orientation, 1 to 8, of an image of Pillow's, which reads all of a directory for it.

    Raises:
        ImageError: with status 413, its EXIF holds more than anybody writes.
    """
    exif = image.info.get("exif")
    if exif is None and (written := image.info.get("Raw profile type exif")) is not None:  # ImageMagick's, of PNG
        exif = bytes.fromhex("".join(written.split("\n")[3:]))
    if exif is not None:
        check_exif(exif)
    orientation: int = image.getexif().get(ExifTags.Base.Orientation, 1)
    return orientation


def is_deep(image: Image.Image) -> bool:
    """Whether an image of Pillow's holds greys of more than 8 bits."""
    return image.mode.startswith("I") or image.mode == "F"


def white_of(image: Image.Image) -> float | None:
    """What is white in a deep grey whose data set states nothing: its type's largest value, 1 of floats.

    None of 32-bit and of signed integers: nobody uses all of their range, and no file says how much.
    """
    bits = getattr(image, "tag_v2", {}).get(_TIFF_BITS, (16,))[0]
    return _WHITE.get(image.mode) if bits >= 16 else float((1 << bits) - 1)


def eight_bit(image: Image.Image, pixel_max: float | None = None) -> Image.Image:
    """Scale 16-bit, 32-bit and float greys to 8 bits; Pillow's own ``convert`` clips them to white.

    The scale is that of the data set, ``pixel_max``, or of the image's type (`white_of`), and never goes by what one
    image holds. What is no number becomes black.

    Raises:
        ImageError: there is no scale, or a value is darker than black or lighter than white by half a level or more.
    """
    if not is_deep(image):
        return image
    white = white_of(image) if pixel_max is None else pixel_max
    if white is None:
        raise ImageError("its greys are 32-bit or signed integers, whose white is not stated: pixel_max (--pixel-max)")
    values = np.asarray(image)
    darkest, lightest = (float(one.reduce(values, axis=None, initial=0)) for one in (np.fmin, np.fmax))
    for value in (darkest, lightest):
        if not -0.5 < value * 255 / white < 255.5:
            raise ImageError(f"a grey of it is {value:g}, and not from 0 to {white:g}: pixel_max (--pixel-max)")
    scaled = np.empty(values.shape, dtype=np.uint8)
    rows = max(1, _BAND_PIXELS // max(1, values.shape[1]))
    for start in range(0, len(values), rows):
        band = values[start : start + rows].astype(np.float64) * 255 / white
        scaled[start : start + rows] = np.rint(np.nan_to_num(band, copy=False))
    return Image.fromarray(scaled)


def _is_deep_colour(image: Image.Image) -> bool:
    """Whether an image that is not loaded yet has 16 bits a channel, of which Pillow (13) gives the upper 8."""
    tiles = getattr(image, "tile", ())
    return image.format in ("PNG", "TIFF") and not is_deep(image) and any(";16" in str(tile[3]) for tile in tiles)
