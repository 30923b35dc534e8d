"""Image bytes to batch tensor: decode, resize, crop, normalise. This is the project's only preprocessing.

It has two halves, so that only bytes travel to the device. `decode` and `fit` make a ``uint8`` image on the host.
`normalise` turns a batch of them into floats on the network's device.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import ExifTags, Image

from ..card.budget import Budget
from ..card.card import LETTERBOX, LETTERBOX_GREY, Preprocessing
from ..errors import ImageError
from .headers import Header, faults_named, opened, read_header
from .lean_torchvision import InterpolationMode, decode_jpeg, decode_webp
from .lean_torchvision import functional as transforms
from .placement import PlacedImage, Placement
from .structure import plain_webp
from .tiff_directories import check_exif

_NO_BUDGET = Budget()

#: Ratio of longer to shorter side from which `fit` resizes only the middle.
ELONGATED = 8

# Pixels to each side of an output pixel that it depends on, when nothing is made smaller (Pillow's `filters`).
_REACH = {"bilinear": (Image.Resampling.BILINEAR, 1), "bicubic": (Image.Resampling.BICUBIC, 2)}

# torchvision's ``ImageReadMode.RGB``. It has no grey for WebP.
_RGB = 3

#: Pillow's mode for a number of channels. Alpha is the last of two and of four.
MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}

_WITH_ALPHA = (2, 4)

# The transformations for EXIF's orientations, of ``(C, H, W)`` (CIPA DC-008, 4.6.4), as in `ImageOps.exif_transpose`.
_UPRIGHT: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {
    2: lambda image: image.flip(2),
    3: lambda image: image.flip(1, 2),
    4: lambda image: image.flip(1),
    5: lambda image: image.transpose(1, 2),
    6: lambda image: image.transpose(1, 2).flip(2),
    7: lambda image: image.transpose(1, 2).flip(1, 2),
    8: lambda image: image.transpose(1, 2).flip(1),
}

# The same for Pillow's images. Its `exif_transpose` rewrites all of the EXIF (6 s for 4 MB of it).
_TRANSPOSITIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

# White in greys of more than 8 bits, by Pillow's modes. Black is 0. Other modes do not define white.
_WHITE = {"I;16": 65535.0, "I;16L": 65535.0, "I;16B": 65535.0, "I;16N": 65535.0, "F": 1.0}
_TIFF_BITS = 258

# Pixels of 16 bits that are converted at once, through 8 bytes each.
_BAND_PIXELS = 1 << 18


def decode(
    data: bytes,
    channels: int = 3,
    budget: Budget = _NO_BUDGET,
    header: Header | None = None,
    pixel_max: float | None = None,
) -> torch.Tensor:
    """Decode one encoded image to ``uint8`` of shape ``(channels, H, W)``.

    Formats are JPEG, PNG, WebP, BMP, TIFF and the first frame of a GIF. Grey, palette, CMYK and 16-bit images are
    converted like in Pillow's ``Image.convert``, as training pipelines do. EXIF orientation is applied. ``channels`` is
    1 (grey), 2 (grey and alpha), 3 (RGB) or 4 (RGB and alpha). Without its channel, alpha is dropped. An image without
    alpha is opaque (255). ``header`` is the result of `read_header` for the same bytes and budget. None: it is read
    here. For ``pixel_max`` see `eight_bit`.

    Raises:
        ImageError: status 400 (empty, truncated, broken), 413 (beyond ``budget``) or 415 (not an image, or an
            unsupported format).
        MemoryError: this machine has too little memory. The image is not at fault.
    """
    header = header or read_header(data, budget)
    # torchvision's JPEG decoder returns the same integers as Pillow's, but faster. CMYK stays with Pillow, whose
    # treatment of Adobe's inverted inks is the reference.
    if header.format == "JPEG" and header.mode in ("RGB", "L"):
        colours = channels - 1 if channels in _WITH_ALPHA else channels
        with faults_named(budget):
            seen = decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), colours, True)
            return torch.cat([seen, torch.full_like(seen[:1], 255)]) if channels in _WITH_ALPHA else seen
    if header.format == "WEBP" and channels == 3 and (picture := _decode_webp(data, budget)) is not None:
        return picture
    # The memory layout stays. A copy by channels takes longer than the resize, and as much memory again.
    return torch.from_numpy(_decode_with_pillow(data, channels, budget, pixel_max)).permute(2, 0, 1)


def fit(image: torch.Tensor, preprocessing: Preprocessing) -> torch.Tensor:
    """Resize and centre-crop, or letterbox, a ``uint8`` ``(C, h, w)`` image to ``uint8`` ``preprocessing.shape``.

    An image that is more than `ELONGATED` times longer than wide is cropped before the resize. The result is within 2
    of 255 levels of a whole resize, which for 762x1 would make 50 megapixels.
    """
    return place(image, preprocessing).pixels


def place(image: torch.Tensor, preprocessing: Preprocessing) -> PlacedImage:
    """Do what `fit` does, and return the image with its placement."""
    height, width = image.shape[-2:]
    placement = Placement.of(height, width, preprocessing)
    return PlacedImage(_fitted(image, preprocessing, placement), placement)


def load(
    data: bytes, preprocessing: Preprocessing, budget: Budget = _NO_BUDGET, header: Header | None = None
) -> torch.Tensor:
    """`decode`, then `fit`: bytes to ``uint8`` of shape ``preprocessing.shape``."""
    return load_placed(data, preprocessing, budget, header).pixels


def load_placed(
    data: bytes, preprocessing: Preprocessing, budget: Budget = _NO_BUDGET, header: Header | None = None
) -> PlacedImage:
    """`decode`, then `place`."""
    image = decode(data, preprocessing.channels, budget, header, preprocessing.pixel_max)
    with faults_named(budget):
        return place(image, preprocessing)


def normalise(
    batch: torch.Tensor, preprocessing: Preprocessing, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Convert ``uint8`` ``(N, C, H, W)`` to the network's input of ``dtype`` on ``device``."""
    batch = batch.to(device, non_blocking=True).to(torch.float32)
    # (x / 255 - mean) / std in one multiply-add.
    std = torch.tensor(preprocessing.std, device=device).view(1, -1, 1, 1)
    mean = torch.tensor(preprocessing.mean, device=device).view(1, -1, 1, 1)
    return batch.mul_(1 / (255 * std)).sub_(mean / std).to(dtype)


