"""Lists the image files below folders into arrays, with the facts that show later whether anything changed."""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from optimize.data.fingerprint import NO_SIZE
from optimize.data.sources import Files
from serve.runtime.errors import UserError, listed

#: Suffixes of image files, in lower case. Any other file is recognised by its first bytes.
SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".jif", ".jfi", ".pjpeg", ".pjp", ".png", ".apng"),
    *(".bmp", ".dib", ".gif", ".tif", ".tiff", ".webp"),
)
#: The first bytes of files in the formats that the runtime decodes.
_MAGIC = re.compile(
    rb"\xff\xd8\xff|\x89PNG\r\n\x1a\n|GIF8[79]a|RIFF....WEBP|BM....\0\0\0\0|II[*+]\0|MM\0[*+]", re.DOTALL
)
_HEAD = 16

_SUFFIXES = frozenset(suffix.encode() for suffix in SUFFIXES)
_ENDLESS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}

#: A directory's inode number, and its times of change of content and of itself, in ns.
Stamp: TypeAlias = tuple[int, int, int]

_Sizes = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Listing:
    """Image files, sorted by listed folder, then by class, then by path.

    Attributes:
        classes: names of the class folders, sorted.
        files: the images.
        labels: ``int32 (N,)``, the class of each.
        sizes: ``int64 (N,)``, in bytes, `NO_SIZE` for an unreadable file.
        times: ``int64 (N,)``, when each was changed last, in ns, 0 for an unreadable file.
        starts: where the images of each listed folder begin.
        stamps: the stamp of each listed directory, relative to the files' root, from before it was listed.
        gaps: possible mistakes: classes that have no images somewhere.
        notes: files that were left out.
    """

    classes: tuple[str, ...]
    files: Files
    labels: npt.NDArray[np.int32]
    sizes: _Sizes
    times: _Sizes
    starts: tuple[int, ...]
    stamps: dict[bytes, Stamp]
    gaps: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def list_classes(root: Path, *folders: Path, told: Callable[[float], None] = lambda share: None) -> Listing:
    """List the images of each class folder in ``folders``, one after the other, with paths relative to ``root``.

    The classes are those of the first folder. A class folder's images may be at any depth. Hidden files and folders do
    not count, links do. ``told`` receives the share of the class folders that are done.

    Raises:
        UserError: a folder cannot be read, has no images or fewer than two classes, or has a pipe or device with the
            name of an image.
    """
    stamps = {b"": stamp(root)}
    listed: list[tuple[bytes, list[bytes]]] = []
    sizes: list[_Sizes] = []
    times: list[_Sizes] = []
    counts: list[int] = []
    starts: list[int] = []
    skipped: list[bytes] = []
    gaps: list[str] = []
    classes = [entry.name for entry in folders_in(folders[0])]
    for number, folder in enumerate(folders):
        below = os.fsencode(folder.relative_to(root)) if folder != root else b""
        stamps[below] = stamp(folder)
        above = (stamps[b""][0], stamps[below][0])
        there = {entry.name for entry in folders_in(folder)}
        starts.append(sum(counts))
        for done, name in enumerate(classes):
            told((number + done / len(classes)) / len(folders))
            counts.append(0)
            if name not in there:
                continue
            for found in _walk(os.fsencode(root), _join(below, os.fsencode(name)), stamps, above, skipped):
                listed.append(found[:2])
                sizes.append(found[2])
                times.append(found[3])
                counts[-1] += len(found[1])
        skipped += _loose(folder, below)
        gaps += _gaps(folders[0], folder, classes, there, counts[len(counts) - len(classes) :])
    labels = np.tile(np.arange(len(classes), dtype=np.int32), len(folders))
    return Listing(
        tuple(classes),
        Files.listed(root, listed),
        np.repeat(labels, counts),
        np.concatenate(sizes),
        np.concatenate(times),
        tuple(starts),
        stamps,
        tuple(gaps),
        _left_out(skipped),
    )


def _gaps(first: Path, folder: Path, classes: list[str], there: set[str], counts: list[int]) -> list[str]:
    """Name the classes without images in ``folder``, and its folders that are not among the ``classes`` of ``first``.

    Raises:
        UserError: it has no images at all, or there are fewer than two classes.
    """
    if not any(counts):
        found = f"{len(there)} folders without images" if there else "no folders"
        raise UserError(f"{folder}: holds no images (found {found}); it needs one folder of images per class")
    if len(classes) < 2:
        raise UserError(f"{folder}: has only one class ({classes[0]}); a classifier needs at least two")
    gaps = []
    only = ((sorted(set(classes) - there), first), (sorted(there - set(classes)), folder))
    if parts := [f"{listed(names)} only in {where.name}/" for names, where in only if names]:
        gaps.append(f"{first.parent}: {first.name}/ and {folder.name}/ have different classes: {'; '.join(parts)}")
    empty = [name for name, count in zip(classes, counts, strict=True) if not count and name in there]
    if empty:
        which = f"the class folder {empty[0]!r} holds" if len(empty) == 1 else f"{len(empty)} class folders hold"
        gaps.append(f"{folder}: {which} no images ({listed(empty)})")
    return gaps


