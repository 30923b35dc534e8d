"""Means over maps of one place: torch's packed kernel fails on them, and nothing is to be computed.

torch (2.11 to 2.14) lays out the answer of a quantized ``x.mean([2, 3])`` as it does ``x``, and takes the layout of a
map of one place, which is in every order at once, for channels-last: "required rank 4 tensor to use channels_last
format" for an answer of rank 2. Small images end so in networks that take a mean and no pool (MNASNet, ShuffleNet).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from optimize.lint.graph import of_a_map
from optimize.quantization.writing import replace, shape_of


def flatten_places(module: fx.GraphModule) -> int:
    """Replace means over maps ``(N, C, 1, 1)`` by flattening, which gives the same, in place.

    Args:
        module: traced, with the shapes that `note_shapes` notes: the sizes of maps are those of its example.

    Returns:
        How many means were replaced.
    """
    written = 0
    for node in [node for node in module.graph.nodes if node.target in ("mean", torch.mean)]:
        given: Any = node.args[0] if node.args else node.kwargs.get("input")
        axes = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        shape, after = shape_of(given), shape_of(node)
        if shape is None or after is None or len(after) != 2 or not isinstance(axes, tuple | list):
            continue
        if of_a_map(axes, len(shape)) and shape[2:] == (1, 1):
            with module.graph.inserting_before(node):
                replace(node, module.graph.call_function(torch.flatten, (given, 1)))
            written += 1
    module.recompile()
    return written
