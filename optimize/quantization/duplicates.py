"""What is moved, scaled and quantized alike several times, made one: the exporter does it and the count is off."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import fx

from optimize.export.constants import constant_value
from optimize.quantization.explicit import MOVES, quantizing

_ATEN = torch.ops.aten

#: Operators that read their input and are not asked for anything else, beside those that only move numbers.
_READING = frozenset(
    {_ATEN.expand.default, _ATEN.repeat.default, _ATEN.repeat_interleave.self_int}
    | {_ATEN.select.int, _ATEN.slice.Tensor, _ATEN.sym_size.int}
)
_SCALING = frozenset({_ATEN.mul.Tensor, _ATEN.div.Tensor})


def merge_alike(module: fx.GraphModule) -> None:
    """Quantize once what is moved, scaled and quantized alike several times, as the exporter does.

    GCViT's blocks all read one query, and each moves and scales it for itself; ConViT's have the same places each, as
    constants.
    """
    known: dict[tuple[Any, ...], fx.Node] = {}
    for node in list(module.graph.nodes):
        if node.op == "get_attr" and node.users and all(_only_moves(user) for user in node.users):
            key = content(constant_value(module, node))
        elif _only_moves(node) or _scales(node) or quantizing(node):
            key = (node.target, node.args, tuple(sorted(node.kwargs.items())))
        else:
            continue
        if (first := known.setdefault(key, node)) is not node:
            node.replace_all_uses_with(first)
            module.graph.erase_node(node)
    for node in reversed(module.graph.nodes):
        # A dropout gives the very tensor that it is given: exported again, who reads that one would read the dropout.
        if not node.users and _only_moves(node):
            module.graph.erase_node(node)
    module.recompile()


def _only_moves(node: fx.Node) -> bool:
    return node.target in MOVES or node.target in _READING


def _scales(node: fx.Node) -> bool:
    """Whether it multiplies or divides by a number that stands in the graph."""
    return node.target in _SCALING and len(node.args) == 2 and isinstance(node.args[1], int | float)


def content(constant: torch.Tensor) -> tuple[Any, ...]:
    """What two tensors that are the same have in common."""
    numbers = constant.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return (type(constant), constant.dtype, tuple(constant.shape), hashlib.sha256(numbers).digest())
