"""Writes files so that a reader sees the old file or the new one, never a part."""

from __future__ import annotations

import json
import os
import re
import uuid
from pathlib import Path
from typing import Any

from serve.runtime.errors import UserError

#: Names of files that do not have their final name yet. A killed process leaves them behind.
TEMPORARY = re.compile(r"\..+\.[0-9a-f]{32}")


def temporary_for(path: Path) -> Path:
    """Return a new name beside ``path``. Write to it, then move it to ``path``."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}")


def write_atomically(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path``, and create its folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_for(path)
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # some disks report only here that they are full
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def check_writable(folder: Path) -> None:
    """Check that a folder can be written or created, before any work is done for it.

    Raises:
        UserError: it cannot. The message names the obstacle.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise UserError(f"{folder} cannot be written: {there} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"{folder} cannot be written: no permission to write in {there}")


def write_json(value: Any, path: Path) -> None:
    """Write ``value`` as indented JSON.

    Raises:
        ValueError: a number is NaN or infinite, which JSON cannot hold. ``path`` is left unchanged.
    """
    write_atomically(path, (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())
