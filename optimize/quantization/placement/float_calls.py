"""Keeps calls in float for which torch.ao (2.11 to 2.14) has no output range, or which it cannot observe."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from optimize.quantization.graph.editing import is_float, replace, shape_of
from optimize.quantization.graph.nodes import SUMS, TOGETHER, called_function, called_module
from optimize.tracing.naming import free_name

_MAXIMA = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)


class InFloat(nn.Module):
    """Calls a function, from a class for which torch.ao has no kernel.

    Args:
        function: the function to call.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **settings: Any) -> Any:
        """Return the function's result."""
        return self.function(*args, **settings)


def call_in_float(module: fx.GraphModule, node: fx.Node) -> None:
    """Keep a call of a function or of a tensor's method in float, in place."""
    name = free_name(module, f"{node.name}_in_float")
    function = getattr(torch.Tensor, node.target) if isinstance(node.target, str) else node.target
    module.add_submodule(name, InFloat(function))
    with module.graph.inserting_before(node):
        replace(node, module.graph.create_node("call_module", name, node.args, node.kwargs))


def free_maxima(module: fx.GraphModule) -> int:
    """Keep max pools in float that torch.ao (2.11 to 2.14) cannot observe, in place.

    A pool over padding with minus infinity (timm's ``MaxPool2dSame``) has no range. A pool that returns indices (for
    ``MaxUnpool2d``) gives a pair.

    Args:
        module: traced.

    Returns:
        The number of pools kept in float.
    """
    freed = 0
    for node in list(module.graph.nodes):
        layer = called_module(module, node)
        if isinstance(layer, _MAXIMA):
            if layer.return_indices or _over_infinity(node):
                module.set_submodule(str(node.target), InFloat(layer.forward))
                freed += 1
        elif node.target is functional.max_pool2d and _over_infinity(node):
            call_in_float(module, node)
            freed += 1
    module.recompile()
    return freed


def free_masks(module: fx.GraphModule) -> int:
    """Keep calls on masks and integers in float, in place. torch.ao (2.11 to 2.14) would observe some of them.

    These are calls that join them with float tensors, and calls that return masks or integers.

    Args:
        module: traced, with the shapes that `note_shapes` notes.

    Returns:
        The number of calls kept in float.
    """
    freed = []
    for node in module.graph.nodes:
        floats = [is_float(given) for given in (*node.all_input_nodes, node) if shape_of(given) is not None]
        together = node.target in TOGETHER and not all(floats)
        if called_function(node) is not None and len(floats) > 1 and (together or not any(floats)):
            freed.append(node)
    for node in freed:
        call_in_float(module, node)
    module.recompile()
    return len(freed)


def free_sizes(module: fx.GraphModule) -> int:
    """Keep sums of shapes from being observed as sums of tensors, in place. torch.ao (2.11 to 2.14) would do that.

    An example is ``x.shape[:2] + (-1,)``.

    Args:
        module: traced, with the types that `note_shapes` notes.

    Returns:
        The number of calls changed.
    """
    nodes = [node for node in module.graph.nodes if node.op == "call_function" and node.target in SUMS]
    freed = [node for node in nodes if issubclass(node.meta.get("type", torch.Tensor), tuple)]
    for node in freed:
        call_in_float(module, node)
    module.recompile()
    return len(freed)


def free_quotients(module: fx.GraphModule) -> int:
    """Keep divisions that round down in float, in place. torch.ao (2.11 to 2.14) takes them for divisions of sizes.

    Args:
        module: traced, with the shapes that `note_shapes` notes.

    Returns:
        The number of divisions kept in float.
    """
    freed = [node for node in module.graph.nodes if node.target is operator.floordiv and is_float(node)]
    for node in freed:
        call_in_float(module, node)
    module.recompile()
    return len(freed)


def _over_infinity(node: fx.Node) -> bool:
    before = node.all_input_nodes[0]
    values = (*before.args[2:], *before.kwargs.values())
    return before.target is functional.pad and any(value == -math.inf for value in values)
