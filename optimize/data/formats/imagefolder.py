"""``imagefolder:DIR``: a folder of class folders, with or without a split of its own."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from optimize.data.fingerprint import described
from optimize.data.formats.base import DataFormat, register
from optimize.data.records import ImageData, Split
from optimize.data.splits import split_off
from serve.runtime.errors import UserError

_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif"})


_VAL_FOLDERS = ("val", "test", "valid", "validation")


def _open(place: str, seed: int) -> ImageData:
    root = Path(place).expanduser()
    if not root.exists():
        raise UserError(f"{root}: there is no such folder")
    if not root.is_dir():
        raise UserError(f"{root}: is not a folder; imagefolder:DIR needs one folder a class")
    name = root.resolve().name or "imagefolder"
    folders = {folder.name: folder for folder in _folders(root)}
    val_name = next((n for n in _VAL_FOLDERS if n in folders), None)
    # A class may be called "train": it is a split only if it holds folders itself.
    if "train" in folders and _folders(folders["train"]):
        if val_name is None:
            raise UserError(
                f"{root}: has train/ but none of {', '.join(n + '/' for n in _VAL_FOLDERS)}; "
                f"add one, or give imagefolder:{root / 'train'} to have it split"
            )
        train_files, val_files = _class_files(folders["train"]), _class_files(folders[val_name])
        if train_files.keys() != val_files.keys():
            only_train = sorted(train_files.keys() - val_files.keys())
            only_val = sorted(val_files.keys() - train_files.keys())
            parts = [
                f"{', '.join(names[:8])} only in {where}/"
                for names, where in ((only_train, "train"), (only_val, val_name))
                if names
            ]
            raise UserError(f"{root}: train/ and {val_name}/ have different classes: {'; '.join(parts)}")
        splits = _gather(train_files), _gather(val_files)
        return described(name, tuple(train_files), splits, "shift+flip", root)
    files = _class_files(root)
    few = [cls for cls, paths in files.items() if len(paths) < 2]
    if few:
        raise UserError(f"{root}: class {few[0]!r} has one image; to be split, each class needs at least two")
    whole = _gather(files)
    keys = []
    for source in map(os.fsdecode, whole.sources):
        relative = source.removeprefix(f"{root}{os.sep}")
        keys.append(hashlib.sha256(f"{seed}/{relative}".encode("utf-8", "surrogateescape")).digest())
    splits = split_off(whole.sources, whole.labels.tolist(), keys)
    return described(name, tuple(files), splits, "shift+flip", root)


def _folders(root: Path) -> list[Path]:
    """Visible sub-folders, sorted by name."""
    try:
        return sorted(entry for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        raise UserError(f"{root}: the folder cannot be read ({error.strerror})") from None


def _class_files(root: Path) -> dict[str, list[Path]]:
    """Image files of each class folder below ``root``, at any depth; classes and files sorted by name."""
    classes = {folder.name: list(_image_files(folder)) for folder in _folders(root)}
    if not any(classes.values()):
        found = f"{len(classes)} folders without images" if classes else "no folders"
        raise UserError(f"{root}: holds no images (found {found}); it needs one folder of images a class")
    empty = [name for name, files in classes.items() if not files]
    if empty:
        raise UserError(f"{root}: the class folder {empty[0]!r} holds no images ({', '.join(sorted(_SUFFIXES))})")
    if len(classes) < 2:
        raise UserError(f"{root}: has only one class ({next(iter(classes))}); a classifier needs at least two")
    return classes


def _image_files(folder: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename}: the folder cannot be read ({error.strerror})")

    # os.walk leaves out folders that it cannot list, unless told otherwise.
    for parent, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") and os.path.splitext(name)[1].lower() in _SUFFIXES:  # noqa: PTH122 - 3x faster
                yield Path(parent, name)


def _gather(files: dict[str, list[Path]]) -> Split:
    sources = tuple(path for paths in files.values() for path in paths)
    labels = [index for index, paths in enumerate(files.values()) for _ in paths]
    return Split(sources, torch.tensor(labels, dtype=torch.int64))


IMAGE_FOLDER = register(
    DataFormat(
        name="imagefolder",
        open=_open,
        place="DIR",
        summary="a folder with train/ and val/ or test/, or of class folders, which is split",
    )
)
