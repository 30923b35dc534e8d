"""What a network should answer for the images of a split: labels, vectors, or maps of classes.

A target is a tensor of one shape and dtype for all images of a split. So it is read with its image and kept beside it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from optimize.data.fingerprint import Fingerprint, both, fingerprint
from optimize.data.sources import Source, file_bytes, select
from serve.runtime.card.budget import Budget
from serve.runtime.card.card import Preprocessing
from serve.runtime.display import Described
from serve.runtime.errors import ImageError
from serve.runtime.images.headers import opened
from serve.runtime.images.image_preprocessing import upright
from serve.runtime.images.placement import Placement

#: A split's maps are ``uint8`` up to this many classes, because 255 is the ignored value. With more they are ``int16``.
NARROW_CLASSES: Final = 255

#: No class map has more classes.
MOST_CLASSES: Final = 32_767

#: Pillow's modes of pictures whose numbers can be indices of classes.
_INDEX_MODES = frozenset({"1", "L", "P", "I", "I;16", "I;16B", "I;16L", "I;16N"})

#: Where a PNG's header has its depth and its type of colour (ISO/IEC 15948, 11.2.2), and the type of greys.
_PNG_DEPTH, _PNG_TYPE, _PNG_GREY = 24, 25, 0


class Targets(Described, ABC):
    """The targets of a split's images, row by row."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of images."""

    @property
    def labels(self) -> torch.Tensor:
        """The class of each image, ``int64 (N,)``: parts keep their proportions. Zeros if an image has no class."""
        return torch.zeros(len(self), dtype=torch.int64)

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype of a target."""

    @abstractmethod
    def shape(self, preprocessing: Preprocessing) -> tuple[int, ...]:
        """Return the shape of a target. It may depend on the size of the network's input."""

    @abstractmethod
    def load(self, row: int, placement: Placement) -> torch.Tensor:
        """Return the target of the image at ``row``, which lies on the network's input as ``placement`` says.

        Raises:
            ImageError: it cannot be read or does not fit the image.
        """

    @abstractmethod
    def part(self, rows: npt.NDArray[np.integer[Any]]) -> Targets:
        """Return the targets at ``rows``, in that order."""

    @abstractmethod
    def renumbered(self, places: torch.Tensor) -> Targets:
        """Return the same targets with class ``places[c]`` for each class ``c``. ``places`` is ``int64 (classes,)``."""

    @abstractmethod
    def fingerprint(self, sources: Sequence[Source]) -> Fingerprint:
        """Return the fingerprint of images with these targets."""

    def _facts(self) -> dict[str, str]:
        return {"images": str(len(self))}


class Labels(Targets):
    """One class for each image: ``int64 (N,)``."""

    def __init__(self, labels: torch.Tensor) -> None:
        if labels.ndim != 1 or labels.dtype != torch.int64:
            raise ValueError(f"labels must be int64 of shape (N,), got {labels.dtype} of {tuple(labels.shape)}")
        self._labels = labels

    def __len__(self) -> int:
        """See `Targets`."""
        return len(self._labels)

    @property
    def labels(self) -> torch.Tensor:
        """The class of each image, ``int64 (N,)``."""
        return self._labels

    @property
    def dtype(self) -> torch.dtype:
        """See `Targets`."""
        return torch.int64

    def shape(self, preprocessing: Preprocessing) -> tuple[int, ...]:
        """See `Targets`."""
        return ()

    def load(self, row: int, placement: Placement) -> torch.Tensor:
        """See `Targets`."""
        return self._labels[row]

    def part(self, rows: npt.NDArray[np.integer[Any]]) -> Labels:
        """See `Targets`."""
        with torch.inference_mode(False):  # it is kept: a caller who measures must not make it unusable in training
            return Labels(torch.from_numpy(self._labels.numpy()[rows]))

    def renumbered(self, places: torch.Tensor) -> Labels:
        """See `Targets`."""
        return Labels(places[self._labels])

    def fingerprint(self, sources: Sequence[Source]) -> Fingerprint:
        """See `Targets`."""
        return fingerprint(sources, self._labels.numpy())


class Vectors(Targets):
    """A vector for each image, ``(K,)``: ``uint8`` with 1 for each class that it has, or numbers as ``float32``.

    Args:
        values: ``uint8`` or ``float32 (N, K)``.
    """

    def __init__(self, values: torch.Tensor) -> None:
        if values.ndim != 2 or values.dtype not in (torch.uint8, torch.float32):
            raise ValueError(f"vectors must be uint8 or float32 (N, K), got {values.dtype} of {tuple(values.shape)}")
        self.values = values

    def __len__(self) -> int:
        """See `Targets`."""
        return len(self.values)

    @property
    def dtype(self) -> torch.dtype:
        """See `Targets`."""
        return self.values.dtype

    def shape(self, preprocessing: Preprocessing) -> tuple[int, ...]:
        """See `Targets`."""
        return tuple(self.values.shape[1:])

    def load(self, row: int, placement: Placement) -> torch.Tensor:
        """See `Targets`."""
        return self.values[row]

    def part(self, rows: npt.NDArray[np.integer[Any]]) -> Vectors:
        """See `Targets`."""
        with torch.inference_mode(False):  # as in `Labels.part`
            return Vectors(torch.from_numpy(self.values.numpy()[rows]))

    def renumbered(self, places: torch.Tensor) -> Vectors:
        """See `Targets`."""
        moved = torch.empty_like(self.values)
        moved[:, places] = self.values
        return Vectors(moved)

    def fingerprint(self, sources: Sequence[Source]) -> Fingerprint:
        """See `Targets`."""
        bits = self.values.numpy() if self.dtype == torch.uint8 else self.values.numpy().view(np.int32)
        return fingerprint(sources, bits)


