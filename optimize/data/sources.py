"""Sequences of encoded images over arrays: a million of them take tens of megabytes, not gigabytes.

A tuple of a million paths is a million Python objects. A forked worker process copies every page of them that it reads,
because reading changes reference counts. Arrays have no such counters, so all processes share one copy.
"""

from __future__ import annotations

import abc
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, overload

import numpy as np
import numpy.typing as npt
from PIL import Image

from serve.runtime.errors import ImageError, UserError
from serve.runtime.images.image_preprocessing import eight_bit, white_of

#: An image: a file, its encoded bytes, or, if the preprocessing is already done, pixels ``uint8 (C, H, W)``.
Source: TypeAlias = "Path | bytes | npt.NDArray[np.uint8]"

T_co = TypeVar("T_co", covariant=True)


class Table(Sequence[T_co]):
    """A sequence whose items are made on request. Equal to any sequence of equal items."""

    @abc.abstractmethod
    def item(self, index: int) -> T_co:
        """Return the item at ``index``, which is in ``range(len(self))``."""

    @overload
    def __getitem__(self, index: int) -> T_co: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T_co, ...]: ...
    def __getitem__(self, index: int | slice) -> T_co | tuple[T_co, ...]:
        if isinstance(index, slice):
            return tuple(self.item(place) for place in range(*index.indices(len(self))))
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(f"there is no image {index} among {len(self)}")
        return self.item(place)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str | bytes):
            return NotImplemented
        return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]


class Files(Table[Path]):
    """Paths of files below one folder: each directory's name once, and all file names in one array.

    Attributes:
        root: the folder that contains all of them.
        folders: directories, relative to ``root``, as the file system's bytes. Empty for ``root`` itself.
        folder: ``int32 (N,)``, the index into ``folders`` for each file.
        names: ``uint8``, the files' names one behind the other.
        ends: ``int64 (N,)``, where each name ends in ``names``.
    """

    def __init__(
        self,
        root: Path,
        folders: Sequence[bytes],
        folder: npt.NDArray[np.int32],
        names: npt.NDArray[np.uint8],
        ends: npt.NDArray[np.int64],
    ) -> None:
        self.root = root
        self.folders = tuple(folders)
        self.folder = folder
        self.names = names
        self.ends = ends
        self._prefixes = tuple(f"{os.fsdecode(name)}{os.sep}" if name else "" for name in self.folders)

    @classmethod
    def listed(cls, root: Path, listing: Iterable[tuple[bytes, Sequence[bytes]]]) -> Files:
        """Build from pairs of a directory, relative to ``root``, and the names of the files in it."""
        folders, counts, lengths, blobs = [], [], [], []
        for folder, names in listing:
            folders.append(folder)
            counts.append(len(names))
            lengths.append(np.fromiter(map(len, names), np.int64, len(names)))
            blobs.append(b"".join(names))
        sizes = np.concatenate(lengths) if lengths else np.zeros(0, np.int64)
        blob = np.frombuffer(b"".join(blobs), np.uint8)
        return cls(root, folders, np.repeat(np.arange(len(folders), dtype=np.int32), counts), blob, np.cumsum(sizes))

    @classmethod
    def of(cls, root: Path, paths: Iterable[Path]) -> Files:
        """Build from paths below ``root``, in their order."""
        folders: dict[bytes, int] = {}
        folder, names = [], []
        for path in paths:
            above, _, name = os.fsencode(path.relative_to(root)).rpartition(os.fsencode(os.sep))
            folder.append(folders.setdefault(above, len(folders)))
            names.append(name)
        ends = np.cumsum(np.fromiter(map(len, names), np.int64, len(names)))
        return cls(root, list(folders), np.asarray(folder, np.int32), np.frombuffer(b"".join(names), np.uint8), ends)

    def __len__(self) -> int:
        return len(self.ends)

    def item(self, index: int) -> Path:
        """Return the file's path."""
        return Path(self.root, self._prefixes[self.folder[index]] + os.fsdecode(self._name(index)))

    def below(self, rows: npt.NDArray[np.integer[Any]]) -> Iterator[bytes]:
        """Yield the paths below ``root`` of the files at ``rows``, as the file system's bytes."""
        prefixes = [os.fsencode(prefix) for prefix in self._prefixes]
        names = self.names.tobytes()
        for start in range(0, len(rows), 1 << 16):  # as Python integers, all at once would take 100 MB
            chunk = rows[start : start + (1 << 16)]
            begins = np.where(chunk > 0, self.ends[chunk - 1], 0)
            parts = zip(self.folder[chunk].tolist(), begins.tolist(), self.ends[chunk].tolist(), strict=True)
            for folder, begin, end in parts:
                yield prefixes[folder] + names[begin:end]

    def _name(self, index: int) -> bytes:
        start = self.ends[index - 1] if index else 0
        return self.names[start : self.ends[index]].tobytes()


