"""Names of layers in a graph that calls them more than once. Each call after the first is a layer of its own."""

from __future__ import annotations

import re

_CALL = re.compile(r"_call\d+$")


def another_call(layer: str, number: int) -> str:
    """Return the name of a further call of a layer, from the number of its node."""
    return f"{layer}_call{number}"


def called_layer(name: str) -> str:
    """Return the layer behind a name in a graph. For a further call it is the layer of the network."""
    return _CALL.sub("", name)
