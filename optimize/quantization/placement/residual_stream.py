"""Keeps the residual stream of a transformer in float: sums of its blocks that only norms read.

In trained transformers a few channels of that sum are far larger than the others. Steps of its range are then coarse
for the rest. See Bondarenko, Nagel and Blankevoort, "Understanding and Overcoming the Challenges of Efficient
Transformer Quantization", EMNLP 2021, section 3. Each block would also round it once more. Integers gain nothing there:
a layer norm is computed in float, and its output is rounded for the layers that read it.
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
    """Remove observers of sums that norms read and no integer operator reads, in place.

    Args:
        prepared: with observers or fake-quantize modules.

    Returns:
        The number of observers removed.
    """
    floats = {
        node
        for node in prepared.graph.nodes
        if is_watcher(prepared, node) and _on_the_way(prepared, node.all_input_nodes[0])
    }
    # A sum that is rounded for one reader is an integer sum. The linter's `residual-in-float` says why.
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
    """Tell whether a node adds, scales by a constant, moves values, or is a constant."""
    if called_function(given) in _PRODUCTS:
        return any(_constant(prepared, factor) for factor in given.all_input_nodes)
    return given.op == "get_attr" or called_function(given) in SUMS or only_moves(prepared, given)


def _constant(prepared: fx.GraphModule, node: fx.Node) -> bool:
    while is_watcher(prepared, node):
        node = node.all_input_nodes[0]
    return node.op == "get_attr"


def _reads_floats(prepared: fx.GraphModule, user: fx.Node, floats: set[fx.Node]) -> bool:
    """Tell whether a reader needs no integers: a norm, or a node of the stream that is not rounded itself."""
    if user in floats or is_layer_norm(prepared, user):
        return True
    return _on_the_way(prepared, user) and bool(user.users) and floats.issuperset(user.users)
