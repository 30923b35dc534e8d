"""The network's answer in float where no layer gives it: nobody computes in integers with it.

A sigmoid that a network ends with would be rounded to steps of 1/256, and so equal for all classes but a few; what
averages places or heads, to steps of its range. A layer's own answer is as its kernel gives it.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from optimize.quantization.graph.nodes import called_function, is_watcher, only_moves, remove_watcher
from optimize.quantization.placement.between_layers import has_weights

#: Where the other factor is a number.
_SCALING = (operator.mul, operator.truediv, torch.mul, torch.div, "mul", "div")


def free_answer(prepared: fx.GraphModule) -> int:
    """Take away what watches the answer and is read by nothing else, in place.

    Where it is computed together with a layer (its activation), it stays watched.

    Args:
        prepared: with observers or fake-quantize modules.

    Returns:
        How many watchers were taken away.
    """
    (output,) = prepared.graph.find_nodes(op="output")
    freed: list[fx.Node] = []
    answer, read = output, output.all_input_nodes
    while len(read) == 1 and len(read[0].users) == 1:
        (answer,) = read
        read = answer.all_input_nodes
        if is_watcher(prepared, answer):
            freed.append(answer)
        elif not only_moves(prepared, answer) and called_function(answer) not in _SCALING:
            break
    if has_weights(prepared, answer) or not all(is_watcher(prepared, node) or node.op == "get_attr" for node in read):
        return 0
    for watcher in freed:
        remove_watcher(prepared, watcher)
    prepared.recompile()
    return len(freed)
