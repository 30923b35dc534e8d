"""Where the project keeps files of a user that can be made again: downloads, indexes, pixels."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(kind: str) -> Path:
    """``$XDG_CACHE_HOME/optimize-and-serve/<kind>``, or below ``~/.cache``; it need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "optimize-and-serve" / kind
