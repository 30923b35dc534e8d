"""Dropouts, which do nothing in eval mode, and are not to be watched for it.

FX (2.11 to 2.14) gives one that reads no integers the range of the nearest that are: of what a pool reads that is
computed in float, or of what a GELU reads.
"""

from __future__ import annotations

from torch import fx
from torch.nn import functional

from optimize.quantization.graph.nodes import called_module
from optimize.quantization.targets import DROPOUTS


def drop_dropouts(module: fx.GraphModule) -> int:
    """Take them away, in place.

    Args:
        module: traced, in eval mode.

    Returns:
        How many.
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
