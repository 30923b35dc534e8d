"""The scores of attention in float: what is computed between a product, or a layer, and a softmax is not quantized.

A softmax is exponential in its scores: a step of their range is an error of the share, and none of what adds a position
or a mask to them gains from integers. TensorRT's documentation ("Explicit Quantization") and ONNX Runtime's own
quantizer of transformers leave them in float, too. The shares that it gives are integers again, of the range that they
have.
"""

from __future__ import annotations

import operator

import torch
from torch import fx, nn
from torch.nn import functional

from optimize.quantization.graph.nodes import SUMS, called_function, called_module, is_watcher, remove_watcher

_SOFTMAX = (functional.softmax, torch.softmax, "softmax")
#: What computes with scores on their way, with constants or masks.
_ARITHMETIC = frozenset(
    {
        *SUMS,
        *(operator.sub, operator.mul, operator.imul, operator.truediv, torch.sub, torch.mul, torch.div),
        *("sub", "mul", "mul_", "div", "div_", "masked_fill", "masked_fill_"),
    }
)
_BETWEEN = _ARITHMETIC | {"view", "reshape", "unsqueeze", "squeeze", "contiguous", "float", "type_as"}


def call_softmax(module: fx.GraphModule) -> None:
    """Make each softmax that is a module a function's call, in place.

    What the module gives, torch.ao (2.11 to 2.14) rounds to steps of 1/256 whatever it is: of 200 tokens that are
    looked at alike, a share is one step. What the function gives has the range that is seen.
    """
    for node in list(module.graph.nodes):
        called = called_module(module, node)
        if type(called) is nn.Softmax:
            with module.graph.inserting_before(node):
                call = module.graph.call_function(functional.softmax, node.args, {**node.kwargs, "dim": called.dim})
            call.meta = node.meta
            node.replace_all_uses_with(call)
            module.graph.erase_node(node)


def free_scores(prepared: fx.GraphModule) -> int:
    """Take away what watches tensors between a softmax and what gives its scores, in place.

    That is a product of two activations, or a layer where anything is computed between.

    Args:
        prepared: with observers or fake-quantize modules.

    Returns:
        How many watchers were taken away.
    """
    freed: list[fx.Node] = []
    for node in prepared.graph.nodes:
        if called_function(node) in _SOFTMAX:
            found, reached = _before(prepared, node.all_input_nodes[0])
            freed += found if reached else []
    freed = list(dict.fromkeys(freed))
    for watcher in freed:
        remove_watcher(prepared, watcher)
    prepared.recompile()
    return len(freed)


def _before(prepared: fx.GraphModule, given: fx.Node) -> tuple[list[fx.Node], bool]:
    """Watchers from a node back to what it is computed from, and whether that is more than one layer's answer."""
    if len(given.users) != 1:
        return [], False
    if is_watcher(prepared, given):
        source = given.all_input_nodes[0]
        if source.op == "get_attr":  # a position's or a mask's constant
            return [given], False
        found, reached = _before(prepared, source)
        between = called_function(source) in _BETWEEN
        ours = len(source.users) == 1 and (reached or between)
        return ([given, *found] if ours else []), reached
    if given.target is torch.matmul:
        return [], True
    if called_function(given) not in _BETWEEN:
        return [], False
    found, reached = [], called_function(given) in _ARITHMETIC
    for source in given.all_input_nodes:
        more, product = _before(prepared, source)
        found, reached = found + more, reached or product
    return found, reached
