"""``imagefolder:DIR``: a folder of class folders, with or without its own split."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from optimize.data.formats.base import DataFormat, register
from serve.common.layout import expanded
from serve.runtime.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    import numpy.typing as npt

    from optimize.data.folder_index import Index
    from optimize.data.folder_listing import Listing
    from optimize.data.records import ImageData
    from optimize.listener import Listener

#: Share of the time for listing (of ImageNet: 4 of 6 s). The rest is for hashes of names and contents.
_LISTING = 0.7
#: Names of the folders of splits, in any case. Of several to measure with, the first is taken.
_TRAIN = ("train", "training", "trn")
_VAL = (
    *("val", "valid", "validation", "dev", "devel", "development", "holdout", "heldout", "eval", "evaluation"),
    *("test", "testing", "tst"),
)
#: Words that may accompany that in a name: train_set, seg_test, val2017, "Test Images".
_BESIDE = ("set", "data", "dataset", "images", "image", "imgs", "img", "seg", "split", "folder", "photos", "pictures")


def _open(place: str, seed: int, listener: Listener) -> ImageData:
    import torch

    from optimize.data import folder_index
    from optimize.data.records import ImageData, Split
    from optimize.data.sources import select
    from optimize.data.targets import Labels

    root = expanded(place)
    if not root.exists():
        raise UserError(f"{root}: there is no such folder")
    if not root.is_dir():
        raise UserError(f"{root}: is not a folder; imagefolder:DIR needs one folder per class")
    kept = folder_index.place(root, seed)
    found = folder_index.read(kept, root)
    if found is None:
        found = _read(root, seed, listener)
        # A small folder is read completely each time, so that no cached fact about it is needed.
        if "sample" in (found.train_fingerprint.kind, found.val_fingerprint.kind):
            folder_index.write(found, kept)
    train, val = (
        Split(select(found.files, rows), Labels(torch.from_numpy(found.labels[rows]).long()), fingerprint)
        for rows, fingerprint in ((found.train, found.train_fingerprint), (found.val, found.val_fingerprint))
    )
    # Not mirrored: the images may show letters, signs, or a left and a right.
    name, size = root.resolve().name or "imagefolder", found.native_size
    return ImageData(
        name, "classification", found.classes, train, val, "shift", size, gaps=found.gaps, notes=found.notes
    )


def _read(root: Path, seed: int, listener: Listener) -> Index:
    """List, split and fingerprint a folder. Listing takes most of the time."""

    def told(share: float) -> None:
        listener.progressed(_LISTING * share, "listing")

    import numpy as np
    import torch

    from optimize.data.fingerprint import Fingerprint, fingerprint
    from optimize.data.folder_index import Index
    from optimize.data.folder_listing import folders_in, list_classes
    from optimize.data.pixels import native_size
    from optimize.data.records import Split
    from optimize.data.sources import select
    from optimize.data.targets import Labels

    splits, gaps, notes = _splits(root, folders_in(root))
    if splits is not None:
        listing = list_classes(root, *splits, told=told)
        validates = np.arange(len(listing.files)) >= listing.starts[1]
    else:
        listing = list_classes(root, root, told=told)
        few = [listing.classes[row] for row in np.flatnonzero(np.bincount(listing.labels) == 1)]
        if few:
            which = f"class {few[0]!r} has" if len(few) == 1 else f"{len(few)} classes ({few[0]!r} …) have"
            gaps.append(f"{root}: {which} one image; to be split, each class needs at least two")
        validates = _drawn(listing, seed)
    listener.progressed(_LISTING, "fingerprint")
    train, val = np.flatnonzero(~validates).astype(np.int32), np.flatnonzero(validates).astype(np.int32)

    def identity(rows: npt.NDArray[np.int32]) -> Fingerprint:
        return fingerprint(select(listing.files, rows), listing.labels[rows], listing.sizes[rows])

    labels = Labels(torch.from_numpy(listing.labels[train]).long())

    return Index(
        classes=listing.classes,
        files=listing.files,
        labels=listing.labels,
        sizes=listing.sizes,
        times=listing.times,
        train=train,
        val=val,
        train_fingerprint=identity(train),
        val_fingerprint=identity(val),
        native_size=native_size(Split(select(listing.files, train), labels)),
        stamps=listing.stamps,
        gaps=(*gaps, *listing.gaps),
        notes=(*notes, *listing.notes),
    )


def _splits(root: Path, folders: Sequence[Path]) -> tuple[tuple[Path, Path] | None, list[str], list[str]]:
    """Return the folders to train and to measure with, or None if ``folders`` are classes. Also returns remarks.

    Raises:
        UserError: there are folders of splits, but not exactly one to train and one to measure with.
    """
    from optimize.data.folder_listing import folders_in

    inside = {folder: [entry.name for entry in folders_in(folder)] for folder in folders}
    # A class may be called "train". It is a split only if it contains folders.
    meant = {folder: word for folder in folders if inside[folder] and (word := _split_word(folder.name))}
    train = [folder for folder, word in meant.items() if word in _TRAIN]
    val = sorted((_VAL.index(word), folder) for folder, word in meant.items() if word in _VAL)
    if len(train) > 1:
        raise UserError(f"{root}: has {_slashed(train)}; only one folder can be used for training: merge them")
    if train and not val:
        raise UserError(
            f"{root}: has {train[0].name}/ but none of {', '.join(f'{word}/' for word in _VAL)} with class folders; "
            f"add one, or give imagefolder:{train[0]} to have it split"
        )
    if train:
        judge = val[0][1]
        unused = [folder for folder in folders if folder not in (train[0], judge)]
        notes = [f"{_slashed([judge])} is used for measuring; not used: {_slashed(unused)}"] if unused else []
        return (train[0], judge), [], notes
    if val and len(meant) == len(folders):
        raise UserError(f"{root}: has {_slashed(folders)} but no train/; add it, or give one of these folders")
    gaps = [
        f"{root}: {_slashed([folder])} has the name of a split and contains folders, but is used as a class"
        for _, folder in val
    ]
    return None, gaps + _alike(root, inside), []


def _alike(root: Path, inside: Mapping[Path, Sequence[str]]) -> list[str]:
    """Remark on folders that seem to be classes but contain the same folders, as splits do."""
    if len(inside) < 2:
        return []
    names = [set(each) for each in inside.values()]
    shared, there = set.intersection(*names), set.union(*names)
    if len(shared) < 2 or 2 * len(shared) < len(there):
        return []
    some = ", ".join(f"{name}/" for name in sorted(shared)[:4]) + (" …" if len(shared) > 4 else "")
    remedy = "they are used as classes; if they are splits, rename them to train/ and val/"
    if all(map(_split_word, shared)):
        remedy = "splits must contain the classes, as in train/CLASS/ and val/CLASS/"
    return [f"{root}: {_slashed(list(inside))} all contain the same folders ({some}); {remedy}"]


def _split_word(name: str) -> str | None:
    """Return the word for a split in a folder's name, such as ``train`` in ``Train_Set``. None for other names."""
    words = [word for word in re.findall(r"[^\W\d_]+", name.casefold()) if word not in _BESIDE]
    joined = "".join(words)
    known = (*_TRAIN, *_VAL)
    return (
        joined if joined in known else next((word for word in known if joined in (f"{word}set", f"{word}data")), None)
    )


