"""The stream of a transformer in float: what its blocks add up, which norms read and nothing in integers does.

Of trained transformers a few channels of that sum are far larger than the others, so that steps of its range are coarse
for the rest (Bondarenko, Nagel and Blankevoort, "Understanding and Overcoming the Challenges of Efficient Transformer
Quantization", EMNLP 2021, section 3); and each block rounds it once more. Integers win nothing there: a layer norm is
computed in float, and rounded behind it for the layers that read it.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from optimize.quantization.graph.nodes import (
    SUMS,
    called_function,
    is_layer_norm,
    is_watcher,
    leads_to,
    only_moves,
    remove_watcher,
)

_PRODUCTS = (operator.mul, operator.imul, torch.mul, "mul", "mul_")


def free_stream(prepared: fx.GraphModule) -> int:
    """Take away what watches sums that norms read, and nothing in integers, in place.

    Args:
        prepared: with observers or fake-quantize modules.

    Returns:
        How many watchers were taken away.
    """
    floats = {
        node
        for node in prepared.graph.nodes
        if is_watcher(prepared, node) and _on_the_way(prepared, node.all_input_nodes[0])
    }
    # A sum that is rounded for a reader is one of integers: the linter's `residual-in-float` says why.
    while rounded := {node for node in floats if not all(_reads_floats(prepared, user, floats) for user in node.users)}:
        floats -= rounded

    def is_norm(user: fx.Node) -> bool:
        return is_layer_norm(prepared, user)

    def goes_on(user: fx.Node) -> bool:
        return is_watcher(prepared, user) or _on_the_way(prepared, user)

    freed = [node for node in floats if leads_to(node, is_norm, goes_on)]
    for node in freed:
        remove_watcher(prepared, node)
    prepared.recompile()
    return len(freed)


def _on_the_way(prepared: fx.GraphModule, given: fx.Node) -> bool:
    """Whether a node adds, scales by a constant, moves, or is one."""
    if called_function(given) in _PRODUCTS:
        return any(_constant(prepared, factor) for factor in given.all_input_nodes)
    return given.op == "get_attr" or called_function(given) in SUMS or only_moves(prepared, given)


def _constant(prepared: fx.GraphModule, node: fx.Node) -> bool:
    while is_watcher(prepared, node):
        node = node.all_input_nodes[0]
    return node.op == "get_attr"


def _reads_floats(prepared: fx.GraphModule, user: fx.Node, floats: set[fx.Node]) -> bool:
    """Whether a reader needs no integers: a norm, or what is on the way and not rounded itself."""
    if user in floats or is_layer_norm(prepared, user):
        return True
    return _on_the_way(prepared, user) and bool(user.users) and floats.issuperset(user.users)
