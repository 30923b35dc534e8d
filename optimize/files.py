"""Writing files so that a reader sees the old one or the new one, and never a part."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any


def write_atomically(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path``, whose folder must exist."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(value: Any, path: Path) -> None:
    """Write ``value`` as indented JSON.

    Raises:
        ValueError: a number is NaN or infinite, which JSON cannot hold; ``path`` is left as it was.
    """
    write_atomically(path, (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())
