"""Turns a program's data (tensors, a ``Dataset``, a ``DataLoader``) into a data set of this project.

The endpoint gets encoded images. So images are kept as pixels whose relation to a file is known:

- Pixels as a camera gives them (PIL images, ``uint8`` tensors) are kept as PNG. They go through the model's
  preprocessing like any file. A PIL image gives the pixels of its file: upright, with deep greys unchanged.
- For images that are already prepared (resized, cropped, as floats also normalised), the caller must state the
  preprocessing. It becomes the model's preprocessing, and floats are turned back into the pixels that they were made
  from.

The target of an image is a class, or a class map for segmentation.

Everything is read once, in the order of the data, when the data set is made; see `optimize.data.program_items`. This
fixes the result of random transforms, which a note says. It is better to leave them out.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch.utils.data import DataLoader

from optimize.data.augmentation_choice import Augmentation
from optimize.data.cache_folders import cache_folder
from optimize.data.pixels import native_size
from optimize.data.program_items import Data, Items, Pair, drawn_by, items_of, kind
from optimize.data.records import ImageData, Split
from optimize.data.sources import Pixels, Records, Source, png, select, tiff
from optimize.data.splits import split_off
from optimize.data.targets import MOST_CLASSES, ClassMaps, Labels, Targets
from serve.common.progress import shown
from serve.runtime.card.budget import Budget
from serve.runtime.card.card import Preprocessing
from serve.runtime.errors import ImageError, UserError
from serve.runtime.images.headers import faults_named
from serve.runtime.images.image_preprocessing import MODES, eight_bit, is_deep, upright

_IN_MEMORY = 64 << 20  # more bytes than this are mapped from a file

#: The value of pixels that do not count in class maps of up to 255 classes.
_UNCOUNTED = 255

# A float that was made from a pixel comes back within a hundredth of it. Bicubic scaling of floats overshoots more.
_OVERSHOOT = 32.0


def image_data(
    train: Data,
    val: Data | None = None,
    *,
    classes: Sequence[str] | None = None,
    preprocessing: Preprocessing | None = None,
    name: str = "data",
    augment: Augmentation = "none",
    seed: int = 0,
    scratch: Path | None = None,
    told: Callable[[float], None] | None = None,
) -> ImageData:
    """Return a data set of a program's own data.

    Args:
        train: images to train and calibrate with, each with the index of its class. An image is a PIL image or
            ``uint8`` of shape ``(C, H, W)``, ``(H, W)`` or ``(H, W, C)``, with 1 to 4 channels (see `MODES`). If
            ``preprocessing`` is stated, floats of these shapes are allowed too. A label is an index, or one-hot.
            Batches and items may be pairs, or have names such as ``image`` and ``label``.

            For segmentation the target of each image is a class map of its size: integers of shape ``(H, W)`` or
            ``(1, H, W)``, or a PIL image of greys or palette indices. Pixels do not count if their value is negative,
            or 255 if that is no class.
        val: as ``train``, to measure with. None splits a fifth of each class off ``train``.
        classes: names of the classes. None takes the data's own ``classes``, or numbers up to the highest.
        preprocessing: the preprocessing that the images already had. None for unprocessed pixels.
        name: short name, for reports.
        augment: the random changes that keep an image's label true.
        seed: the seed of the split.
        scratch: folder for data that does not fit into memory. By default the user's cache folder.
        told: called now and then with the share of the data that is read, in [0, 1], if its size is known. None shows a
            bar.

    Raises:
        UserError: an image or target is not of the kind above, a mask does not have the size of its image, floats do
            not match ``preprocessing``, or there are fewer than two classes.
    """
    given = {"train": train} if val is None else {"train": train, "val": val}
    notes: list[str] = []
    read: list[_Read] = []
    with _telling(told) as tell, drawn_by(seed):
        parts = {title: items_of(data, title) for title, data in given.items()}
        counts = [part.count for part in parts.values() if part.count]
        whole = sum(counts) if len(counts) == len(parts) else None
        for title, part in parts.items():
            before = sum(len(done.sources) for done in read)

            def far(row: int, before: int = before) -> None:
                if whole is not None:
                    tell((before + row) / whole)

            read.append(_read(part, title, preprocessing, scratch, far))
            if not read[-1].alike:
                notes.append(f"{title}: images differ when they are read again (random transforms); the first are kept")
    if len({done.targets.maps for done in read}) > 1:
        raise UserError("train and val must both have classes of images, or both class maps")
    names = _class_names(classes, train, read)
    fit, *others = (Split(done.sources, done.targets.of_classes(len(names))) for done in read)
    if others:
        judge = others[0]
    else:
        keys = [hashlib.sha256(f"{seed}/{row}".encode()).digest() for row in range(len(fit))]
        fit, judge = split_off(fit, keys)
    return ImageData(
        name,
        "segmentation" if read[0].targets.maps else "classification",
        names,
        fit,
        judge,
        augment,
        native_size(fit),
        preprocessing=preprocessing,
        notes=tuple(notes),
    )


class _Targets:
    """The targets of one split, added one by one. The first decides whether they are classes or class maps.

    Attributes:
        maps: whether they are class maps.
        highest: the highest class, and the image that has it. In maps, 255 does not count here.
    """

    def __init__(self) -> None:
        self.maps = False
        self.highest = -1, ""
        self._labels: list[int] = []
        self._masks: list[bytes] = []

    def add(self, target: Any, size: tuple[int, int], place: str) -> None:
        """Add the target of the next image, which has this height and width."""
        mask = _mask(target)
        if not self._labels and not self._masks:
            self.maps = mask is not None
        if self.maps != (mask is not None):
            before = "class maps" if self.maps else "classes"
            raise UserError(f"{place}: its target is {kind(target)}, and those of the images before it are {before}")
        if mask is None:
            self._labels.append(_label(target, place))
            highest = self._labels[-1]
        else:
            self._masks.append(_encoded_mask(mask, size, place))
            found = mask[mask != _UNCOUNTED]
            highest = int(found.max()) if found.size else -1
        if highest > self.highest[0]:
            self.highest = highest, place

    def in_order(self, rows: npt.NDArray[np.int64]) -> None:
        """Keep the targets at ``rows``, in that order."""
        self._labels = [self._labels[row] for row in rows] if self._labels else []
        self._masks = [self._masks[row] for row in rows] if self._masks else []

    def of_classes(self, count: int) -> Targets:
        """Return the targets of a split with so many classes."""
        if self.maps:
            return ClassMaps(Records.of(self._masks), count)
        return Labels(torch.tensor(self._labels, dtype=torch.int64))


@dataclass(frozen=True)
class _Read:
    """A split that was read: images, targets, and whether its first images are the same when they are read again."""

    sources: Sequence[Source]
    targets: _Targets
    alike: bool


@contextlib.contextmanager
def _telling(told: Callable[[float], None] | None) -> Iterator[Callable[[float], None]]:
    """Yield the receiver of the progress of reading: the caller's, or a bar."""
    if told is not None:
        yield told
        return
    with shown("reading") as bar:
        yield lambda share: bar.progressed(share, "images")


