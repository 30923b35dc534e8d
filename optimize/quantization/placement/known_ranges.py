"""Keeps operators with a fixed output range in float if their result is joined with other tensors.

torch.ao (2.11 to 2.14) knows the range of a tanh, a sigmoid and a hardsigmoid. Its kernels use it whatever reads the
result, though joined tensors share one range. In float they are rounded by their reader's quantizer.
"""

from __future__ import annotations

import operator
from typing import Any, Final

import torch
from torch import fx, nn
from torch.ao.quantization.fake_quantize import FixedQParamsFakeQuantize
from torch.ao.quantization.observer import FixedQParamsObserver
from torch.nn import functional

from optimize.quantization.graph.in_place_writes import writes
from optimize.quantization.graph.nodes import (
    TOGETHER,
    called_function,
    called_module,
    leads_to,
    remove_watcher,
    what_is_called,
)
from optimize.quantization.placement.between_layers import has_weights
from optimize.tracing.naming import free_name


class FloatTanh(nn.Tanh):
    """A tanh for which torch.ao has no kernel, see the module."""


class FloatSigmoid(nn.Sigmoid):
    """A sigmoid for which torch.ao has no kernel, see the module."""


class FloatHardsigmoid(nn.Hardsigmoid):
    """A hardsigmoid for which torch.ao has no kernel, see the module."""


#: The classes that stay in float.
KNOWN_IN_FLOAT: Final = (FloatTanh, FloatSigmoid, FloatHardsigmoid)
_OPERATORS: Final[dict[Any, type[nn.Module]]] = {
    **dict.fromkeys((nn.Tanh, torch.tanh, functional.tanh, "tanh", "tanh_"), FloatTanh),
    **dict.fromkeys((nn.Sigmoid, torch.sigmoid, functional.sigmoid, "sigmoid", "sigmoid_"), FloatSigmoid),
    **dict.fromkeys((nn.Hardsigmoid, functional.hardsigmoid, "hardsigmoid", "hardsigmoid_"), FloatHardsigmoid),
}
#: Operators whose output has another range than their input. Nothing behind them reads the input's integers.
_OTHERS: Final = frozenset(
    {
        *(operator.add, operator.iadd, operator.sub, operator.mul, operator.imul, operator.truediv, operator.matmul),
        *(torch.add, torch.sub, torch.mul, torch.div, torch.matmul, torch.bmm),
        *("add", "add_", "sub", "mul", "mul_", "div", "matmul", "bmm"),
    }
)


def free_known(module: fx.GraphModule) -> int:
    """Keep operators with a fixed range in float if their result is joined with others, or if they work in place.

    Torch's integer kernels (2.14) have no ``tanh_``.

    Args:
        module: traced, before observers are inserted.

    Returns:
        The number of operators kept in float.
    """
    freed = 0
    for node in list(module.graph.nodes):
        known = _in_float(module, node)
        in_place = isinstance(node.target, str) and node.target.endswith("_")
        if known is None or not (in_place or _put_together(module, node)):
            continue
        name = free_name(module, f"{node.name}_in_float")
        module.add_submodule(name, known)
        with module.graph.inserting_before(node):
            node.replace_all_uses_with(module.graph.call_module(name, (node.all_input_nodes[0],)))
        module.graph.erase_node(node)
        freed += 1
    module.recompile()
    return freed


def free_given(prepared: fx.GraphModule) -> int:
    """Remove observers with a fixed range from the inputs of such operators, in place.

    If no integer operator gives the input, torch.ao (2.11 to 2.14) observes it with the operator's own observer. A GELU
    approximated by a sigmoid has the input ``1.702 * x``. All of it beyond 0 to 1 would be cut off.

    Args:
        prepared: with observers or fake-quantize modules.

    Returns:
        The number of observers removed.
    """
    freed = 0
    for node in list(prepared.graph.nodes):
        if not isinstance(called_module(prepared, node), (FixedQParamsObserver, FixedQParamsFakeQuantize)):
            continue
        if node.users and all(_known(prepared, user) for user in node.users) and not _known(prepared, node.args[0]):
            remove_watcher(prepared, node)
            freed += 1
    prepared.recompile()
    return freed


def _known(module: fx.GraphModule, node: Any) -> bool:
    """Tell whether a node is an operator with a fixed range."""
    return what_is_called(module, node) in _OPERATORS


def _put_together(module: fx.GraphModule, node: fx.Node) -> bool:
    return leads_to(
        node,
        lambda user: called_function(user) in TOGETHER,
        lambda user: called_function(user) not in _OTHERS and not has_weights(module, user),
    )


def _in_float(module: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    """Return a module that computes the same in float, or None if torch.ao knows no range for the node."""
    kind = _OPERATORS.get(what_is_called(module, node))
    if kind is None or _read_afterwards(module, node):
        return None
    return kind()


def _read_afterwards(module: fx.GraphModule, node: fx.Node) -> bool:
    """Tell whether a node overwrites a tensor that a later node may read, by its name or as a view."""
    others = [user for user in node.all_input_nodes[0].users if user is not node]
    # The output of a layer with weights has its own memory.
    return writes(module, node) and not all(user < node and has_weights(module, user) for user in others)
