"""A data set's name → encoded images and labels: digits, a folder of images, or one of torchvision's.

Images stay encoded (a path or PNG bytes) until `optimize.data` decodes them with the code that serves.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image

from optimize.model_source import nearest
from serve.runtime import images
from serve.runtime.errors import ImageError, UserError

Augmentation = Literal["none", "shift", "shift+flip"]

#: Share of the images that is kept for validation where a data set brings no split of its own.
VAL_SHARE = 0.2
#: Above this many bytes, files are fingerprinted by size and time of change instead of content.
STAT_FINGERPRINT_ABOVE = 1 << 30

_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif"})
_VAL_FOLDERS = ("val", "test", "valid", "validation")


@dataclass(frozen=True, eq=False)
class Split:
    """Encoded images and their labels. Compared by identity, so that it can key a cache.

    Attributes:
        sources: a file or its bytes for each image.
        labels: int64 of shape ``(N,)``, indices of classes.
    """

    sources: tuple[Path | bytes, ...]
    labels: torch.Tensor

    def __post_init__(self) -> None:
        if self.labels.shape != (len(self.sources),) or self.labels.dtype != torch.int64:
            raise ValueError(
                f"labels must be int64 of shape ({len(self.sources)},), "
                f"got {self.labels.dtype} of {tuple(self.labels.shape)}"
            )

    def __len__(self) -> int:
        return len(self.sources)


@dataclass(frozen=True, eq=False)
class ImageData:
    """A classification data set.

    Attributes:
        name: short name, for reports.
        classes: label of each class index.
        train: images to train and calibrate with.
        val: images to measure with, none of them in ``train``.
        fingerprint: SHA-256 over every image, its label and its split.
        fingerprint_kind: ``content`` if files' bytes were hashed, ``stat`` if only their sizes and times.
        augment: which random changes keep an image's label true.
        native_size: ``(height, width)`` in pixels if all of a sample of the images share it.
    """

    name: str
    classes: tuple[str, ...]
    train: Split
    val: Split
    fingerprint: str
    fingerprint_kind: Literal["content", "stat"]
    augment: Augmentation
    native_size: tuple[int, int] | None


@dataclass(frozen=True)
class _Torchvision:
    """How to ask torchvision for a data set, and where its files would lie below the root."""

    cls: str
    train: dict[str, Any]
    val: dict[str, Any]
    files: str
    augment: Augmentation = "shift+flip"


_BY_FLAG: tuple[dict[str, Any], dict[str, Any]] = ({"train": True}, {"train": False})
_BY_SPLIT: tuple[dict[str, Any], dict[str, Any]] = ({"split": "train"}, {"split": "test"})
_TORCHVISION = {
    "cifar10": _Torchvision("CIFAR10", *_BY_FLAG, "cifar-10-python.tar.gz"),
    "cifar100": _Torchvision("CIFAR100", *_BY_FLAG, "cifar-100-python.tar.gz"),
    "mnist": _Torchvision("MNIST", *_BY_FLAG, "MNIST/raw/", "shift"),
    "fashionmnist": _Torchvision("FashionMNIST", *_BY_FLAG, "FashionMNIST/raw/"),
    "kmnist": _Torchvision("KMNIST", *_BY_FLAG, "KMNIST/raw/", "shift"),
    "svhn": _Torchvision("SVHN", *_BY_SPLIT, "train_32x32.mat and test_32x32.mat", "shift"),
    "stl10": _Torchvision("STL10", *_BY_SPLIT, "stl10_binary.tar.gz"),
    "gtsrb": _Torchvision("GTSRB", *_BY_SPLIT, "gtsrb/", "shift"),
    "flowers102": _Torchvision("Flowers102", *_BY_SPLIT, "flowers-102/"),
    "food101": _Torchvision("Food101", *_BY_SPLIT, "food-101/"),
    "dtd": _Torchvision("DTD", *_BY_SPLIT, "dtd/"),
    "fgvcaircraft": _Torchvision("FGVCAircraft", {"split": "trainval"}, {"split": "test"}, "fgvc-aircraft-2013b/"),
    "country211": _Torchvision("Country211", *_BY_SPLIT, "country211/"),
    "imagenette": _Torchvision("Imagenette", {"split": "train"}, {"split": "val"}, "imagenette2/"),
}


def open_data(reference: str, *, seed: int = 0, root: Path | None = None) -> ImageData:
    """Open ``digits``, ``imagefolder:DIR``, or a torchvision data set by its name in lower case.

    Args:
        reference: what the user wrote.
        seed: of the split, where the data set brings none.
        root: where torchvision's data sets lie or are downloaded to; by default the user's cache folder.

    Raises:
        UserError: there is no such data set or folder, it cannot be read or downloaded, or it is not a
            classification data set of at least two classes.
    """
    kind, _, where = reference.partition(":")
    if kind == "imagefolder":
        if not where:
            raise UserError("imagefolder needs a folder: imagefolder:DIR")
        return _image_folder(Path(where).expanduser(), seed)
    name = reference.lower().replace("-", "").replace("_", "")
    if name == "digits":
        return _digits(seed)
    if name in _TORCHVISION:
        return _torchvision(name, root or _default_root())
    known = ["digits", "imagefolder:DIR", *_TORCHVISION]
    hint = f" (did you mean imagefolder:{reference}?)" if Path(reference).is_dir() else nearest(reference, known)
    raise UserError(f"there is no data set {reference!r}{hint}; known are {', '.join(known)}")


def read_source(source: Path | bytes) -> bytes:
    """An image's encoded bytes.

    Raises:
        UserError: its file cannot be read.
    """
    if isinstance(source, bytes):
        return source
    try:
        return source.read_bytes()
    except OSError as error:
        raise UserError(f"{source}: cannot be read ({error.strerror})") from None


def _digits(seed: int) -> ImageData:
    """scikit-learn's 1,797 handwritten digits, 8x8 greys of 0 to 16, which need no download."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    pixels = np.rint(bunch.images * (255 / 16)).astype(np.uint8)
    sources = tuple(_png(image) for image in pixels)
    keys = [hashlib.sha256(f"{seed}/{index}".encode()).digest() for index in range(len(sources))]
    splits = _stratified(sources, bunch.target.tolist(), keys)
    return _described("digits", tuple(str(digit) for digit in range(10)), splits, "shift")