class ClassMaps(Targets):
    """A class for each pixel: masks, which are placed like their images, by nearest neighbour.

    A target is ``(H, W)`` of the network's size, ``uint8`` up to `NARROW_CLASSES` classes and ``int16`` for more. Bars
    around a picture and values of a mask that are no class do not count. They have the largest value of that type: 255
    is what masks use, and ``uint8`` has no -1. See `ignored`.

    Args:
        sources: a picture whose numbers are classes for each image: a PNG or the like, or an array of integers
            ``(H, W)``.
        classes: the number of classes.
        values: the class of each value of a mask that has one. None: a value is its class.
    """

    def __init__(self, sources: Sequence[Source], classes: int, values: Mapping[int, int] | None = None) -> None:
        dtype = torch.uint8 if classes <= NARROW_CLASSES else torch.int16
        meant = {place: place for place in range(classes)} if values is None else values
        # The last entry is for all larger values.
        table = torch.full((max(meant) + 2,), ignored(dtype), dtype=dtype).numpy()
        table[list(meant)] = list(meant.values())
        self._sources, self._table = sources, table

    def __len__(self) -> int:
        """See `Targets`."""
        return len(self._sources)

    @property
    def dtype(self) -> torch.dtype:
        """See `Targets`."""
        return torch.from_numpy(self._table).dtype

    def shape(self, preprocessing: Preprocessing) -> tuple[int, ...]:
        """See `Targets`."""
        return preprocessing.crop

    def load(self, row: int, placement: Placement) -> torch.Tensor:
        """See `Targets`."""
        classes = self.whole(row)
        (height, width), (rows, columns) = classes.shape, placement.picture
        if (height, width) != (rows, columns):
            raise ImageError(f"{self._name(row)} has {width}x{height} pixels, the picture has {columns}x{rows}")
        return placement.mask_to_network(classes, ignored(self.dtype))

    def whole(self, row: int) -> torch.Tensor:
        """Return the classes of the mask at ``row`` in its own size, ``(H, W)`` of `dtype`.

        Raises:
            ImageError: it cannot be read, or is not a picture of classes.
        """
        values = self.values(row)
        # Without a sign a negative value is a large one.
        return torch.from_numpy(self._table[np.minimum(values.astype(np.uint32), len(self._table) - 1)])

    def values(self, row: int) -> npt.NDArray[Any]:
        """Return the numbers in the mask at ``row``, integers ``(H, W)``.

        Raises:
            ImageError: it cannot be read, or is not a picture of classes.
        """
        try:
            return _values(self._sources[row])
        except ImageError as error:
            raise ImageError(f"{self._name(row)}: {error}") from None

    def part(self, rows: npt.NDArray[np.integer[Any]]) -> ClassMaps:
        """See `Targets`."""
        return self._with(select(self._sources, rows), self._table)

    def renumbered(self, places: torch.Tensor) -> ClassMaps:
        """See `Targets`."""
        table = self._table.copy()
        counts = table != ignored(self.dtype)
        table[counts] = places.numpy()[table[counts]]
        return self._with(self._sources, table)

    def fingerprint(self, sources: Sequence[Source]) -> Fingerprint:
        """See `Targets`. It covers the masks, and what their values mean."""
        return both(fingerprint(sources, self._table), fingerprint(self._sources, self._table))

    def _with(self, sources: Sequence[Source], table: npt.NDArray[np.integer[Any]]) -> ClassMaps:
        other = ClassMaps.__new__(ClassMaps)
        other._sources, other._table = sources, table
        return other

    def _name(self, row: int) -> str:
        source = self._sources[row]
        return f"its mask {source}" if isinstance(source, Path) else "its mask"


def ignored(dtype: torch.dtype) -> int:
    """Return the value of pixels that do not count in class maps of this dtype: its largest."""
    return torch.iinfo(dtype).max


def _values(source: Source) -> npt.NDArray[Any]:
    """Return the numbers in a mask, ``(H, W)``.

    Raises:
        ImageError: it cannot be read, or has colours.
    """
    if isinstance(source, np.ndarray):
        if source.ndim != 2:
            raise ImageError(f"has the shape {source.shape}, not (H, W)")
        return source
    try:
        source = file_bytes(source) if isinstance(source, Path) else source
        with opened(source, Budget()) as image:
            if image.format == "JPEG" or image.mode not in _INDEX_MODES:
                found = "a JPEG, which changes numbers" if image.format == "JPEG" else f"of colours ({image.mode})"
                raise ImageError(f"is {found}; a mask is a PNG whose greys or palette indices are the classes")
            values = np.asarray(upright(image))
    except MemoryError:
        raise ImageError("there is not enough memory to decode it") from None
    values = values.astype(np.uint8) if values.dtype == np.bool_ else values
    if image.format == "PNG" and source[_PNG_TYPE] == _PNG_GREY and 1 < source[_PNG_DEPTH] < 8:
        values = values // (255 // ((1 << source[_PNG_DEPTH]) - 1))  # Pillow 13 scales greys of 2 and 4 bits to white
    return values
