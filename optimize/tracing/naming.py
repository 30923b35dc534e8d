"""Names of what is put into a traced module: a network may have layers of its own that are called alike."""

from __future__ import annotations

import itertools

from torch import nn


def free_name(module: nn.Module, wanted: str) -> str:
    """A dotted path by which a module holds nothing: as it is wanted, or with the first free number behind it.

    Of the same module it is the same each time, so that who rebuilds a network finds its weights by their names.

    Args:
        module: holds all but the path's last part.
        wanted: the path, such as ``layer1.conv_norm``.
    """
    owner, _, _ = wanted.rpartition(".")
    holder, dot = module.get_submodule(owner), f"{owner}." if owner else ""
    names = itertools.chain([wanted], (f"{wanted}_{number}" for number in itertools.count(1)))
    return next(name for name in names if not hasattr(holder, name.removeprefix(dot)))
