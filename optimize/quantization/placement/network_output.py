"""Keeps the network's outputs in float if no layer computes them. Nobody computes with their integers.

A final sigmoid would be rounded to steps of 1/256, and would be equal for all classes but a few. A mean over places or
heads would be rounded to steps of its range. A layer's own output stays as its kernel gives it.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from optimize.quantization.graph.nodes import called_function, is_watcher, only_moves, remove_watcher
from optimize.quantization.placement.between_layers import has_weights

#: Products, if the other factor is a number.
_SCALING = (operator.mul, operator.truediv, torch.mul, torch.div, "mul", "div")


def free_answer(prepared: fx.GraphModule) -> int:
    """Remove observers of the outputs that nothing else reads, in place.

    An output that is fused with a layer (its activation) keeps its observer.

    Args:
        prepared: with observers or fake-quantize modules.

    Returns:
        The number of observers removed.
    """
    (output,) = prepared.graph.find_nodes(op="output")
    freed = [watcher for given in output.all_input_nodes for watcher in _freed(prepared, given)]
    for watcher in freed:
        remove_watcher(prepared, watcher)
    prepared.recompile()
    return len(freed)


def _freed(prepared: fx.GraphModule, given: fx.Node) -> list[fx.Node]:
    """Return the observers of one output that can be removed."""
    freed: list[fx.Node] = []
    answer, read = given, [given]
    while len(read) == 1 and len(read[0].users) == 1:
        (answer,) = read
        read = answer.all_input_nodes
        if is_watcher(prepared, answer):
            freed.append(answer)
        elif not only_moves(prepared, answer) and called_function(answer) not in _SCALING:
            break
    if has_weights(prepared, answer) or not all(is_watcher(prepared, node) or node.op == "get_attr" for node in read):
        return []
    return freed
