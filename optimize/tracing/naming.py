"""Free names for what is added to a traced module, as the network may already use the wanted name."""

from __future__ import annotations

import itertools

from torch import nn


def free_name(module: nn.Module, wanted: str) -> str:
    """Return a dotted path that a module does not use: the wanted one, or the first free one with a number appended.

    The same module always gives the same name. Code that rebuilds a network relies on that to find its weights by name.

    Args:
        module: holds all parts of the path but the last.
        wanted: the wanted path, such as ``layer1.conv_norm``.
    """
    owner, _, _ = wanted.rpartition(".")
    holder, dot = module.get_submodule(owner), f"{owner}." if owner else ""
    names = itertools.chain([wanted], (f"{wanted}_{number}" for number in itertools.count(1)))
    return next(name for name in names if not hasattr(holder, name.removeprefix(dot)))
