"""Finds and removes what a store no longer needs: unfinished work, and objects without a run, server or program."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from optimize.store.locks import is_free, unshared
from optimize.store.objects import MANIFEST, Store
from serve.common import layout
from serve.runs import sealed_files
from serve.runtime.errors import UserError
from serve.torchserve import server


@dataclass(frozen=True)
class Prunable:
    """Objects that nothing needs.

    Attributes:
        objects: folders of the objects and of unfinished work, each with its description if it is known.
        size: bytes that removing them frees. A file that a run also links frees nothing.
        kept: why objects that no run names are kept, one line each.
    """

    objects: Mapping[Path, str]
    size: int
    kept: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return one line for each model with its data: the kinds of its objects, with a count if there are several."""
        found: dict[str, Counter[str]] = {}
        for about in self.objects.values():
            origin, _, what = (about or "of unknown origin: objects").partition(": ")
            found.setdefault(origin, Counter())[what] += 1
        return [
            f"{origin}: {', '.join(what if count == 1 else f'{what} ({count})' for what, count in counts.items())}"
            for origin, counts in sorted(found.items())
        ]


def prunable(store: Store) -> Prunable:
    """Return what `prune` would remove now.

    Raises:
        UserError: a live program uses the store, or a run's ``objects.json`` cannot be read.
    """
    with unshared(store.in_use) as alone:
        return _prunable(store, alone=alone)


def prune(store: Store, agreed: Prunable) -> Prunable:
    """Remove what was agreed to, unless a run needs it by now, and remove locks that nobody holds.

    Returns:
        What was removed.

    Raises:
        UserError: as in `prunable`.
    """
    with unshared(store.in_use) as alone:
        present = _prunable(store, alone=alone)
        doomed = {folder: about for folder, about in present.objects.items() if folder in agreed.objects}
        removed = Prunable(doomed, _freed(doomed), present.kept)
        for folder in doomed:
            shutil.rmtree(folder, ignore_errors=True)
        for lock in store.lock_files():  # one for each object that was ever requested; nobody waits for one now
            if is_free(lock):
                lock.unlink(missing_ok=True)
    return removed


def _prunable(store: Store, *, alone: bool) -> Prunable:
    if not alone:
        raise UserError(
            f"a run or a Python program is using the store {store.root}; prune it when that has ended (in Python: "
            "when its variants are deleted)"
        )
    wanted: set[str] = set()
    for path in store.root.glob(f"*/{layout.OBJECTS_FILE}"):
        try:
            wanted.update(_listed(path))
        except (ValueError, TypeError, UserError):
            raise UserError(
                f"{path} is damaged; run the command that made {path.parent.name} again, or remove {path.parent}"
            ) from None
    served = server.running(store.root)
    archives = served.archives if served else frozenset()
    found = {folder for folder in sorted(store.objects.iterdir()) if folder.name not in wanted}
    kept = {folder for folder in found if any((folder / name).is_file() for name in archives)}
    objects = {folder: _about(folder) for folder in sorted(found - kept)}
    objects |= dict.fromkeys(store.unfinished_work(), "unfinished: interrupted training")
    runs = ", ".join(served.runs) if served else ""
    reason = (f"{len(kept)} archives stay: a server is serving them (run {runs})",) if kept else ()
    return Prunable(objects, _freed(objects), reason)


def _listed(path: Path) -> list[str]:
    """Return the keys that a run's ``objects.json`` names.

    Raises:
        ValueError: it cannot be read, or was changed.
        TypeError: it is not a list.
        UserError: the seal that would show a change is damaged.
    """
    folder, content = path.parent, path.read_text(encoding="utf-8")
    if os.path.lexists(folder / layout.SEAL_FILE):  # older versions did not seal it
        sealed_files.require(folder, path.name)
    return [*json.loads(content)]


def _freed(folders: Mapping[Path, str]) -> int:
    """Return the bytes of the files without a name outside ``folders``: objects share files, and runs link to them."""
    stats = [path.stat() for folder in folders for path in folder.iterdir()]
    names = Counter((stat.st_dev, stat.st_ino) for stat in stats)
    whole = {(stat.st_dev, stat.st_ino): stat for stat in stats if stat.st_nlink == names[stat.st_dev, stat.st_ino]}
    return sum(stat.st_size for stat in whole.values())


def _about(folder: Path) -> str:
    try:
        return str(json.loads((folder / MANIFEST).read_text(encoding="utf-8")).get("about", ""))
    except (OSError, ValueError, AttributeError):
        return ""
