"""Caches the listing of a large image folder in the user's cache folder, so that it opens in a second.

An index is valid as long as

- each directory has the inode number and the times of change that it had before it was listed, so that no file was
  added, removed or renamed
- of `LOOKED_AT` files, drawn anew each time, each has its old size and time of change.

So files that are overwritten in place are noticed if they are many, and perhaps not if they are few. A fingerprint of
kind ``sample`` is unsure of these anyway. Times can only invalidate the index. No fingerprint contains them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from optimize.data import fingerprint as rules
from optimize.data.cache_folders import cache_folder
from optimize.data.fingerprint import NO_SIZE, Fingerprint
from optimize.data.folder_listing import Stamp, stamp
from optimize.data.sources import Files
from serve.runtime.errors import UserError

#: The number of files that are checked to see whether an index is still valid.
LOOKED_AT = 4096

_VERSION = 2
_SETTLED_NS = 2_000_000_000  # file systems may store times this coarsely


@dataclass(frozen=True)
class Index:
    """A folder of images, listed, split and fingerprinted.

    Attributes:
        classes: names of the classes.
        files: all images.
        labels: ``int32 (N,)``, the class of each.
        sizes: ``int64 (N,)``, in bytes.
        times: ``int64 (N,)``, when each was changed last, in ns.
        train: ``int32``, rows of the training images.
        val: ``int32``, rows of the validation images.
        train_fingerprint: fingerprint of the training split.
        val_fingerprint: fingerprint of the validation split.
        native_size: see `ImageData`.
        stamps: the stamp of each listed directory, from before it was listed.
        gaps: see `ImageData`.
        notes: see `ImageData`.
    """

    classes: tuple[str, ...]
    files: Files
    labels: npt.NDArray[np.int32]
    sizes: npt.NDArray[np.int64]
    times: npt.NDArray[np.int64]
    train: npt.NDArray[np.int32]
    val: npt.NDArray[np.int32]
    train_fingerprint: Fingerprint
    val_fingerprint: Fingerprint
    native_size: tuple[int, int] | None
    stamps: dict[bytes, Stamp]
    gaps: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


_ARRAYS = ("labels", "sizes", "times", "train", "val")


def place(root: Path, seed: int) -> Path:
    """Return the path for the index of a folder. ``seed`` is the seed of its split."""
    limits = (rules.CONTENT_LIMIT, rules.CONTENT_IMAGES, rules.SAMPLE)
    named = "\0".join(map(str, (_VERSION, *limits, seed, os.fsencode(root.resolve()))))
    return cache_folder("indexes") / f"{hashlib.sha256(named.encode()).hexdigest()}.npz"


def write(index: Index, path: Path) -> bool:
    """Write an index, and return whether it was written.

    It is not if the folder was changed a moment ago, or if the disk is full.
    """
    newest = max(max(entry[1:]) for entry in index.stamps.values())
    if time.time_ns() - newest < _SETTLED_NS:
        return False
    body = {
        "classes": index.classes,
        "folders": [os.fsdecode(name) for name in index.files.folders],
        "fingerprints": [[f.digest, f.kind] for f in (index.train_fingerprint, index.val_fingerprint)],
        "native_size": index.native_size,
        "gaps": index.gaps,
        "notes": index.notes,
        "stamps": [[os.fsdecode(name), *entry] for name, entry in index.stamps.items()],
    }
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.npz")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(
            temporary,
            body=np.frombuffer(json.dumps(body).encode(), np.uint8),
            folder=index.files.folder,
            names=index.files.names,
            ends=index.files.ends,
            **{name: getattr(index, name) for name in _ARRAYS},
        )
        temporary.replace(path)
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    return True


def read(path: Path, root: Path) -> Index | None:
    """Read the index at ``path`` of the folder ``root``. None if it does not exist, is damaged, or no longer valid."""
    try:
        # Opened here, because numpy 2.4 does not close its own handle of a damaged file.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            body: dict[str, Any] = json.loads(arrays["body"].tobytes())
            folders = [os.fsencode(name) for name in body["folders"]]
            files = Files(root, folders, arrays["folder"], arrays["names"], arrays["ends"])
            train, val = (Fingerprint(*entry) for entry in body["fingerprints"])
            index = Index(
                classes=tuple(body["classes"]),
                files=files,
                **{name: arrays[name] for name in _ARRAYS},
                train_fingerprint=train,
                val_fingerprint=val,
                gaps=tuple(body["gaps"]),
                notes=tuple(body["notes"]),
                native_size=tuple(body["native_size"]) if body["native_size"] else None,
                stamps={os.fsencode(name): tuple(entry) for name, *entry in body["stamps"]},
            )
    except Exception:  # noqa: BLE001 - a damaged file can fail in zipfile, numpy or json; it is made again
        return None
    return index if _holds(index) else None


def _holds(index: Index) -> bool:
    root = os.fsencode(index.files.root)
    try:
        if any(stamp(os.path.join(root, name)) != entry for name, entry in index.stamps.items()):  # noqa: PTH118
            return False
    except UserError:
        return False
    count = len(index.files)
    for row in np.random.default_rng().choice(count, min(LOOKED_AT, count), replace=False).tolist():
        try:
            status = index.files[row].stat()
            found = (status.st_size, status.st_mtime_ns)
        except OSError:
            found = (NO_SIZE, 0)
        if found != (index.sizes[row], index.times[row]):
            return False
    return True
