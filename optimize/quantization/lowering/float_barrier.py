"""Makes OpenVINO compute an operator in float if it would compute it from integers, and wrongly.

OpenVINO (2026.4.1) moves a dequantizer behind sums, means and padding, and computes them from the integers. It moves
none behind the maximum of a tensor and the lowest float. That maximum is the tensor itself, except for minus infinity.
The numbers are then those that the graph means, in every engine. Integer tensors that do not come from a quantizer stay
unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import fx

_LOWEST = "lowest_float"


def keep_floats(module: fx.GraphModule, taken: Callable[[fx.Node], Collection[fx.Node]]) -> int:
    """Put the maximum with the lowest float between nodes and some of their inputs, in place.

    Args:
        module: of a program, with ``aten`` operators.
        taken: gives the inputs of a node that it must read as floats.

    Returns:
        The number of nodes changed.
    """
    found = 0
    for node in list(module.graph.nodes):
        inputs = [given for given in taken(node) if not _is_whole(given)]
        for given in dict.fromkeys(inputs):
            if not hasattr(module, _LOWEST):
                module.register_buffer(_LOWEST, torch.tensor(torch.finfo(torch.float32).min))
            with module.graph.inserting_before(node):
                lowest = module.graph.get_attr(_LOWEST)
                larger = module.graph.call_function(torch.ops.aten.maximum.default, (given, lowest))
            node.replace_input_with(given, larger)
        found += bool(inputs)
    module.recompile()
    return found


def _is_whole(node: fx.Node) -> bool:
    """Tell whether a node is known to give integers or booleans, such as a count or a comparison."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and not value.is_floating_point()
