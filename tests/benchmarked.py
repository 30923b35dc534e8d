"""Benchmarks that bring passes of peers, which the project does not have: for a while, and nothing of them stays."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from optimize.passes import base


@contextmanager
def benchmark(name: str) -> Iterator[ModuleType]:
    """The benchmark; at the end its passes are gone, and its modules, so that whoever imports them registers them."""
    own, there = dict(base._REGISTRY.all()), set(sys.modules)
    try:
        yield importlib.import_module(name)
    finally:
        base._REGISTRY._entries = own
        for each in [each for each in sys.modules if each.startswith("benchmarks.") and each not in there]:
            del sys.modules[each]
