"""What was found out of source files, kept from one process to the next in the user's cache folder.

Tokenising and parsing the project's 400 files takes two seconds of processor time, and a file says the same each time.
An entry is kept under the hash of all that it depends on: the file's bytes, its name, Python, and the code that reads
it. The file is sealed; what is damaged, or cannot be written, is as if it were not there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from optimize.data.cache_folders import cache_folder
from optimize.store.atomic_files import write_atomically
from serve.runtime.card.json_documents import sealed, unsealed
from serve.runtime.errors import UserError

#: Entries of files that nobody asks for any more are dropped when there are so many.
_MOST: Final = 4096


class SourceCache:
    """Facts about sources by their hash. To be used from one thread at a time.

    Args:
        reader: the source of the code that finds the facts out.
    """

    def __init__(self, reader: bytes) -> None:
        self._reader = hashlib.sha256(reader + platform.python_version().encode()).hexdigest()
        self._known: dict[str, Any] | None = None
        self._asked: set[str] = set()
        self._news = False

    def fact(self, parts: tuple[bytes, ...], find_out: Callable[[], Any]) -> Any:
        """What is known of a source, as JSON values; found out where it is not.

        Args:
            parts: what the fact depends on, beside the reader.
            find_out: finds it; what it raises is not kept.
        """
        key = hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).hexdigest()
        if self._known is None:
            self._known = self._read()
        self._asked.add(key)
        if key not in self._known:
            self._known[key] = find_out()
            self._news = True
        return self._known[key]

    def save(self) -> None:
        """Write what was found out since, if anything was."""
        if not self._news or self._known is None or (path := self._path()) is None:
            return
        kept = self._known if len(self._known) <= _MOST else {key: self._known[key] for key in self._asked}
        with contextlib.suppress(OSError):
            write_atomically(path, json.dumps(sealed({"facts": kept})).encode())
            self._news = False

    def _read(self) -> dict[str, Any]:
        path = self._path()
        try:
            return dict(unsealed(path.read_text(encoding="utf-8"))["facts"]) if path is not None else {}
        except (OSError, ValueError, KeyError):
            return {}

    def _path(self) -> Path | None:
        try:
            return cache_folder("sources") / f"{self._reader[:16]}.json"
        except UserError:  # there is no home
            return None
