"""Torchvision's data sets of labels and of class maps, by their names in lower case."""

from __future__ import annotations

import contextlib
import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimize.data.cache_folders import cache_folder
from optimize.data.formats.base import DataFormat, register
from serve.runtime.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from optimize.data.augmentation_choice import Augmentation
    from optimize.data.records import ImageData, Split
    from optimize.listener import Listener


@dataclass(frozen=True)
class _Maps:
    """How a data set of class maps names its classes and files.

    Attributes:
        classes: the names of the classes.
        files: returns the paths of a data set's images, and of their masks.
        values: see `ClassMaps`.
    """

    classes: tuple[str, ...]
    files: Callable[[Any], tuple[Sequence[str | Path], Sequence[str | Path]]]
    values: Mapping[int, int] | None = None


@dataclass(frozen=True)
class _Torchvision:
    """How to open a data set with torchvision, and where its files are below the root. ``maps``: it has class maps."""

    cls: str
    train: dict[str, Any]
    val: dict[str, Any]
    files: str
    augment: Augmentation = "shift+flip"
    maps: _Maps | None = None


_BY_FLAG: tuple[dict[str, Any], dict[str, Any]] = ({"train": True}, {"train": False})
_BY_SPLIT: tuple[dict[str, Any], dict[str, Any]] = ({"split": "train"}, {"split": "test"})
# fmt: off
_VOC_CLASSES = (
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow",
    "diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)
# fmt: on
#: Palette indices are the classes, and 255 is the border between objects.
_VOC = _Maps(_VOC_CLASSES, lambda dataset: (dataset.images, dataset.masks))
#: Trimaps: 1 is the pet, 2 the background, 3 the border, which is not classified. torchvision (0.29) hides the paths.
_PETS = _Maps(("background", "pet"), lambda dataset: (dataset._images, dataset._segs), {2: 0, 1: 1})
SETS = {
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
    "vocsegmentation": _Torchvision(
        "VOCSegmentation", {"image_set": "train"}, {"image_set": "val"}, "VOCdevkit/VOC2012/", maps=_VOC
    ),
    "oxfordiiitpet": _Torchvision(
        "OxfordIIITPet",
        {"split": "trainval", "target_types": "segmentation"},
        {"split": "test", "target_types": "segmentation"},
        "oxford-iiit-pet/",
        maps=_PETS,
    ),
}


def open_torchvision(name: str, root: Path) -> ImageData:
    """Open the set called ``name``. Its files are in ``root``, or are downloaded to it.

    Raises:
        UserError: it is not there and cannot be downloaded.
    """
    import torch

    from optimize.data.pixels import native_size
    from optimize.data.records import ImageData

    entry = SETS[name]
    dataset, *others = (_dataset(name, entry, options, root) for options in (entry.train, entry.val))
    if entry.maps is not None:
        train, val = (_mapped(each, entry.maps, root) for each in (dataset, *others))
        return ImageData(name, "segmentation", entry.maps.classes, train, val, entry.augment, native_size(train))
    train, val = (_labelled(each, root) for each in (dataset, *others))
    count = int(torch.cat([train.labels, val.labels]).max()) + 1
    names = [n if isinstance(n, str) else n[0] for n in getattr(dataset, "classes", ())]
    classes = tuple(names) if len(names) >= count else tuple(str(index) for index in range(count))
    return ImageData(name, "classification", classes, train, val, entry.augment, native_size(train))


def _dataset(name: str, entry: _Torchvision, options: dict[str, Any], root: Path) -> Any:
    import inspect

    from torchvision import datasets

    cls = getattr(datasets, entry.cls)
    if "loader" in inspect.signature(cls).parameters:
        # Keeps the path instead of decoding. Sets without this option keep pixels in memory or are small.
        options = options | {"loader": Path}
    try:
        # torchvision prints to standard output, where our caller may print JSON.
        with contextlib.redirect_stdout(sys.stderr):
            try:
                return cls(str(root), download=False, **options)
            except (RuntimeError, OSError):  # "not found", in the words of each class
                root.mkdir(parents=True, exist_ok=True)
                return cls(str(root), download=True, **options)
    except (RuntimeError, OSError, ValueError, EOFError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
        raise UserError(
            f"{name}: is not on this machine and cannot be downloaded ({reason}); without a network, put its files "
            f"at {root / entry.files}"
        ) from None


def _mapped(dataset: Any, maps: _Maps, root: Path) -> Split:
    from optimize.data.records import Split
    from optimize.data.sources import Files
    from optimize.data.targets import ClassMaps

    images, masks = (Files.of(root, map(Path, paths)) for paths in maps.files(dataset))
    return Split(images, ClassMaps(masks, len(maps.classes), maps.values))


def _labelled(dataset: Any, root: Path) -> Split:
    import numpy as np
    import torch

    from optimize.data.records import Split
    from optimize.data.sources import Files, Records, png
    from optimize.data.targets import Labels

    paths: list[Path] = []
    encoded: list[bytes] = []
    labels: list[int] = []
    for item, label in dataset:
        if isinstance(item, Path):
            paths.append(item)
        else:
            encoded.append(png(np.asarray(item)))
        labels.append(int(label))
    sources = Files.of(root, paths) if paths else Records.of(encoded)
    return Split(sources, Labels(torch.tensor(labels, dtype=torch.int64)))


def _open(place: str, seed: int, listener: Listener, *, name: str) -> ImageData:
    return open_torchvision(name, cache_folder("datasets"))


for _name, _entry in SETS.items():
    register(DataFormat(_name, functools.partial(_open, name=_name), summary=f"torchvision's {_entry.cls}"))
