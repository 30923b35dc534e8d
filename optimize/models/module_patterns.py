"""Selects modules of a network by patterns of their names or classes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from torch import nn

from serve.runtime.errors import did_you_mean


def classes(module: nn.Module) -> dict[str, str]:
    """Return the class name of every submodule by the submodule's name."""
    return {name: type(layer).__name__ for name, layer in module.named_modules() if name}


def matching(modules: Mapping[str, str], pattern: str) -> list[str]:
    """Return the modules whose name (``layer4``, ``features.*.conv``) or class (``Linear``) fits the pattern."""
    return [name for name, kind in modules.items() if fnmatchcase(name, pattern) or fnmatchcase(kind, pattern)]


def around(name: str) -> Iterable[str]:
    """Yield a module's name and those of the modules that contain it, from the inside."""
    parts = name.split(".")
    return (".".join(parts[:length]) for length in range(len(parts), 0, -1))


def unmatched(modules: Mapping[str, str], field: str, patterns: Iterable[str]) -> list[str]:
    """Return a line for each pattern that fits nothing, with the nearest names.

    Args:
        modules: the result of `classes`.
        field: the setting with the patterns, in words.
        patterns: patterns as in `matching`.
    """
    return [
        f"{field}: the model has no module whose name or class is {pattern!r}"
        f"{did_you_mean(pattern, [*modules, *modules.values()])}"
        for pattern in patterns
        if not matching(modules, pattern)
    ]
