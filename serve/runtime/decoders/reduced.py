"""``reduced``: libjpeg's scaling for JPEGs of at least four times the size that is needed, on the CPU.

A 12-megapixel photograph is decoded at a half, a quarter or an eighth, from fewer DCT coefficients, and then resized
from at least twice the size that is needed. The pixels are not those of a whole decoding, and on a small input that is
enough to change answers. So it is for who asks for it.
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
from .base import TINY_JPEG, Decoder, DecoderType, check_tiny, register

# How many times larger than needed what is decoded stays at least: Pillow's `reducing_gap` of 2.0. Nearer to 1 the
# pixels differ more.
_GAP = 2


class ReducedDecoder:
    """See `Decoder`."""

    name, batch = "reduced", 1

    def accepts(self, header: Header, preprocessing: Preprocessing) -> bool:
        """See `Decoder`."""
        shorter, longer = sorted((header.width, header.height))
        # The middle of what is very long is cut from the whole image.
        return (
            header.format == "JPEG"
            and header.mode in ("RGB", "L")
            and preprocessing.channels in (1, 3)
            and shorter >= 2 * _GAP * max(preprocessing.shortest)
            and longer <= ELONGATED * shorter
        )

    def load(
        self, items: Sequence[bytes], headers: Sequence[Header], preprocessing: Preprocessing
    ) -> list[torch.Tensor | None]:
        """See `Decoder`."""
        return [_load(item, preprocessing) for item in items]


def _load(item: bytes, preprocessing: Preprocessing) -> torch.Tensor | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(item), formats=("JPEG",)) as image:
                whole = image.size
                # Pillow takes the largest of 1, 2, 4 and 8 that leaves no side smaller than this.
                needed = _GAP * max(preprocessing.shortest)
                image.draft(None, (needed, needed))
                scaled = image.size
                ImageOps.exif_transpose(image, in_place=True)
                whole = whole if image.size == scaled else whole[::-1]
                mode = "RGB" if preprocessing.channels == 3 else "L"
                pixels = np.array(image if image.mode == mode else image.convert(mode))
        width, height = whole
        decoded = torch.from_numpy(pixels if pixels.ndim == 3 else pixels[..., None]).permute(2, 0, 1)
        # For the size of the whole image: that of the scaled one is rounded, and a pixel more or less would move the
        # crop.
        size = list(preprocessing.scaled(height, width))
        how = InterpolationMode(preprocessing.interpolation)
        return fit(transforms.resize(decoded, size, interpolation=how, antialias=True), preprocessing)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - the runtime's own decoder says what is wrong with it
        return None


def _open(device: torch.device) -> Decoder:
    check_tiny(_load(TINY_JPEG, Preprocessing(resize=8, crop=(8, 8))))
    return ReducedDecoder()


REDUCED = register(DecoderType("reduced", open=_open, device="cpu"))