def _read(
    items: Items,
    title: str,
    preprocessing: Preprocessing | None,
    scratch: Path | None,
    told: Callable[[int], None],
) -> _Read:
    """Read one split.

    ``told`` is called now and then with the number of images that are read.
    """
    folder = scratch or cache_folder("pixels")
    folder.mkdir(parents=True, exist_ok=True)
    ends: list[int] = []
    targets = _Targets()
    with tempfile.TemporaryFile(dir=folder) as file:  # an unnamed file, which is gone with the last array that maps it
        for row, (record, target) in enumerate(_records(items.pairs, title, preprocessing)):
            file.write(record)
            ends.append((ends[-1] if ends else 0) + len(record))
            size = _size(record) if preprocessing is None else preprocessing.crop
            targets.add(target, size, f"{title}[{row}]")
            if row % 64 == 0:
                told(row)
        if not ends:
            raise UserError(f"{title}: has no images")
        file.flush()
        alike = _comes_again(items, title, preprocessing, file, ends)
        if ends[-1] > _IN_MEMORY:
            held: npt.NDArray[np.uint8] = np.memmap(file, np.uint8, mode="r")
        else:
            file.seek(0)
            held = np.frombuffer(file.read(), np.uint8)
    sources: Sequence[Source] = (
        Records(held, np.asarray(ends, np.int64))
        if preprocessing is None
        else Pixels(held.reshape(len(ends), *preprocessing.shape))
    )
    if items.rows is not None:  # in the order of the data set, with each of its rows once
        order = np.unique(np.asarray(items.rows), return_index=True)[1]
        sources = select(sources, order)
        targets.in_order(order)
    return _Read(sources, targets, alike)


