"""Remarks from a few images about greys of more than 8 bits. They decide nothing."""

from __future__ import annotations

import numpy as np
from PIL import Image

from optimize.data.records import Split
from optimize.data.sources import read_source
from serve.runtime.card.budget import Budget
from serve.runtime.errors import ImageError, UserError
from serve.runtime.images.headers import opened
from serve.runtime.images.image_preprocessing import is_deep, white_of

_LOOKED_AT = 16

#: Images that use less of their range than this were probably made by a sensor of fewer bits.
_USED = 0.26


def depth_notes(split: Split, pixel_max: float | None) -> tuple[str, ...]:
    """Say if ``pixel_max`` looks wrong for the images of ``split``, or applies to none of the sampled ones.

    Args:
        split: 16 images of it, at equal distances, are read.
        pixel_max: the value that is stated to be white. None for the types' own.
    """
    found = []
    rows = np.unique(np.linspace(0, len(split) - 1, min(_LOOKED_AT, len(split))).astype(np.int64)).tolist()
    for row in rows:
        source = split.sources[row]
        if isinstance(source, np.ndarray):
            continue
        try:
            with opened(read_source(source), Budget()) as image:
                if is_deep(image):
                    found.append(_range(image))
        except (ImageError, UserError, MemoryError):
            continue  # reported when it is read
    if not found:
        if pixel_max is None:
            return ()
        return (
            f"pixel_max {pixel_max:g} applies to greys of more than 8 bits, but none of the {len(rows)} images "
            "that were checked has them",
        )
    white, lightest = max(white for white, _ in found), max(lightest for _, lightest in found)
    stated = white if pixel_max is None else pixel_max
    if not 0 < lightest < _USED * stated:
        return ()
    return (
        f"greys of more than 8 bits are read with {stated:g} as white, and {len(found)} images that were checked "
        f"reach {lightest:g}: if they are too dark, set the value of white, such as --pixel-max 4095 for 12 bits",
    )


def _range(image: Image.Image) -> tuple[float, float]:
    """Return the image type's value of white, and the image's own lightest value."""
    return white_of(image) or 0.0, float(np.fmax.reduce(np.asarray(image), axis=None, initial=0))
