"""Files whose pixels are not those that Pillow's ``convert("RGB")`` gives of them, by what is special."""

from __future__ import annotations

import numpy as np
from PIL import ExifTags, Image

from benchmarks.hostile.pictures import encoded, picture

_DEEP = np.random.default_rng(2).integers(0, 65536, (12, 10))
_TURNED = Image.Exif()
_TURNED[ExifTags.Base.Orientation] = 6

PICTURE_FILES = {
    "turned": encoded(picture(1, (30, 20)), "PNG", exif=_TURNED),
    "a turned photograph": encoded(picture(1, (30, 20)), "JPEG", exif=_TURNED, quality=95),
    "16 bits": encoded(Image.fromarray(_DEEP.astype(np.uint16)), "PNG"),
    "16 bits of a Macintosh": encoded(Image.fromarray(_DEEP.astype(">u2")), "TIFF"),
    "32 bits": encoded(Image.fromarray(_DEEP.astype(np.int32)), "TIFF"),
    "32 bits that are turned": encoded(Image.fromarray(_DEEP.astype(np.int32)), "TIFF", exif=_TURNED),
    "floats": encoded(Image.fromarray((_DEEP / 65535).astype(np.float32)), "TIFF"),
}
