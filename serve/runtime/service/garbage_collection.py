"""Keeps the garbage collector away from the objects of loaded models and libraries."""

from __future__ import annotations

import gc


def freeze_heap() -> None:
    """Collect now, and exclude the remaining objects from later collections.

    torch and other libraries keep 250,000 objects. CPython 3.11 visits all of them again once enough others exist. No
    thread runs meanwhile, and requests waited 0.1 s for it. Call this after models were opened or closed. It visits the
    excluded objects once more, so that a closed model is freed.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
