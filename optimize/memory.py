"""Frees the memory of large networks. Python's collector does not do it in time: it counts objects, not bytes."""

from __future__ import annotations

import gc
from typing import Final

#: Bytes of weights that make a collection worth its time (some tenths of a second).
_LARGE: Final = 1 << 28


def collect(size: int) -> None:
    """Collect reference cycles, such as those of traced networks and programs, if ``size`` bytes are worth it."""
    if size >= _LARGE:
        gc.collect()
