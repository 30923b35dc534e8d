"""Finds the nodes of a network with explicit quantizers that quantize, and those that only move values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.ao.quantization.fx._decomposed  # registers torch.ops.quantized_decomposed
from torch import fx

_ATEN = torch.ops.aten

#: Operators that move values and do not change them, in eval mode.
MOVES = frozenset(
    {
        *(getattr(_ATEN, name).default for name in ("view", "reshape", "_unsafe_view", "squeeze", "unsqueeze", "t")),
        *(getattr(_ATEN, name).default for name in ("dropout", "alias", "clone", "contiguous", "permute")),
        *(_ATEN.flatten.using_ints, _ATEN.unflatten.int, _ATEN.squeeze.dim, _ATEN.squeeze.dims, _ATEN.transpose.int),
    }
)


def quantizing(node: Any) -> str:
    """Return the name of a node's operator if it quantizes or dequantizes, else ''."""
    target = node.target if isinstance(node, fx.Node) else None
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "quantized_decomposed":
        return target._schema.name.split("::")[1]
    return ""


def quantizers(module: fx.GraphModule, operator: str) -> Iterator[fx.Node]:
    """Return the nodes of a program that quantize or dequantize with this operator. They may be erased meanwhile."""
    return (node for node in list(module.graph.nodes) if quantizing(node) == operator)


def moved(node: Any) -> Any:
    """Return the source of a node's values: the first node before it that does not only move values."""
    while isinstance(node, fx.Node) and node.target in MOVES:
        node = node.args[0]
    return node
