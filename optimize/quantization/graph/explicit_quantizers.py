"""Reading a network with explicit quantizers: which nodes quantize, and which only move numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.ao.quantization.fx._decomposed  # registers torch.ops.quantized_decomposed
from torch import fx

_ATEN = torch.ops.aten

#: What moves numbers and changes none, in eval mode.
MOVES = frozenset(
    {
        *(getattr(_ATEN, name).default for name in ("view", "reshape", "_unsafe_view", "squeeze", "unsqueeze", "t")),
        *(getattr(_ATEN, name).default for name in ("dropout", "alias", "clone", "contiguous", "permute")),
        *(_ATEN.flatten.using_ints, _ATEN.unflatten.int, _ATEN.squeeze.dim, _ATEN.squeeze.dims, _ATEN.transpose.int),
    }
)


def quantizing(node: Any) -> str:
    """Name of a node's operator, if it is one of those that quantize and dequantize; else ''."""
    target = node.target if isinstance(node, fx.Node) else None
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "quantized_decomposed":
        return target._schema.name.split("::")[1]
    return ""


def quantizers(module: fx.GraphModule, operator: str) -> Iterator[fx.Node]:
    """The nodes of a program that quantize or dequantize by this operator; they may be erased meanwhile."""
    return (node for node in list(module.graph.nodes) if quantizing(node) == operator)


def moved(node: Any) -> Any:
    """What a node's numbers are of: the node behind those that only move them."""
    while isinstance(node, fx.Node) and node.target in MOVES:
        node = node.args[0]
    return node