def _slashed(folders: Sequence[Path]) -> str:
    return ", ".join(f"{folder.name}/" for folder in folders[:8]) + (" …" if len(folders) > 8 else "")


def _drawn(listing: Listing, seed: int) -> npt.NDArray[np.bool_]:
    """Choose the validation images by a hash of their paths."""
    import hashlib

    import numpy as np

    from optimize.data.splits import chosen_by_key

    files, salt = listing.files, f"{seed}/".encode()
    digests = (hashlib.sha256(salt + place).digest() for place in files.below(np.arange(len(files))))
    keys = np.fromiter((int.from_bytes(digest[:8], "big") for digest in digests), np.uint64, len(files))
    return chosen_by_key(listing.labels.astype(np.int64), keys)


def _open_for_retrieval(place: str, seed: int, listener: Listener) -> ImageData:
    """Open the same folder, to retrieve images of one class."""
    import dataclasses

    return dataclasses.replace(_open(place, seed, listener), task="embeddings")


IMAGE_FOLDER = register(
    DataFormat(
        name="imagefolder",
        open=_open,
        place="DIR",
        summary="a folder with train/ and val/ or test/, or with class folders only, which are split",
    )
)

RETRIEVAL = register(
    DataFormat(
        name="retrieval",
        open=_open_for_retrieval,
        place="DIR",
        summary="class folders as imagefolder reads them, to retrieve images of one class",
    )
)
