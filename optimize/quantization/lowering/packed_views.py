"""Rewrites views of integer kernels' results in torch's packed programs."""

from __future__ import annotations

from torch import fx


def reshape_views(converted: fx.GraphModule) -> None:
    """Write views as reshapes, in place. Results of torch's integer kernels have channels last (2.11 to 2.14).

    The network can view its own tensors as rows. Torch refuses such a view of a channels-last tensor.
    """
    for node in converted.graph.nodes:
        sizes = all(isinstance(size, int | fx.Node | tuple | list) for size in node.args[1:])  # and no type
        if node.op == "call_method" and node.target == "view" and sizes and not node.kwargs:
            node.target = "reshape"
    converted.recompile()
