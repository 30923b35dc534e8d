"""What OpenVINO would compute from integers, and wrongly, is given floats.

OpenVINO (2026.4.1) moves a dequantizer behind sums, means and borders, and computes them from the integers. Behind the
larger of its input and the lowest float, which is the input (but of minus infinity), none is moved: the numbers are
those that the graph means, in every engine. Whole numbers that are no integers of a quantizer stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import fx

_LOWEST = "lowest_float"


def keep_floats(module: fx.GraphModule, taken: Callable[[fx.Node], Collection[fx.Node]]) -> int:
    """Put the maximum with the lowest float between nodes and some of what they take, in place.

    Args:
        module: a program's, of ``aten`` operators.
        taken: those of a node's inputs that it is to take as floats.

    Returns:
        How many nodes take any so.
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
    """Whether a node is known to give whole numbers or truths, as what is counted or compared."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and not value.is_floating_point()
