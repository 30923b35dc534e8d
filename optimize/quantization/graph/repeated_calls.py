"""What a layer is called in a graph that calls it more than once: each call after the first is a layer of its own."""

from __future__ import annotations

import re

_CALL = re.compile(r"_call\d+$")


def another_call(layer: str, number: int) -> str:
    """The name of a further call of a layer, by the number of its node."""
    return f"{layer}_call{number}"


def called_layer(name: str) -> str:
    """The layer that a graph calls by this name: of a further call the one that the network has."""
    return _CALL.sub("", name)
