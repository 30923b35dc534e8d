"""Writes nodes, layers and constants into a traced module, in the place of a node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from optimize.tracing.constants import constant_value
from optimize.tracing.naming import free_name


class Writer:
    """Writes nodes at the graph's insertion point, and layers and tensors under one name."""

    def __init__(self, module: fx.GraphModule, name: str) -> None:
        self.module, self.name = module, name

    def function(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Write a function call."""
        return self.module.graph.call_function(function, args, kwargs)

    def method(self, name: str, *args: Any) -> fx.Node:
        """Write a method call on the first argument."""
        return self.module.graph.call_method(name, args)

    def linear(self, name: str, given: fx.Node, weight: torch.Tensor, bias: torch.Tensor | None) -> fx.Node:
        """Write a linear layer with copies of these weights, ``(out, in)`` and ``(out,)``."""
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
        layer.weight = nn.Parameter(weight.detach().clone())
        if bias is not None:
            layer.bias = nn.Parameter(bias.detach().clone())
        return self._layer(name, layer, given)

    def softmax(self, scores: fx.Node, dropout: float = 0.0) -> fx.Node:
        """Write the softmax of attention scores, and a dropout for training."""
        return self.dropout(self.function(functional.softmax, scores, dim=-1), dropout, "attention_dropout")

    def dropout(self, given: fx.Node, share: float, name: str = "dropout") -> fx.Node:
        """Write a dropout, if its share is not 0."""
        return self._layer(name, nn.Dropout(share), given) if share else given

    def constant(self, name: str, value: torch.Tensor, *, trained: bool = True) -> fx.Node:
        """Write a read of a tensor that the model owns. A ``trained`` one is a parameter."""
        owner = self.module.get_submodule(self.name)
        if trained:
            owner.register_parameter(name, nn.Parameter(value.detach().clone()))
        else:
            owner.register_buffer(name, value)
        return self.module.graph.get_attr(f"{self.name}.{name}")

    def _layer(self, name: str, layer: nn.Module, given: fx.Node) -> fx.Node:
        self.module.add_submodule(f"{self.name}.{name}", layer)
        return self.module.graph.call_module(f"{self.name}.{name}", (given,))


def replace(node: fx.Node, answer: fx.Node) -> None:
    """Make all readers of ``node`` read ``answer``, which has the same shape."""
    answer.meta.setdefault("tensor_meta", node.meta.get("tensor_meta"))
    node.replace_all_uses_with(answer)
    node.graph.erase_node(node)


def scaled(bias: torch.Tensor | None, scale: float) -> torch.Tensor | None:
    """Return a bias times ``scale``, and None without a bias."""
    return None if bias is None else bias * scale


def shape_of(node: Any) -> torch.Size | None:
    """Return the shape of a node's tensor for the example, or None if it is no tensor."""
    meta = node.meta.get("tensor_meta") if isinstance(node, fx.Node) else None
    return getattr(meta, "shape", None)


def is_float(operand: Any) -> bool:
    """Tell whether an operand is a float32 tensor. Masks, integers, doubles and complex numbers have no range."""
    return shape_of(operand) is not None and operand.meta["tensor_meta"].dtype == torch.float32


def made_of(node: fx.Node) -> Iterator[fx.Node]:
    """Yield a node, and all nodes from which it is computed."""
    waiting, met = [node], {node}
    while waiting:
        found = waiting.pop()
        yield found
        before = [given for given in found.all_input_nodes if given not in met]
        met.update(before)
        waiting += before


def computed(factor: Any) -> bool:
    """Tell whether a node depends on the images."""
    return isinstance(factor, fx.Node) and any(node.op == "placeholder" for node in made_of(factor))


def fold_constants(module: fx.GraphModule) -> int:
    """Compute all values that do not depend on the images, such as a table of positions for scores, in place.

    Returns:
        The number of computations replaced by tensors. Float tensors become parameters.
    """
    depends: set[fx.Node] = set()
    for node in module.graph.nodes:
        if node.op == "placeholder" or any(before in depends for before in node.all_input_nodes):
            depends.add(node)
    folded = 0
    for node in list(module.graph.nodes):
        if node in depends or node.op in ("get_attr", "output") or not any(user in depends for user in node.users):
            continue
        with torch.no_grad():
            value = constant_value(module, node)
        if not isinstance(value, torch.Tensor):
            continue
        name = free_name(module, f"constant_{node.name}")
        if value.is_floating_point():
            module.register_parameter(name, nn.Parameter(value.detach().clone()))
        else:
            module.register_buffer(name, value)
        with module.graph.inserting_before(node):
            replace(node, module.graph.get_attr(name))
        folded += 1
    return folded