def _image_folder(root: Path, seed: int) -> ImageData:
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
        return _described(name, tuple(train_files), splits, "shift+flip", root)
    files = _class_files(root)
    few = [cls for cls, paths in files.items() if len(paths) < 2]
    if few:
        raise UserError(f"{root}: class {few[0]!r} has one image; to be split, each class needs at least two")
    whole = _gather(files)
    keys = []
    for source in map(os.fsdecode, whole.sources):
        relative = source.removeprefix(f"{root}{os.sep}")
        keys.append(hashlib.sha256(f"{seed}/{relative}".encode("utf-8", "surrogateescape")).digest())
    splits = _stratified(whole.sources, whole.labels.tolist(), keys)
    return _described(name, tuple(files), splits, "shift+flip", root)


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


def _stratified(sources: tuple[Path | bytes, ...], labels: list[int], keys: list[bytes]) -> tuple[Split, Split]:
    """Split off `VAL_SHARE` of each class (at least one image): those with the smallest keys.

    A key depends on its image's name alone, so that a new image leaves the others where they are, but
    for at most one of its class that it displaces at the boundary.
    """
    members: dict[int, list[int]] = {}
    for index, label in enumerate(labels):
        members.setdefault(label, []).append(index)
    chosen: set[int] = set()
    for indices in members.values():
        count = max(1, round(len(indices) * VAL_SHARE))
        chosen.update(sorted(indices, key=lambda index: keys[index])[:count])

    def part(indices: Iterable[int]) -> Split:
        taken = list(indices)
        return Split(
            tuple(sources[index] for index in taken), torch.tensor([labels[i] for i in taken], dtype=torch.int64)
        )

    everyone = range(len(sources))
    return part(i for i in everyone if i not in chosen), part(i for i in everyone if i in chosen)