def _records(pairs: Iterator[Pair], title: str, preprocessing: Preprocessing | None) -> Iterator[tuple[bytes, Any]]:
    """Yield each image as it is kept, with its target as the data give it."""
    for row, (image, target) in enumerate(pairs):
        place = f"{title}[{row}]"
        yield (
            _encoded(image, place) if preprocessing is None else _prepared(image, preprocessing, place).tobytes(),
            target,
        )


def _size(record: bytes) -> tuple[int, int]:
    """Return height and width of an encoded image."""
    with Image.open(io.BytesIO(record)) as image:
        return image.height, image.width


def _comes_again(
    items: Items, title: str, preprocessing: Preprocessing | None, file: IO[bytes], ends: Sequence[int]
) -> bool:
    """Return whether reading again gives the first images in ``file`` again."""
    if items.again is None:
        return True
    file.seek(0)
    again = (record for record, _ in _records(items.again(), title, preprocessing))
    return all(file.read(len(record)) == record for record, _ in zip(again, ends, strict=False))


def _mask(target: Any) -> npt.NDArray[Any] | None:
    """Return the values of a class map, ``(H, W)``. None: the target is none."""
    if isinstance(target, Image.Image):
        return np.asarray(target)
    values = _array(target)
    if values is None or values.size < 2:
        return None
    values = values[0] if values.ndim == 3 and len(values) == 1 else values
    return values if values.ndim > 1 else None


def _encoded_mask(mask: npt.NDArray[Any], size: tuple[int, int], place: str) -> bytes:
    """Encode a class map of an image of this size as PNG, with values that are never a class for negative ones."""
    if mask.ndim != 2 or mask.dtype.kind not in "biu":
        raise UserError(
            f"{place}: its class map is {kind(mask)}; it must have the shape (H, W), with whole numbers as classes"
        )
    if mask.shape != size:
        raise UserError(
            f"{place}: its class map has {mask.shape[1]}x{mask.shape[0]} pixels, the image has {size[1]}x{size[0]}"
        )
    if mask.size and mask.max() >= MOST_CLASSES:
        raise UserError(f"{place}: its class map has the value {mask.max()}; the highest class is {MOST_CLASSES - 1}")
    wide = mask.size and (mask.max() > _UNCOUNTED or mask.min() < 0)
    return png(np.where(mask < 0, MOST_CLASSES, mask).astype(np.uint16) if wide else mask.astype(np.uint8))


def _label(label: Any, place: str) -> int:
    """Return the index of a class from a number, a number in an array, or a one-hot vector."""
    value = label
    if isinstance(label, torch.Tensor | np.ndarray | np.generic | list | tuple):
        held: npt.NDArray[Any] = label.detach().cpu().numpy() if isinstance(label, torch.Tensor) else np.asarray(label)
        if held.size == 1:
            value = held.item()
        elif (
            held.ndim == 1 and held.dtype.kind in "biuf" and np.array_equal(np.sort(held), [0] * (held.size - 1) + [1])
        ):
            value = int(held.argmax())
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UserError(
            f"{place}: its label is {kind(label)}; it must be the index of its class, 0 or more, or one-hot"
        )
    return value


