"""The names of a traced network's nodes after torch.ao has prepared it and fused some of them."""

from __future__ import annotations

from torch import fx


def nodes_in(prepared: fx.GraphModule, traced: fx.GraphModule) -> dict[str, str]:
    """Return for each node of ``traced`` whose value ``prepared`` computes the name of the node that gives it there.

    A convolution with its norm and its activation becomes one node with the convolution's name. It gives the value of
    the last of them. For a ReLU6 that is the value before the next range clips it. The values between them no longer
    exist.

    Args:
        prepared: by `optimize.quantization.convert.prepare`.
        traced: the network that was prepared.
    """
    there = {node.name for node in prepared.graph.nodes}
    found = {}
    for node in traced.graph.nodes:
        if node.name not in there or node.op == "output":
            continue
        last = node
        while len(last.users) == 1 and (user := next(iter(last.users))).name not in there:
            last = user
        found[last.name] = node.name
    return found
