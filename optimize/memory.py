"""Memory of large networks, which Python's collector does not see: it counts objects, and not their bytes."""

from __future__ import annotations

import gc
from typing import Final

#: Bytes of weights from which a collection, some tenths of a second, is worth it.
_LARGE: Final = 1 << 28


def collect(size: int) -> None:
    """Free what lies in cycles, as traced networks and programs do, where it is of so many bytes that it counts."""
    if size >= _LARGE:
        gc.collect()
