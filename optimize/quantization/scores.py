"""The scores of attention in float: what lies between a product and the softmax behind it is not quantized.

A softmax is exponential in its scores: a step of their range is an error of the share, and none of what adds a position
or a mask to them gains from integers. TensorRT's documentation ("Explicit Quantization") and ONNX Runtime's own
quantizer of transformers leave them in float, too.
"""

from __future__ import annotations

import operator

import torch
from torch import fx, nn
from torch.nn import functional

from optimize.quantization.watchers import is_watcher, remove_watcher

_SOFTMAX = (functional.softmax, torch.softmax, "softmax")
#: What scores go through on their way, with constants or masks.
_BETWEEN = frozenset(
    {
        *(operator.add, operator.iadd, torch.add, "add", "add_"),
        *(operator.sub, operator.mul, operator.imul, operator.truediv, torch.sub, torch.mul, torch.div),
        *("sub", "mul", "mul_", "div", "div_", "masked_fill", "masked_fill_"),
        *("view", "reshape", "unsqueeze", "squeeze", "contiguous", "float", "type_as"),
    }
)


def free_scores(prepared: fx.GraphModule) -> int:
    """Take away what watches tensors between a product of two activations and a softmax, in place.

    Args:
        prepared: with observers or fake-quantize modules.

    Returns:
        How many watchers were taken away.
    """
    freed: list[fx.Node] = []
    for node in prepared.graph.nodes:
        if _is_softmax(prepared, node):
            found, reached = _before(prepared, node.all_input_nodes[0])
            freed += found if reached else []
    freed = list(dict.fromkeys(freed))
    for watcher in freed:
        remove_watcher(prepared, watcher)
    prepared.recompile()
    return len(freed)


def _before(prepared: fx.GraphModule, given: fx.Node) -> tuple[list[fx.Node], bool]:
    """Watchers from a node back to the products that it is computed from, and whether there is such a product."""
    if len(given.users) != 1:
        return [], False
    if is_watcher(prepared, given):
        source = given.all_input_nodes[0]
        if source.op == "get_attr":  # a position's or a mask's constant
            return [given], False
        found, reached = _before(prepared, source)
        between = source.op != "call_module" and source.target in _BETWEEN
        ours = len(source.users) == 1 and (reached or between)
        return ([given, *found] if ours else []), reached
    if given.target is torch.matmul:
        return [], True
    if given.op == "call_module" or given.target not in _BETWEEN:
        return [], False
    found, reached = [], False
    for source in given.all_input_nodes:
        more, product = _before(prepared, source)
        found, reached = found + more, reached or product
    return found, reached


def _is_softmax(prepared: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_module":
        return type(prepared.get_submodule(str(node.target))) is nn.Softmax
    return node.target in _SOFTMAX