def _encoded(image: Any, place: str) -> bytes:
    """Encode a picture as PNG."""
    if isinstance(image, Image.Image):
        with _named(place):
            seen = upright(image)
            if is_deep(seen):
                return tiff(seen)
            return png(np.asarray(seen if seen.mode in MODES.values() else seen.convert("RGB")))
    pixels = _array(image)
    if pixels is None or pixels.dtype != np.uint8:
        floats = pixels is not None and pixels.dtype.kind == "f"
        raise UserError(
            f"{place}: its image is {kind(image)}; "
            + (
                "float images are already preprocessed: describe how with preprocessing=…, or give uint8 pixels"
                if floats
                else "it must be a PIL image or uint8 pixels of shape (C, H, W)"
            )
        )
    if pixels.ndim == 3 and not _channels_last(pixels, isinstance(image, torch.Tensor)):
        pixels = pixels.transpose(1, 2, 0)
    if pixels.ndim == 3 and pixels.shape[-1] == 1:
        pixels = pixels[..., 0]
    if pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[-1] not in MODES) or 0 in pixels.shape:
        raise UserError(f"{place}: its image is {kind(image)}; it must have the shape (C, H, W), with 1 to 4 channels")
    return png(np.ascontiguousarray(pixels))


def _prepared(image: Any, done: Preprocessing, place: str) -> npt.NDArray[np.uint8]:
    """Return a prepared image as pixels ``uint8 (C, H, W)``."""
    if isinstance(image, Image.Image):
        with _named(place):  # not turned upright: the network gets it as it is
            image = np.asarray(eight_bit(image, done.pixel_max).convert(MODES[done.channels]))
        image = np.atleast_3d(image).transpose(2, 0, 1)
    pixels = _array(image)
    if pixels is not None and pixels.shape == (*done.crop, done.channels) != done.shape:
        pixels = pixels.transpose(2, 0, 1)
    if pixels is None or pixels.shape != done.shape or not (pixels.dtype == np.uint8 or pixels.dtype.kind == "f"):
        raise UserError(
            f"{place}: its image is {kind(image)}; with your preprocessing, images have the shape {done.shape}, "
            "uint8 or float"
        )
    if pixels.dtype == np.uint8:
        return np.ascontiguousarray(pixels)
    std = np.asarray(done.std, np.float64)[:, None, None]
    mean = np.asarray(done.mean, np.float64)[:, None, None]
    values = (pixels.astype(np.float64) * std + mean) * 255
    worst = values.flat[int(np.nan_to_num(np.abs(values - 127.5), nan=np.inf).argmax())]
    if not -_OVERSHOOT <= worst <= 255 + _OVERSHOOT:
        raise UserError(
            f"{place}: is not normalized with mean {done.mean} and std {done.std}: it would come from a pixel of "
            f"{worst:.0f}, which must lie in 0 to 255"
        )
    return np.clip(np.rint(values), 0, 255).astype(np.uint8)


@contextlib.contextmanager
def _named(place: str) -> Iterator[None]:
    """Report Pillow's errors about an image as a mistake at its place."""
    try:
        with faults_named(Budget()):
            yield
    except ImageError as error:
        raise UserError(f"{place}: {error}") from None


def _channels_last(pixels: npt.NDArray[Any], tensor: bool) -> bool:
    """Return whether the last axis is the channels. If the first could be too, it is the last for arrays."""
    first, last = (pixels.shape[axis] in MODES for axis in (0, -1))
    return last and not (tensor and first)


def _array(image: Any) -> npt.NDArray[Any] | None:
    if isinstance(image, torch.Tensor):
        held = image.detach().cpu()
        pixels: npt.NDArray[Any] = (held.float() if held.is_floating_point() else held).numpy()
        return pixels
    return image if isinstance(image, np.ndarray) else None


def _class_names(given: Sequence[str] | None, train: Data, read: Sequence[_Read]) -> tuple[str, ...]:
    highest, place = max(done.targets.highest for done in read)
    names: Any = given
    if given is None:
        names = getattr(train.dataset if isinstance(train, DataLoader) else train, "classes", None)
        usable = (
            isinstance(names, list | tuple) and len(names) > highest and all(isinstance(name, str) for name in names)
        )
        names = names if usable else [str(number) for number in range(highest + 1)]
    if isinstance(names, str) or len(names) <= highest:
        what = f"{place} has class {highest}" if read[0].targets.maps else f"a label is {highest}"
        raise UserError(f"classes: has {len(names)} names, and {what}; give a name for each class")
    if len(names) < 2:
        raise UserError(
            f"classes: there is only one class ({', '.join(names)}); a network needs at least two to choose from"
        )
    return tuple(names)
