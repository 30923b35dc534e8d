"""Views in torch's packed programs, of what its integer kernels give."""

from __future__ import annotations

from torch import fx


def reshape_views(converted: fx.GraphModule) -> None:
    """Write views as reshapes, in place: what torch's integer kernels give lies channels last (2.11 to 2.14).

    A view of it as rows, which the network can take of its own tensors, would be refused.
    """
    for node in converted.graph.nodes:
        sizes = all(isinstance(size, int | fx.Node | tuple | list) for size in node.args[1:])  # and no type
        if node.op == "call_method" and node.target == "view" and sizes and not node.kwargs:
            node.target = "reshape"
    converted.recompile()
