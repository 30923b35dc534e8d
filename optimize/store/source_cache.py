"""Caches facts about source files in the user's cache folder, across processes.

Tokenising and parsing the project's 400 files takes two seconds of processor time, with the same result each time. An
entry's key is the hash of everything it depends on: the file's bytes and name, Python's version, and the code that
reads it. The cache file is sealed. A file that is damaged or cannot be written is ignored.
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

#: If there are more entries than this, those that this process did not use are dropped.
_MOST: Final = 4096


class SourceCache:
    """Facts about sources by their hash. Use it from one thread at a time.

    Args:
        reader: the source of the code that computes the facts.
    """

    def __init__(self, reader: bytes) -> None:
        self._reader = hashlib.sha256(reader + platform.python_version().encode()).hexdigest()
        self._known: dict[str, Any] | None = None
        self._asked: set[str] = set()
        self._news = False

    def fact(self, parts: tuple[bytes, ...], find_out: Callable[[], Any]) -> Any:
        """Return a fact about a source as JSON values, and compute it if it is not cached.

        Args:
            parts: the inputs of the fact besides the reader.
            find_out: computes the fact. If it raises, nothing is cached.
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
        """Write new facts to the cache file, if there are any."""
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
        except UserError:  # there is no home folder
            return None
