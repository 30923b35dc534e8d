"""What the nodes of a traced network are called once torch.ao has prepared it, which fuses some into one."""

from __future__ import annotations

from torch import fx


def nodes_in(prepared: fx.GraphModule, traced: fx.GraphModule) -> dict[str, str]:
    """For each node of ``traced`` whose value ``prepared`` computes, the node that gives it there.

    A convolution with its norm and its activation becomes one node, called as the convolution, which gives what the
    last of them gave (of a ReLU6, before the range of what follows cuts it); what lay between is not there any more.

    Args:
        prepared: by `optimize.quantization.convert.prepare`.
        traced: what it was made of.
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
