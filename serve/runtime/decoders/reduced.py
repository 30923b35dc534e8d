"""``reduced``: libjpeg's scaling on the CPU, for JPEGs of at least four times the needed size.

A 12-megapixel photograph is decoded at a half, a quarter or an eighth, from fewer DCT coefficients. It is then resized
from at least twice the needed size. The pixels differ from those of a full decode, which on a small input is enough to
change answers. So this decoder is never the default.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image, ImageOps

from ..card.card import Preprocessing
from ..images.headers import Header
from ..images.image_preprocessing import ELONGATED, fit
from ..images.lean_torchvision import InterpolationMode
from ..images.lean_torchvision import functional as transforms
from ..images.placement import PlacedImage, Placement
from .base import TINY_JPEG, Decoder, DecoderType, check_tiny, register

# Decoded images are at least this many times larger than needed, as with Pillow's `reducing_gap` of 2.0. Closer to 1
# the pixels differ more.
_GAP = 2

# The scales of libjpeg, as divisors.
_SCALES = (8, 4, 2, 1)


class ReducedDecoder:
    """See `Decoder`."""

    name, batch = "reduced", 1

    def accepts(self, header: Header, preprocessing: Preprocessing) -> bool:
        """See `Decoder`."""
        shorter, longer = sorted((header.width, header.height))
        # The middle of a very long image is cut from the whole image.
        return (
            header.format == "JPEG"
            and header.mode in ("RGB", "L")
            and preprocessing.channels in (1, 3)
            and _times_needed(header.width, header.height, preprocessing) >= 2 * _GAP
            and longer <= ELONGATED * shorter
        )

    def load(
        self, items: Sequence[bytes], headers: Sequence[Header], preprocessing: Preprocessing
    ) -> list[PlacedImage | None]:
        """See `Decoder`."""
        return [_load(item, preprocessing) for item in items]


def _times_needed(width: int, height: int, preprocessing: Preprocessing) -> float:
    """Return how many times larger than needed both sides of an image are, upright or on its side."""
    sizes = (height, width), (width, height)
    return min(side / scaled for size in sizes for side, scaled in zip(size, preprocessing.scaled(*size), strict=True))


def _load(item: bytes, preprocessing: Preprocessing) -> PlacedImage | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(item), formats=("JPEG",)) as image:
                whole = image.size
                times = _times_needed(*whole, preprocessing) / _GAP
                scale = next((scale for scale in _SCALES if scale <= times), 1)
                image.draft(None, (whole[0] // scale, whole[1] // scale))
                scaled = image.size
                ImageOps.exif_transpose(image, in_place=True)
                whole = whole if image.size == scaled else whole[::-1]
                mode = "RGB" if preprocessing.channels == 3 else "L"
                pixels = np.array(image if image.mode == mode else image.convert(mode))
        width, height = whole
        decoded = torch.from_numpy(pixels if pixels.ndim == 3 else pixels[..., None]).permute(2, 0, 1)
        # Computed from the full size. The scaled size is rounded, and a pixel more or less would move the crop.
        placement = Placement.of(height, width, preprocessing)
        how = InterpolationMode(preprocessing.interpolation)
        resized = transforms.resize(decoded, list(placement.scaled), interpolation=how, antialias=True)
        return PlacedImage(fit(resized, preprocessing), placement)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - the runtime's own decoder reports the fault
        return None


def _open(device: torch.device) -> Decoder:
    tiny = _load(TINY_JPEG, Preprocessing(resize=8, crop=(8, 8)))
    check_tiny(None if tiny is None else tiny.pixels)
    return ReducedDecoder()


REDUCED = register(DecoderType("reduced", open=_open, device="cpu"))
