"""Writing files so that a reader sees the old one or the new one, and never a part."""

from __future__ import annotations

import json
import os
import re
import uuid
from pathlib import Path
from typing import Any

from serve.runtime.errors import UserError

#: Names of the files that are written before they get their real name; a process that is killed leaves them.
TEMPORARY = re.compile(r"\..+\.[0-9a-f]{32}")


def temporary_for(path: Path) -> Path:
    """A new name beside ``path``, to write to and then move to ``path``."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}")


def write_atomically(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path``, whose folder is made if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_for(path)
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # the disk may only be found full here
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def check_writable(folder: Path) -> None:
    """See that files can be written into a folder, or that it can be made, before anything is worked out for it.

    Raises:
        UserError: they cannot; what is in the way is named.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise UserError(f"{folder} cannot be written: {there} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"{folder} cannot be written: no permission to write in {there}")


def write_json(value: Any, path: Path) -> None:
    """Write ``value`` as indented JSON.

    Raises:
        ValueError: a number is NaN or infinite, which JSON cannot hold; ``path`` is left as it was.
    """
    write_atomically(path, (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())