class Records(Table[bytes]):
    """Encoded images in memory (or in a mapped file), one behind the other.

    Attributes:
        data: ``uint8``, all bytes.
        ends: ``int64 (N,)``, where each image ends in ``data``.
    """

    def __init__(self, data: npt.NDArray[np.uint8], ends: npt.NDArray[np.int64]) -> None:
        self.data = data
        self.ends = ends

    @classmethod
    def of(cls, images: Iterable[bytes]) -> Records:
        """Copy encoded images into one array."""
        held = list(images)
        ends = np.cumsum(np.fromiter(map(len, held), np.int64, len(held)))
        return cls(np.frombuffer(b"".join(held), np.uint8), ends)

    def __len__(self) -> int:
        return len(self.ends)

    def item(self, index: int) -> bytes:
        """Return the image's encoded bytes."""
        start = self.ends[index - 1] if index else 0
        return self.data[start : self.ends[index]].tobytes()


class Pixels(Table["npt.NDArray[np.uint8]"]):
    """Images whose preprocessing is already done: ``uint8 (N, C, H, W)`` in memory or in a mapped file."""

    def __init__(self, pixels: npt.NDArray[np.uint8]) -> None:
        self.pixels = pixels

    def __len__(self) -> int:
        return len(self.pixels)

    def item(self, index: int) -> npt.NDArray[np.uint8]:
        """Return the image's pixels, ``uint8 (C, H, W)``."""
        image: npt.NDArray[np.uint8] = self.pixels[index]
        return image

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pixels) and np.array_equal(self.pixels, other.pixels)

    __hash__ = None


class Selected(Table[Any]):
    """Some images of another sequence, in another order. The images themselves are not copied.

    Attributes:
        whole: the other sequence.
        rows: ``int32`` or ``int64 (N,)``, indices into it.
    """

    def __init__(self, whole: Sequence[Any], rows: npt.NDArray[np.integer[Any]]) -> None:
        self.whole = whole
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def item(self, index: int) -> Any:
        """Return the image that row ``index`` refers to."""
        return self.whole[int(self.rows[index])]


def select(sources: Sequence[Any], rows: npt.NDArray[np.integer[Any]]) -> Selected:
    """Return the images at ``rows`` of ``sources``. A selection of a selection is one selection."""
    if isinstance(sources, Selected):
        return Selected(sources.whole, sources.rows[rows])
    return Selected(sources, rows.astype(np.int32 if len(sources) < 1 << 31 else np.int64))


def read_source(source: Source) -> bytes:
    """Return an image's encoded bytes. Pixels become a PNG.

    Raises:
        UserError: its file cannot be read.
    """
    if isinstance(source, bytes):
        return source
    if isinstance(source, np.ndarray):
        return png(source[0] if len(source) == 1 else source.transpose(1, 2, 0))
    try:
        return file_bytes(source)
    except ImageError as error:
        raise UserError(f"{source}: {error}") from None


def file_bytes(path: Path) -> bytes:
    """Return the bytes of an image's file.

    Raises:
        ImageError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise ImageError(f"cannot be read ({error.strerror})") from None


def out_of_reach(sources: Sequence[Source], sample: int = 8) -> Path | None:
    """Return one of a few evenly spread files if none of them can be read on this machine. None if one can.

    Single images may be damaged anywhere. This is about their folder.
    """
    some = [sources[place] for place in range(0, len(sources), -(-len(sources) // sample))] if len(sources) else []
    files = [source for source in some if isinstance(source, Path)]
    return files[0] if files and not any(os.access(file, os.R_OK) for file in files) else None


def png(pixels: npt.NDArray[np.uint8], level: int = 1) -> bytes:
    """Encode ``uint8 (H, W)`` or ``(H, W, 2 to 4)``: a split holds images in memory like this."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", compress_level=level)
    return buffer.getvalue()


def tiff(image: Image.Image) -> bytes:
    """Encode a deep grey of Pillow's. Its values are scaled later like those of any file."""
    if white_of(image) != white_of(Image.new(image.mode, (1, 1))):  # 12 bits, which only its own file states
        image = eight_bit(image)
    buffer = io.BytesIO()
    image.save(buffer, "TIFF")
    return buffer.getvalue()
