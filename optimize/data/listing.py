"""The image files below class folders, listed into arrays, with what a later look needs to see that nothing changed."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from optimize.data.fingerprint import NO_SIZE
from optimize.data.sources import Files
from serve.runtime.errors import UserError

#: What counts as an image file, in lower case.
SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")

_SUFFIXES = frozenset(suffix.encode() for suffix in SUFFIXES)
_ENDLESS = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}

#: A directory's inode number, and its times of change of content and of itself, in ns.
Stamp: TypeAlias = tuple[int, int, int]

_Sizes = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Listing:
    """Image files, in the order of the folders that were listed, of their classes, and in each of their paths.

    Attributes:
        classes: names of the class folders, sorted.
        files: the images.
        labels: ``int32 (N,)``, the class of each.
        sizes: ``int64 (N,)``, in bytes, `NO_SIZE` for a file that cannot be looked at.
        times: ``int64 (N,)``, when each was changed last, in ns; 0 for such a file.
        starts: where the images of each folder begin that was listed.
        stamps: for each directory that was listed, relative to the files' root, how it looked before.
    """

    classes: tuple[str, ...]
    files: Files
    labels: npt.NDArray[np.int32]
    sizes: _Sizes
    times: _Sizes
    starts: tuple[int, ...]
    stamps: dict[bytes, Stamp]


def list_classes(root: Path, *folders: Path, told: Callable[[float], None] = lambda share: None) -> Listing:
    """List the images of each class folder in ``folders``, one after the other, with paths relative to ``root``.

    A class folder's images may lie at any depth. Hidden files and folders do not count; links do.
    ``told`` is given the share of the class folders that are done.

    Raises:
        UserError: a folder cannot be read, has fewer than two classes, one has no images, or a pipe or a device that is
            called as an image is.
    """
    stamps = {b"": stamp(root)}
    listed: list[tuple[bytes, list[bytes]]] = []
    sizes: list[_Sizes] = []
    times: list[_Sizes] = []
    counts: list[int] = []
    starts: list[int] = []
    classes: list[str] = []
    for number, folder in enumerate(folders):
        below = os.fsencode(folder.relative_to(root)) if folder != root else b""
        stamps[below] = stamp(folder)
        above = (stamps[b""][0], stamps[below][0])
        classes = [entry.name for entry in folders_in(folder)]
        starts.append(sum(counts))
        for done, name in enumerate(classes):
            told((number + done / len(classes)) / len(folders))
            counts.append(0)
            for found in _walk(os.fsencode(root), _join(below, os.fsencode(name)), stamps, above):
                listed.append(found[:2])
                sizes.append(found[2])
                times.append(found[3])
                counts[-1] += len(found[1])
        _check(folder, classes, counts[len(counts) - len(classes) :])
    labels = np.tile(np.arange(len(classes), dtype=np.int32), len(folders))
    return Listing(
        tuple(classes),
        Files.listed(root, listed),
        np.repeat(labels, counts),
        np.concatenate(sizes),
        np.concatenate(times),
        tuple(starts),
        stamps,
    )


def _check(folder: Path, classes: list[str], counts: list[int]) -> None:
    if not any(counts):
        found = f"{len(classes)} folders without images" if classes else "no folders"
        raise UserError(f"{folder}: holds no images (found {found}); it needs one folder of images a class")
    if 0 in counts:
        empty = classes[counts.index(0)]
        raise UserError(f"{folder}: the class folder {empty!r} holds no images ({', '.join(SUFFIXES)})")
    if len(classes) < 2:
        raise UserError(f"{folder}: has only one class ({classes[0]}); a classifier needs at least two")


def folders_in(folder: Path) -> list[Path]:
    """Visible sub-folders, sorted by name.

    Raises:
        UserError: the folder cannot be read.
    """
    try:
        return sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        raise _unreadable(folder, error) from None


def stamp(folder: Path | bytes) -> Stamp:
    """How a directory looks now.

    Raises:
        UserError: it cannot be looked at.
    """
    try:
        status = os.stat(folder)  # noqa: PTH116 - also of bytes
    except OSError as error:
        raise _unreadable(folder, error) from None
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def _walk(
    root: bytes, place: bytes, stamps: dict[bytes, Stamp], above: tuple[int, ...]
) -> Iterator[tuple[bytes, list[bytes], _Sizes, _Sizes]]:
    """Each directory from ``place`` down, with its images' names, sizes and times, by name."""
    path = os.path.join(root, place)  # noqa: PTH118 - bytes
    stamps[place] = stamp(path)  # before it is read, so that a change meanwhile is seen later
    if stamps[place][0] in above:
        return  # a link to a folder that it lies in
    found: list[tuple[bytes, int, int]] = []
    folders: list[bytes] = []
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                name = entry.name
                if name.startswith(b"."):
                    continue
                if name[name.rfind(b".") :].lower() in _SUFFIXES and not entry.is_dir(follow_symlinks=False):
                    try:
                        status = entry.stat()
                        found.append((name, status.st_size, status.st_mtime_ns))
                    except OSError:  # a link to nowhere: named when it is to be read
                        found.append((name, NO_SIZE, 0))
                        continue
                    _check_kind(entry.path, status.st_mode)
                elif entry.is_dir():
                    folders.append(name)
    except OSError as error:
        raise _unreadable(path, error) from None
    found.sort()
    if found:
        sizes = np.fromiter((size for _, size, _ in found), np.int64, len(found))
        yield place, [name for name, _, _ in found], sizes, np.fromiter((time for *_, time in found), np.int64)
    inside = (*above, stamps[place][0])
    for name in sorted(folders):
        yield from _walk(root, _join(place, name), stamps, inside)


def _check_kind(path: bytes, mode: int) -> None:
    """Refuse what may never end where it is read as an image; a link to a folder is named when it is to be read."""
    kind = _ENDLESS.get(stat.S_IFMT(mode))
    if kind is not None:
        raise UserError(f"{os.fsdecode(path)}: is {kind}, and a class folder holds files; take it out, or rename it")


def _join(place: bytes, name: bytes) -> bytes:
    return os.path.join(place, name)  # noqa: PTH118 - bytes


def _unreadable(folder: Path | bytes, error: OSError) -> UserError:
    return UserError(f"{os.fsdecode(folder)}: the folder cannot be read ({error.strerror})")
