"""The folders of a user's files that the project can make again: downloads, indexes, pixels."""

from __future__ import annotations

import os
from pathlib import Path

from serve.runtime.errors import UserError


def cache_folder(kind: str) -> Path:
    """Return ``$XDG_CACHE_HOME/optimize-and-serve/<kind>``, or the same below ``~/.cache``. It may not exist.

    Raises:
        UserError: there is no home folder.
    """
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError:  # neither HOME nor an entry in /etc/passwd
        raise UserError("this user has no home folder: set XDG_CACHE_HOME to a folder for caches") from None
    return base / "optimize-and-serve" / kind
