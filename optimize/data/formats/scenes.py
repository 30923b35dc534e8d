"""``scenes``: scikit-learn's digits in several sizes and colours on textured grounds, with masks. No download."""

from __future__ import annotations

import functools
import io
from typing import TYPE_CHECKING, Final

from optimize.data.formats.base import DataFormat, register
from optimize.data.formats.digits import CLASSES, split_digits

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image

    from optimize.data.records import ImageData, Split
    from optimize.data.sources import Source
    from optimize.data.targets import ClassMaps
    from optimize.listener import Listener

#: Side of a scene in pixels.
SIDE: Final = 96

#: The number of scenes to train and to measure with.
SCENES: Final = (2000, 400)

#: From so many digits to fewer than so many are in a scene, and their sides in pixels.
_DIGITS, _SIDES = (4, 8), (24, 41)

#: Ink from this on, of 255, belongs to the digit.
_INK = 100

#: A place for a digit is tried so often, and may be covered by others to this share.
_TRIES, _COVERED = 8, 0.05

#: Each of red, green and blue of a digit is brighter than its ground by this at least.
_CONTRAST = 80


def _open(place: str, seed: int, listener: Listener) -> ImageData:
    """Make the scenes. Those to measure with have digits that no scene to train with has."""
    from optimize.data.records import ImageData

    train, val = _scenes(seed)
    return ImageData("scenes", "segmentation", ("background", *CLASSES), train, val, "shift", (SIDE, SIDE))


@functools.lru_cache(maxsize=1)
def _scenes(seed: int) -> tuple[Split, Split]:
    """Return both splits. A process that opens them again has them."""
    train, val = (
        _split(digits, count, (seed, part))
        for part, (digits, count) in enumerate(zip(split_digits(seed), SCENES, strict=True))
    )
    return train, val


def _open_labels(place: str, seed: int, listener: Listener) -> ImageData:
    """Make the scenes, with the digits that occur in them."""
    import numpy as np
    import torch

    from optimize.data.records import ImageData, Split
    from optimize.data.targets import Vectors

    train, val = (
        Split(split.sources, Vectors(torch.from_numpy(np.array([_shown(mask) for mask in _masks(split)], np.uint8))))
        for split in _scenes(seed)
    )
    return ImageData("scenelabels", "multilabel", CLASSES, train, val, "shift", (SIDE, SIDE))


def _open_numbers(place: str, seed: int, listener: Listener) -> ImageData:
    """Make the scenes, with the share that is ink, in per cent, and how much brighter it is than the ground, of 255."""
    import torch

    from optimize.data.records import ImageData, Split
    from optimize.data.targets import Vectors

    train, val = (
        Split(split.sources, Vectors(torch.tensor([*map(_numbers, split.sources, _masks(split))])))
        for split in _scenes(seed)
    )
    return ImageData("scenenumbers", "regression", ("ink", "contrast"), train, val, "none", (SIDE, SIDE))


def _numbers(scene: Source, mask: NDArray[np.integer]) -> tuple[float, float]:
    import numpy as np
    from PIL import Image

    from optimize.data.sources import read_source

    with Image.open(io.BytesIO(read_source(scene))) as image:
        greys = np.asarray(image.convert("L"))
    return 100 * float((mask > 0).mean()), float(greys[mask > 0].mean() - greys[mask == 0].mean())


def _masks(split: Split) -> Iterator[NDArray[np.integer]]:
    maps: ClassMaps = split.targets  # type: ignore[assignment]
    return (maps.values(row) for row in range(len(split)))


def _shown(mask: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Return which digits occur in a mask, ``(10,)``."""
    import numpy as np

    return np.bincount(mask.ravel(), minlength=1 + len(CLASSES))[1:] > 0


def _split(digits: Split, count: int, seed: tuple[int, int]) -> Split:
    import numpy as np
    from PIL import Image

    from optimize.data.records import Split
    from optimize.data.sources import Pixels, Records, png, read_source
    from optimize.data.targets import ClassMaps

    rng = np.random.default_rng(seed)
    glyphs = [Image.open(io.BytesIO(read_source(source))) for source in digits.sources]
    labels = digits.labels.tolist()
    masks = np.zeros((count, SIDE, SIDE), np.uint8)
    scenes = Records.of(png(_scene(rng, glyphs, labels, mask), level=0) for mask in masks)
    return Split(scenes, ClassMaps(Pixels(masks), 1 + len(CLASSES)))


def _scene(
    rng: np.random.Generator, glyphs: Sequence[Image.Image], labels: Sequence[int], mask: NDArray[np.uint8]
) -> NDArray[np.uint8]:
    """Draw a scene ``uint8 (H, W, 3)``, and write its classes into ``mask``, zeros ``(H, W)``: 0 for the ground."""
    import numpy as np
    from PIL import Image

    shades = rng.integers(0, 96, 3, np.uint8) + rng.integers(0, 64, (8, 8, 3), np.uint8)
    scene = Image.fromarray(shades).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
    numbers = rng.integers(0, len(glyphs), rng.integers(*_DIGITS))
    sides = rng.integers(*_SIDES, len(numbers))
    places = rng.integers(0, SIDE + 1 - sides[:, None, None], (len(numbers), _TRIES, 2))
    for number, side, tries in zip(numbers.tolist(), sides.tolist(), places.tolist(), strict=True):
        for top, left in tries:
            window = np.s_[top : top + side, left : left + side]
            if np.count_nonzero(mask[window]) <= _COVERED * side**2:
                ink = glyphs[number].resize((side, side), Image.Resampling.BILINEAR)
                red, green, blue = rng.integers(shades.max((0, 1)) + np.uint8(_CONTRAST), 256).tolist()
                scene.paste((red, green, blue), (left, top), ink)
                mask[window][np.asarray(ink) >= _INK] = 1 + labels[number]
                break
    return np.asarray(scene)


SCENES_FORMAT = register(
    DataFormat(
        name="scenes",
        open=_open,
        summary="2,400 scenes of several handwritten digits, with masks",
        default_of="segmentation",
    )
)

SCENE_LABELS = register(
    DataFormat(
        name="scenelabels",
        open=_open_labels,
        summary="the same scenes, with the digits that occur in each",
        default_of="multilabel",
    )
)

SCENE_NUMBERS = register(
    DataFormat(
        name="scenenumbers",
        open=_open_numbers,
        summary="the same scenes, with two numbers of each: per cent of ink, and its contrast",
        default_of="regression",
    )
)