def _fitted(image: torch.Tensor, preprocessing: Preprocessing, placement: Placement) -> torch.Tensor:
    height, width = placement.picture
    if placement.scaled != placement.picture:
        if isinstance(preprocessing.resize, int) and max(height, width) > ELONGATED * min(height, width):
            # Pillow weighs colours by alpha, but torch resizes each channel alone.
            parts = [channel[None] for channel in image] if len(image) in _WITH_ALPHA else [image]
            image = torch.cat([_resize_middle(part, preprocessing, placement) for part in parts])
        else:
            mode = InterpolationMode(preprocessing.interpolation)
            image = transforms.resize(image, list(placement.scaled), interpolation=mode, antialias=True)
    if preprocessing.resize == LETTERBOX:
        return _framed(image, placement)
    if tuple(image.shape[-2:]) != preprocessing.crop:
        image = transforms.center_crop(image, list(preprocessing.crop))
    return image.contiguous()


def _decode_webp(data: bytes, budget: Budget) -> torch.Tensor | None:
    """Decode a WebP without animation, with Pillow's result. None: it is animated, or only Pillow has libwebp.

    Pillow 13 decodes any WebP as an animation, on canvases with alpha, which takes 18 bytes a pixel and more. A decode
    of the picture alone takes 3 (lossy) to 9 bytes, and a half to a ninth of the time.
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
            return None  # an animation of one frame, or a file that only Pillow reads
        return _UPRIGHT[turned](picture) if turned in _UPRIGHT else picture


def _decode_with_pillow(data: bytes, channels: int, budget: Budget, pixel_max: float | None) -> NDArray[np.uint8]:
    """Decode to ``uint8`` of shape ``(H, W, channels)``. Close the image on return, to hold its memory only once."""
    with opened(data, budget) as image:
        if pixel_max is not None and _is_deep_colour(image):
            raise ImageError(
                f"its colours have 16 bits, but pixel_max ({pixel_max:g}) applies to greys: for colours, the upper "
                "8 bits are read"
            )
        mode = MODES[channels]
        grey = eight_bit(upright(image), pixel_max)
        pixels = np.array(grey if grey.mode == mode else grey.convert(mode))  # convert would copy 4 bytes a pixel
    return pixels if channels > 1 else pixels[..., None]


def _resize_middle(image: torch.Tensor, preprocessing: Preprocessing, placement: Placement) -> torch.Tensor:
    """Resize only the part of the longer side that the crop will keep."""
    height, width = image.shape[-2:]
    lies = width > height
    side = 1 if lies else 0  # the longer one
    resize, source, target = placement.scaled[1 - side], placement.picture[side], placement.scaled[side]
    kept = min(preprocessing.crop[side], target)
    first = max(0, placement.first[side])
    size = (resize, kept) if lies else (kept, resize)
    axis = -1 if lies else -2
    if preprocessing.interpolation == "nearest":
        # torch's "nearest" uses floor(i * scale), in single precision below 2**24. Pillow's uses the middle.
        single = target < 1 << 24
        index = torch.arange(first, first + kept, dtype=torch.float32 if single else torch.float64)
        index *= torch.tensor(source, dtype=index.dtype) / target
        image = image.index_select(axis, index.long().clamp_(max=source - 1))
        nearest: torch.Tensor = transforms.resize(image, list(size), interpolation=InterpolationMode.NEAREST)
        return nearest
    # Pillow resizes a box with fractional edges, and also reads neighbours outside it.
    resample, reach = _REACH[preprocessing.interpolation]
    scale = source / target
    begin, end = first * scale, (first + kept) * scale
    margin = reach * max(scale, 1.0) + 1
    low, high = max(0, math.floor(begin - margin)), min(source, math.ceil(end + margin))
    middle = image.narrow(axis, low, high - low).permute(1, 2, 0).numpy()
    cut = Image.fromarray(np.ascontiguousarray(middle if middle.shape[-1] == 3 else middle[..., 0]))
    along = (begin - low, min(end, high) - low)
    # Columns first, like torch. With a box Pillow 13 may start with rows. Bicubic overshoots and is clipped to 8 bits
    # between the two steps, so the order makes up to 22 levels of difference.
    left, right = along if lies else (0, cut.width)
    top, bottom = (0, cut.height) if lies else along
    narrowed = cut.resize((size[1], cut.height), resample, box=(left, 0, right, cut.height))
    resized = np.array(narrowed.resize((size[1], size[0]), resample, box=(0, top, size[1], bottom)))
    return torch.from_numpy(resized if resized.ndim == 3 else resized[..., None]).permute(2, 0, 1)


def _framed(image: torch.Tensor, placement: Placement) -> torch.Tensor:
    """Put a scaled image on a grey, opaque ground of the network's size."""
    framed = image.new_full((len(image), *placement.network), LETTERBOX_GREY)
    if len(image) in _WITH_ALPHA:
        framed[-1] = 255
    framed[:, *placement.inside] = image
    return framed


