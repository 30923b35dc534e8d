"""SHA-256 of files, cached until the file changes: to read a run of 300 MB takes half a second."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from optimize.store.atomic_files import write_atomically
from serve.runtime.card.card import sha256_file
from serve.runtime.card.json_documents import sealed, unsealed

#: The kernel's clock for file times ticks up to a hundred times a second. Two changes within a tick look like one.
_TICK_NS: Final = 20_000_000
#: If there are more entries than this, those that this process did not use are dropped.
_MOST: Final = 16_384


class Hashes:
    """Caches hashes of files by the file's metadata. Use it from one thread.

    A file counts as unchanged while its device, inode, size and times are those of its last hashing. A program cannot
    set the time of a file's last change of any kind (``st_ctime``), so a file with changed bytes is always hashed
    again. Damage by the disk itself is not noticed: `optimize verify` reads every byte.

    Args:
        path: the file that keeps the hashes between runs. A damaged file is ignored.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, list[int | str]] | None = None
        self._used: set[str] = set()
        self._news = False

    def of(self, path: Path) -> str:
        """Return the SHA-256 of a regular file in hexadecimal.

        Raises:
            OSError: the file cannot be read.
        """
        found = path.stat()
        if (known := self._remembered(found)) is not None:
            return known
        if 0 < (early := found.st_ctime_ns + _TICK_NS - time.time_ns()) <= _TICK_NS:
            time.sleep(early / 1e9)  # without this, a change during the hashing might go unnoticed
        digest = sha256_file(path)
        self._remember(found, digest)
        return digest

    @contextlib.contextmanager
    def unchanged(self, path: Path) -> Iterator[None]:
        """Keep the file's hash although the block changes its metadata: a new hard link changes ``st_ctime``."""
        before = self._remembered(path.stat())
        yield
        if before is not None:
            self._remember(path.stat(), before)

    def save(self) -> None:
        """Write new hashes to the file. If that fails, the files are hashed again next time."""
        if not self._news:
            return
        known = self._read()
        kept = known if len(known) <= _MOST else {place: known[place] for place in self._used}
        with contextlib.suppress(OSError):
            write_atomically(self._path, json.dumps(sealed({"files": kept})).encode())
            self._news = False

    def _remembered(self, found: os.stat_result) -> str | None:
        known = self._read().get(_place(found))
        if known is None or known[:-1] != _signs(found):
            return None
        self._used.add(_place(found))
        return str(known[-1])

    def _remember(self, found: os.stat_result, digest: str) -> None:
        self._read()[_place(found)] = [*_signs(found), digest]
        self._used.add(_place(found))
        self._news = True

    def _read(self) -> dict[str, list[int | str]]:
        if self._known is None:
            try:
                self._known = dict(unsealed(self._path.read_text(encoding="utf-8"))["files"])
            except (OSError, ValueError, KeyError, TypeError):
                self._known = {}
        return self._known


def _place(found: os.stat_result) -> str:
    return f"{found.st_dev}:{found.st_ino}"


def _signs(found: os.stat_result) -> list[int | str]:
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns]
