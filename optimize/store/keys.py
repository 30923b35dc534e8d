"""Every key of the store, made in one place from named inputs."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def make_key(**parts: Any) -> str:
    """SHA-256 of named JSON values; anything that is not JSON is refused with TypeError."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
