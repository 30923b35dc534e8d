"""SHA-256 of files, remembered for as long as nobody has touched them: a run of 300 MB costs half a second to read."""

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

#: The kernel's clock for files ticks up to a hundred times a second. Two changes within a tick look like one.
_TICK_NS: Final = 20_000_000
#: Files that this process did not ask for are dropped when there are so many.
_MOST: Final = 16_384


class Hashes:
    """Hashes of files by what the kernel tells of them. To be used from one thread.

    A file counts as untouched while its device, inode, size and times are those that it had when it was hashed. The
    time of its last change of any kind (``st_ctime``) cannot be set by a program, and so a file whose bytes were
    changed is hashed again. What the disk itself loses is not seen: `optimize verify` reads every byte.

    Args:
        path: where they are kept from one run to the next. A file that is damaged counts as none.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, list[int | str]] | None = None
        self._used: set[str] = set()
        self._news = False

    def of(self, path: Path) -> str:
        """SHA-256 of a regular file, in hexadecimal.

        Raises:
            OSError: it cannot be read.
        """
        found = path.stat()
        if (known := self._remembered(found)) is not None:
            return known
        if 0 < (early := found.st_ctime_ns + _TICK_NS - time.time_ns()) <= _TICK_NS:
            time.sleep(early / 1e9)  # or a change while it is hashed might not be seen later
        digest = sha256_file(path)
        self._remember(found, digest)
        return digest

    @contextlib.contextmanager
    def unchanged(self, path: Path) -> Iterator[None]:
        """What the block does to a file is not to its bytes: a hard link to it is one more change of any kind."""
        before = self._remembered(path.stat())
        yield
        if before is not None:
            self._remember(path.stat(), before)

    def save(self) -> None:
        """Keep what was hashed since, if anything was; where that fails it is hashed again."""
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