def _loose(folder: Path, below: bytes) -> list[bytes]:
    """Return files with names of images that are in no class folder."""
    names = (os.fsencode(entry.name) for entry in folder.iterdir() if entry.is_file())
    return sorted(_join(below, name) for name in names if _is_called_image(name) and not name.startswith(b"."))


def _left_out(skipped: list[bytes]) -> tuple[str, ...]:
    """Return the line about files that were left out, if there are any."""
    if not skipped:
        return ()
    kinds = Counter(os.path.splitext(os.fsdecode(name))[1].lower() or "no suffix" for name in skipped)  # noqa: PTH122
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(5)) + (", …" if len(kinds) > 5 else "")
    files = (
        "1 file that is not an image, or is"
        if len(skipped) == 1
        else f"{len(skipped)} files that are not images, or are"
    )
    names = [os.fsdecode(name) for name in skipped]
    return (f"left out: {files} in no class folder ({counts}): {listed(names, 5)}",)


def list_images(root: Path, folder: Path) -> Files:
    """List the images at any depth below a folder, sorted, with paths relative to ``root``.

    Raises:
        UserError: a folder cannot be read, or has a pipe or device with the name of an image.
    """
    found = _walk(os.fsencode(root), os.fsencode(folder.relative_to(root)), {}, (), [])
    return Files.listed(root, ((place, names) for place, names, *_ in found))


def folders_in(folder: Path) -> list[Path]:
    """Return the visible sub-folders, sorted by name.

    Raises:
        UserError: the folder cannot be read.
    """
    try:
        return sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        raise _unreadable(folder, error) from None


def stamp(folder: Path | bytes) -> Stamp:
    """Return a directory's present stamp.

    Raises:
        UserError: it cannot be read.
    """
    try:
        status = os.stat(folder)  # noqa: PTH116 - also accepts bytes
    except OSError as error:
        raise _unreadable(folder, error) from None
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def _walk(
    root: bytes, place: bytes, stamps: dict[bytes, Stamp], above: tuple[int, ...], skipped: list[bytes]
) -> Iterator[tuple[bytes, list[bytes], _Sizes, _Sizes]]:
    """Yield each directory from ``place`` down, with its images' names, sizes and times. ``skipped`` gets others."""
    path = os.path.join(root, place)  # noqa: PTH118 - bytes
    stamps[place] = stamp(path)  # taken before reading, so that a change during reading is noticed later
    if stamps[place][0] in above:
        return  # a link to a folder that contains it
    found: list[tuple[bytes, int, int]] = []
    folders: list[bytes] = []
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                name = entry.name
                if name.startswith(b"."):
                    continue
                if _is_called_image(name) and not entry.is_dir(follow_symlinks=False):
                    try:
                        status = entry.stat()
                        found.append((name, status.st_size, status.st_mtime_ns))
                    except OSError:  # a broken link is reported when it is read
                        found.append((name, NO_SIZE, 0))
                        continue
                    _check_kind(entry.path, status.st_mode)
                elif entry.is_dir():
                    folders.append(name)
                elif entry.is_file() and _begins_as_image(entry.path):
                    status = entry.stat()
                    found.append((name, status.st_size, status.st_mtime_ns))
                else:
                    skipped.append(_join(place, name))
    except OSError as error:
        raise _unreadable(path, error) from None
    found.sort()
    if found:
        sizes = np.fromiter((size for _, size, _ in found), np.int64, len(found))
        yield place, [name for name, _, _ in found], sizes, np.fromiter((time for *_, time in found), np.int64)
    inside = (*above, stamps[place][0])
    for name in sorted(folders):
        yield from _walk(root, _join(place, name), stamps, inside, skipped)


def _is_called_image(name: bytes) -> bool:
    return name[name.rfind(b".") :].lower() in _SUFFIXES


def _begins_as_image(path: bytes) -> bool:
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - bytes
            return _MAGIC.match(file.read(_HEAD)) is not None
    except OSError:
        return False


def _check_kind(path: bytes, mode: int) -> None:
    """Refuse files that may never end when they are read. A link to a folder is reported when it is read."""
    kind = _ENDLESS.get(stat.S_IFMT(mode))
    if kind is not None:
        raise UserError(
            f"{os.fsdecode(path)}: is {kind}; a folder of images must contain files only: move or rename it"
        )


def _join(place: bytes, name: bytes) -> bytes:
    return os.path.join(place, name)  # noqa: PTH118 - bytes


def _unreadable(folder: Path | bytes, error: OSError) -> UserError:
    return UserError(f"{os.fsdecode(folder)}: the folder cannot be read ({error.strerror})")