def _torchvision(name: str, root: Path) -> ImageData:
    entry = _TORCHVISION[name]
    parts = [_torchvision_part(name, entry, options, root) for options in (entry.train, entry.val)]
    dataset = parts[0][0]
    (train, val) = (split for _, split in parts)
    count = int(torch.cat([train.labels, val.labels]).max()) + 1
    names = [n if isinstance(n, str) else n[0] for n in getattr(dataset, "classes", ())]
    classes = tuple(names) if len(names) >= count else tuple(str(index) for index in range(count))
    return _described(name, classes, (train, val), entry.augment, root)


def _torchvision_part(name: str, entry: _Torchvision, options: dict[str, Any], root: Path) -> tuple[Any, Split]:
    import inspect

    from torchvision import datasets

    cls = getattr(datasets, entry.cls)
    if "loader" in inspect.signature(cls).parameters:
        # Keeps the path instead of decoding; sets without this option keep pixels in memory or are small.
        options = options | {"loader": Path}
    try:
        # torchvision prints to standard output, where our caller's JSON may go.
        with contextlib.redirect_stdout(sys.stderr):
            try:
                dataset = cls(str(root), download=False, **options)
            except (RuntimeError, OSError):  # "not found", in the words of each class
                root.mkdir(parents=True, exist_ok=True)
                dataset = cls(str(root), download=True, **options)
    except (RuntimeError, OSError, ValueError, EOFError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
        raise UserError(
            f"{name}: is not on this machine and cannot be downloaded ({reason}); "
            f"without a network its files must lie at {root / entry.files}"
        ) from None
    sources: list[Path | bytes] = []
    labels: list[int] = []
    for item, label in dataset:
        sources.append(item if isinstance(item, Path) else _png(np.asarray(item)))
        labels.append(int(label))
    return dataset, Split(tuple(sources), torch.tensor(labels, dtype=torch.int64))


def _default_root() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "optimize-and-serve" / "datasets"


def _described(
    name: str, classes: tuple[str, ...], splits: tuple[Split, Split], augment: Augmentation, root: Path | None = None
) -> ImageData:
    """Complete a data set with what can be read off its images."""
    train, val = splits
    data = ImageData(name, classes, train, val, "", "content", augment, _native_size(train))
    digest, kind = _fingerprint(data, root)
    return replace(data, fingerprint=digest, fingerprint_kind=kind)


def _native_size(split: Split) -> tuple[int, int] | None:
    """``(height, width)`` that 16 images, spread over the split, all have; None if they differ."""
    sizes = set()
    for index in torch.linspace(0, len(split) - 1, min(16, len(split))).long().tolist():
        source = split.sources[index]
        try:
            height, width = images.decode(read_source(source)).shape[-2:]
        except ImageError as error:
            where = "an image in memory" if isinstance(source, bytes) else source
            raise UserError(f"{where}: {error}") from None
        sizes.add((height, width))
    return sizes.pop() if len(sizes) == 1 else None


def _fingerprint(data: ImageData, root: Path | None) -> tuple[str, Literal["content", "stat"]]:
    splits = (("train", data.train), ("val", data.val))
    try:
        stats = {source: source.stat() for _, split in splits for source in split.sources if isinstance(source, Path)}
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read ({error.strerror})") from None
    by_stat = sum(stat.st_size for stat in stats.values()) > STAT_FINGERPRINT_ABOVE
    digest = hashlib.sha256(repr(data.classes).encode("utf-8", "surrogateescape"))
    above = f"{root}{os.sep}"
    for title, split in splits:
        for source, label in zip(split.sources, split.labels.tolist(), strict=True):
            if isinstance(source, Path) and by_stat:
                content = f"{stats[source].st_size} {stats[source].st_mtime_ns}"
            else:
                content = hashlib.sha256(read_source(source)).hexdigest()
            # Cut as text: Path.relative_to takes longer than reading a small file.
            place = str(source).removeprefix(above) if isinstance(source, Path) else ""
            digest.update(f"{title}\0{place}\0{label}\0{content}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest(), "stat" if by_stat else "content"


def _png(pixels: np.ndarray[Any, Any]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()
