"""Keeps attention scores in float: all operators between a product or a layer and a softmax.

A softmax is exponential in its scores, so a step of their range is an error of the share. Operators that add a position
or a mask gain nothing from integers. TensorRT's documentation ("Explicit Quantization") and ONNX Runtime's own
quantizer of transformers also leave them in float. The resulting shares are integers again, with their own range.
"""

from __future__ import annotations

import operator

import torch
from torch import fx, nn
from torch.nn import functional

from optimize.quantization.graph.nodes import SUMS, called_function, called_module, is_watcher, remove_watcher

_SOFTMAX = (functional.softmax, torch.softmax, "softmax")
#: Operators that combine scores with constants or masks.
_ARITHMETIC = frozenset(
    {
        *SUMS,
        *(operator.sub, operator.mul, operator.imul, operator.truediv, torch.sub, torch.mul, torch.div),
        *("sub", "mul", "mul_", "div", "div_", "masked_fill", "masked_fill_"),
    }
)
_BETWEEN = _ARITHMETIC | {"view", "reshape", "unsqueeze", "squeeze", "contiguous", "float", "type_as"}


def call_softmax(module: fx.GraphModule) -> None:
    """Write each softmax module as a function call, in place.

    torch.ao (2.11 to 2.14) rounds the output of the module to steps of 1/256, whatever its range. With 200 tokens of
    equal weight, a share is one step. The output of the function gets the observed range.
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
    """Remove observers between a softmax and the operator that gives its scores, in place.

    That operator is a product of two activations, or a layer if anything is computed between the two.

    Args:
        prepared: with observers or fake-quantize modules.

    Returns:
        The number of observers removed.
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
    """Return the observers from a node back to its source, and whether more than one layer's output lies behind it."""
    if len(given.users) != 1:
        return [], False
    if is_watcher(prepared, given):
        source = given.all_input_nodes[0]
        if source.op == "get_attr":  # a constant of positions or a mask
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
