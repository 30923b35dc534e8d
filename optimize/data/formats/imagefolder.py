"""``imagefolder:DIR``: a folder of class folders, with or without a split of its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from optimize.data.formats.base import DataFormat, register
from serve.layout import expanded
from serve.runtime.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from optimize.data.index import Index
    from optimize.data.listing import Listing
    from optimize.data.records import ImageData
    from optimize.listener import Listener

#: Share of the time that goes into listing (of ImageNet: 4 of 6 s); the rest are hashes of names and contents.
_LISTING = 0.7
_VAL_FOLDERS = ("val", "test", "valid", "validation")


def _open(place: str, seed: int, listener: Listener) -> ImageData:
    import torch

    from optimize.data import index
    from optimize.data.records import ImageData, Split
    from optimize.data.sources import select

    root = expanded(place)
    if not root.exists():
        raise UserError(f"{root}: there is no such folder")
    if not root.is_dir():
        raise UserError(f"{root}: is not a folder; imagefolder:DIR needs one folder a class")
    kept = index.place(root, seed)
    found = index.read(kept, root)
    if found is None:
        found = _read(root, seed, listener)
        # A small one is read whole each time, so that nothing about it need be believed.
        if "sample" in (found.train_fingerprint.kind, found.val_fingerprint.kind):
            index.write(found, kept)
    train, val = (
        Split(select(found.files, rows), torch.from_numpy(found.labels[rows]).long(), fingerprint)
        for rows, fingerprint in ((found.train, found.train_fingerprint), (found.val, found.val_fingerprint))
    )
    # Not mirrored: there may be letters, signs or a left and a right in the images.
    return ImageData(root.resolve().name or "imagefolder", found.classes, train, val, "shift", found.native_size)


def _read(root: Path, seed: int, listener: Listener) -> Index:
    """List, split and fingerprint a folder; listing is most of it."""

    def told(share: float) -> None:
        listener.progressed(_LISTING * share, "listing")

    import numpy as np
    import torch

    from optimize.data.fingerprint import Fingerprint, fingerprint
    from optimize.data.index import Index
    from optimize.data.listing import folders_in, list_classes
    from optimize.data.pixels import native_size
    from optimize.data.records import Split
    from optimize.data.sources import select

    folders = {folder.name: folder for folder in folders_in(root)}
    val_name = next((name for name in _VAL_FOLDERS if name in folders), None)
    # A class may be called "train": it is a split only if it holds folders itself.
    if "train" in folders and folders_in(folders["train"]):
        if val_name is None:
            raise UserError(
                f"{root}: has train/ but none of {', '.join(n + '/' for n in _VAL_FOLDERS)}; "
                f"add one, or give imagefolder:{root / 'train'} to have it split"
            )
        _check_classes(root, folders["train"], folders[val_name])
        listing = list_classes(root, folders["train"], folders[val_name], told=told)
        validates = np.arange(len(listing.files)) >= listing.starts[1]
    else:
        listing = list_classes(root, root, told=told)
        few = np.flatnonzero(np.bincount(listing.labels) < 2)
        if len(few):
            name = listing.classes[few[0]]
            raise UserError(f"{root}: class {name!r} has one image; to be split, each class needs at least two")
        validates = _drawn(listing, seed)
    listener.progressed(_LISTING, "fingerprint")
    train, val = np.flatnonzero(~validates).astype(np.int32), np.flatnonzero(validates).astype(np.int32)

    def identity(rows: npt.NDArray[np.int32]) -> Fingerprint:
        return fingerprint(select(listing.files, rows), listing.labels[rows], listing.sizes[rows])

    labels = torch.from_numpy(listing.labels[train]).long()

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
    )


def _check_classes(root: Path, train: Path, val: Path) -> None:
    from optimize.data.listing import folders_in

    names = {part: {folder.name for folder in folders_in(part)} for part in (train, val)}
    only = ((sorted(names[train] - names[val]), train), (sorted(names[val] - names[train]), val))
    parts = [f"{', '.join(classes[:8])} only in {where.name}/" for classes, where in only if classes]
    if parts:
        raise UserError(f"{root}: train/ and {val.name}/ have different classes: {'; '.join(parts)}")


def _drawn(listing: Listing, seed: int) -> npt.NDArray[np.bool_]:
    """Which images are for validation: by a hash of their paths."""
    import hashlib

    import numpy as np

    from optimize.data.splits import chosen_by_key

    files, salt = listing.files, f"{seed}/".encode()
    digests = (hashlib.sha256(salt + place).digest() for place in files.below(np.arange(len(files))))
    keys = np.fromiter((int.from_bytes(digest[:8], "big") for digest in digests), np.uint64, len(files))
    return chosen_by_key(listing.labels.astype(np.int64), keys)


IMAGE_FOLDER = register(
    DataFormat(
        name="imagefolder",
        open=_open,
        place="DIR",
        summary="a folder with train/ and val/ or test/, or of class folders, which is split",
    )
)
