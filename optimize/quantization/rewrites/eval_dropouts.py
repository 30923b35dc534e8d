"""Removes dropouts. They do nothing in eval mode and must get no observer.

FX (2.11 to 2.14) gives a dropout that reads no integers the range of the nearest node that does. An example is the
input of a pool in float, or of a GELU.
"""

from __future__ import annotations

from torch import fx
from torch.nn import functional

from optimize.quantization.graph.nodes import called_module
from optimize.quantization.targets import DROPOUTS


def drop_dropouts(module: fx.GraphModule) -> int:
    """Remove dropouts, in place.

    Args:
        module: traced, in eval mode.

    Returns:
        The number of dropouts removed.
    """
    found = [
        node
        for node in module.graph.nodes
        if node.target is functional.dropout or isinstance(called_module(module, node), DROPOUTS)
    ]
    for node in found:
        node.replace_all_uses_with(node.all_input_nodes[0])
        module.graph.erase_node(node)
    module.delete_all_unused_submodules()
    module.recompile()
    return len(found)
