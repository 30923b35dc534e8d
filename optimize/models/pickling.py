"""Pickles objects for a process of our own that cannot import the user's code."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from optimize.models.neighbour_modules import is_installed
from optimize.store.sources import PROJECT


def pickled_by_value(value: object) -> bytes:
    """Pickle ``value`` for ``pickle.loads`` in another process.

    Classes and functions of installed libraries and of this project are pickled by name, all others by value.

    Raises:
        Exception: any exception that pickling raises.
    """
    import cloudpickle

    with _by_value():
        body: bytes = cloudpickle.dumps(value)
    return body


@contextmanager
def _by_value() -> Iterator[None]:
    import cloudpickle

    ours = [module for name, module in list(sys.modules.items()) if _is_users(name, module)]
    for module in ours:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in ours:
            cloudpickle.unregister_pickle_by_value(module)


def _is_users(name: str, module: ModuleType) -> bool:
    if name.partition(".")[0] in (*PROJECT, "__main__", "__mp_main__") or name in sys.builtin_module_names:
        return False  # cloudpickle pickles __main__ by value anyway
    file = getattr(module, "__file__", None)
    return isinstance(module, ModuleType) and file is not None and not _is_installed(file)


@functools.cache
def _is_installed(file: str) -> bool:
    """Tell `is_installed` of a module's file. Each object that is pickled asks it of thousands of modules."""
    return is_installed(Path(file).resolve())