def upright(image: Image.Image) -> Image.Image:
    """Apply the EXIF orientation to a Pillow image. Return the same image if it is upright."""
    image.load()  # this rotates a TIFF, and updates its EXIF
    turned = _TRANSPOSITIONS.get(_orientation(image))
    return image if turned is None else image.transpose(turned)


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8, of a Pillow image. Pillow reads a whole directory for it.

    Raises:
        ImageError: status 413, the EXIF is larger than any real one.
    """
    exif = image.info.get("exif")
    if exif is None and (written := image.info.get("Raw profile type exif")) is not None:  # ImageMagick's, in PNGs
        exif = bytes.fromhex("".join(written.split("\n")[3:]))
    if exif is not None:
        check_exif(exif)
    orientation: int = image.getexif().get(ExifTags.Base.Orientation, 1)
    return orientation


def is_deep(image: Image.Image) -> bool:
    """Whether a Pillow image holds greys of more than 8 bits."""
    return image.mode.startswith("I") or image.mode == "F"


def white_of(image: Image.Image) -> float | None:
    """Return the white of a deep grey image by its type: the largest value, or 1 for floats.

    None for 32-bit and signed integers. Nobody uses all of their range, and no file says how much. The data set's own
    ``pixel_max`` takes precedence.
    """
    bits = getattr(image, "tag_v2", {}).get(_TIFF_BITS, (16,))[0]
    return _WHITE.get(image.mode) if bits >= 16 else float((1 << bits) - 1)


def eight_bit(image: Image.Image, pixel_max: float | None = None) -> Image.Image:
    """Scale 16-bit, 32-bit and float greys to 8 bits. Pillow's own ``convert`` clips them to white.

    The scale is the data set's ``pixel_max``, or the type's (`white_of`). It never depends on a single image's values.
    NaN becomes black.

    Raises:
        ImageError: there is no scale, or a value is outside black to white by half a level or more.
    """
    if not is_deep(image):
        return image
    white = white_of(image) if pixel_max is None else pixel_max
    if white is None:
        raise ImageError("its greys are 32-bit or signed integers: set the value of white with pixel_max (--pixel-max)")
    values = np.asarray(image)
    darkest, lightest = (float(one.reduce(values, axis=None, initial=0)) for one in (np.fmin, np.fmax))
    for value in (darkest, lightest):
        if not -0.5 < value * 255 / white < 255.5:
            raise ImageError(
                f"a grey value is {value:g}, not from 0 to {white:g}: set the value of white with pixel_max "
                "(--pixel-max)"
            )
    scaled = np.empty(values.shape, dtype=np.uint8)
    rows = max(1, _BAND_PIXELS // max(1, values.shape[1]))
    for start in range(0, len(values), rows):
        band = values[start : start + rows].astype(np.float64) * 255 / white
        scaled[start : start + rows] = np.rint(np.nan_to_num(band, copy=False))
    return Image.fromarray(scaled)


def _is_deep_colour(image: Image.Image) -> bool:
    """Whether an image that is not loaded yet has 16 bits a channel. Pillow (13) returns only the upper 8."""
    tiles = getattr(image, "tile", ())
    return image.format in ("PNG", "TIFF") and not is_deep(image) and any(";16" in str(tile[3]) for tile in tiles)
