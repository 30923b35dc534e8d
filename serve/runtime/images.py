"""Bytes to batch tensor: decode, resize, crop, normalise. The only preprocessing there is.

Two halves, so that only bytes travel to the device: `decode` and `fit` make a ``uint8`` image on the
host; `normalise` turns a batch of them into floats wherever the network runs.
"""

from __future__ import annotations

import io
import re
import warnings

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as transforms

from .card import Preprocessing
from .errors import ImageError

#: Largest image that is decoded, in pixels. A 20 kB PNG can claim a gigapixel.
PIXEL_LIMIT = 50_000_000

_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF")


def decode(data: bytes, channels: int = 3, pixel_limit: int = PIXEL_LIMIT) -> torch.Tensor:
    """Decode one encoded image to ``uint8`` of shape ``(channels, H, W)``.

    JPEG, PNG, WebP, BMP, TIFF and the first frame of a GIF; grey, palette, CMYK and 16-bit images are
    converted, alpha is dropped (as ``Image.convert("RGB")`` does, which is what training pipelines
    see), and EXIF orientation is honoured. ``channels`` is 3 (RGB) or 1 (grey).

    Raises:
        ImageError: with status 400 (empty, truncated, broken), 413 (more than ``pixel_limit`` pixels)
            or 415 (not an image, or a format that is not supported).
    """
    if not data:
        raise ImageError("the image is empty (0 bytes)")
    try:
        with warnings.catch_warnings():
            # Pillow warns of large images long before our own limit, and of broken EXIF.
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(data), formats=_FORMATS)
            width, height = image.size
            if width * height > pixel_limit:
                raise ImageError(f"the image has {width}x{height} pixels, more than the limit of {pixel_limit}", 413)
            # torchvision's JPEG decoder gives the same integers as Pillow's and is faster; CMYK stays
            # with Pillow, whose handling of Adobe's inverted inks is the reference.
            if image.format == "JPEG" and image.mode in ("RGB", "L"):
                mode = ImageReadMode.RGB if channels == 3 else ImageReadMode.GRAY
                buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                decoded: torch.Tensor = decode_jpeg(buffer, mode=mode, apply_exif_orientation=True)
                return decoded
            upright = _eight_bit(ImageOps.exif_transpose(image))
            pixels = np.array(upright.convert("RGB" if channels == 3 else "L"))
    except ImageError:
        raise
    except UnidentifiedImageError:
        raise ImageError(f"not an image in a supported format ({', '.join(_FORMATS)})", 415) from None
    except Image.DecompressionBombError:
        raise ImageError(f"the image has more than the limit of {pixel_limit} pixels", 413) from None
    except Exception as error:  # noqa: BLE001 - decoders raise OSError, SyntaxError, struct.error, RuntimeError …
        raise ImageError(f"the image is truncated or broken ({_first_line(error)})") from None
    return torch.from_numpy(pixels if channels == 3 else pixels[..., None]).permute(2, 0, 1).contiguous()


def fit(image: torch.Tensor, preprocessing: Preprocessing, pixel_limit: int = PIXEL_LIMIT) -> torch.Tensor:
    """Resize and centre-crop a ``uint8`` ``(C, h, w)`` image to ``uint8`` ``preprocessing.shape``.

    Raises:
        ImageError: the image is so elongated that the resized one would pass ``pixel_limit``.
    """
    height, width = image.shape[-2:]
    resize = preprocessing.resize
    if resize * resize * max(height, width) // min(height, width) > pixel_limit:
        raise ImageError(f"the image is too elongated ({width}x{height}) to be resized to {resize} pixels", 413)
    if min(height, width) != resize:
        mode = InterpolationMode(preprocessing.interpolation)
        image = transforms.resize(image, [resize], interpolation=mode, antialias=True)
    if tuple(image.shape[-2:]) != preprocessing.crop:
        image = transforms.center_crop(image, list(preprocessing.crop))
    return image.contiguous()


def load(data: bytes, preprocessing: Preprocessing, pixel_limit: int = PIXEL_LIMIT) -> torch.Tensor:
    """`decode` then `fit`: bytes to ``uint8`` of shape ``preprocessing.shape``."""
    return fit(decode(data, preprocessing.channels, pixel_limit), preprocessing, pixel_limit)


def normalise(
    batch: torch.Tensor, preprocessing: Preprocessing, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Turn ``uint8`` ``(N, C, H, W)`` into the network's input of ``dtype`` on ``device``."""
    batch = batch.to(device, non_blocking=True).to(torch.float32)
    # (x / 255 - mean) / std in one multiply-add.
    std = torch.tensor(preprocessing.std, device=device).view(1, -1, 1, 1)
    mean = torch.tensor(preprocessing.mean, device=device).view(1, -1, 1, 1)
    return batch.mul_(1 / (255 * std)).sub_(mean / std).to(dtype)


def _eight_bit(image: Image.Image) -> Image.Image:
    """Scale 16-bit, 32-bit and float greys to 8 bits; Pillow's own ``convert`` clips them to white."""
    if image.mode.startswith("I") or image.mode == "F":
        values = np.asarray(image, dtype=np.float64)
        if image.mode == "F":
            values = values * 255 if values.max(initial=0) <= 1 else values
        else:
            values = values / 257 if values.max(initial=0) > 255 or image.mode != "I" else values
        return Image.fromarray(np.clip(np.rint(values), 0, 255).astype(np.uint8))
    return image


def _first_line(error: Exception) -> str:
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    # torchvision's C++ errors begin with the function and the source line that raised them.
    return re.sub(r"^\w+, \S+:\d+, ", "", line)[:120]
