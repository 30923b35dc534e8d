"""Operators whose range is known, kept in float where they are put together with others, which would have their range.

Of a tanh, a sigmoid and a hardsigmoid torch.ao (2.11 to 2.14) knows the range, and its kernels give its integers
whatever is done with them. In float they are rounded by the quantizer of what reads them.
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
    """See the module: torch.ao has no kernel for this class."""


class FloatSigmoid(nn.Sigmoid):
    """See the module."""


class FloatHardsigmoid(nn.Hardsigmoid):
    """See the module."""


#: What they become.
KNOWN_IN_FLOAT: Final = (FloatTanh, FloatSigmoid, FloatHardsigmoid)
_OPERATORS: Final[dict[Any, type[nn.Module]]] = {
    **dict.fromkeys((nn.Tanh, torch.tanh, functional.tanh, "tanh", "tanh_"), FloatTanh),
    **dict.fromkeys((nn.Sigmoid, torch.sigmoid, functional.sigmoid, "sigmoid", "sigmoid_"), FloatSigmoid),
    **dict.fromkeys((nn.Hardsigmoid, functional.hardsigmoid, "hardsigmoid", "hardsigmoid_"), FloatHardsigmoid),
}
#: What gives numbers of another range than it is given: nothing behind it reads these integers.
_OTHERS: Final = frozenset(
    {
        *(operator.add, operator.iadd, operator.sub, operator.mul, operator.imul, operator.truediv, operator.matmul),
        *(torch.add, torch.sub, torch.mul, torch.div, torch.matmul, torch.bmm),
        *("add", "add_", "sub", "mul", "mul_", "div", "matmul", "bmm"),
    }
)


def free_known(module: fx.GraphModule) -> int:
    """Make operators of known range that are put together with others, or write in place, ones that stay in float.

    torch's integer kernels (2.14) have no ``tanh_``.

    Args:
        module: traced, before anything watches its tensors.

    Returns:
        How many.
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
    """Take away watchers of known range from what such operators are given, in place.

    Where nothing in integers gives it, torch.ao (2.11 to 2.14) watches it with the operator's own watcher: of the
    ``1.702 * x`` of a GELU's approximation by a sigmoid, all beyond 0 to 1 would be cut off.

    Args:
        prepared: with observers or fake-quantize modules.

    Returns:
        How many were taken away.
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
    """Whether a node is an operator of known range."""
    return what_is_called(module, node) in _OPERATORS


def _put_together(module: fx.GraphModule, node: fx.Node) -> bool:
    return leads_to(
        node,
        lambda user: called_function(user) in TOGETHER,
        lambda user: called_function(user) not in _OTHERS and not has_weights(module, user),
    )


def _in_float(module: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    """What computes in float what a node does; None if torch.ao knows no range of it."""
    kind = _OPERATORS.get(what_is_called(module, node))
    if kind is None or _read_afterwards(module, node):
        return None
    return kind()


def _read_afterwards(module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node writes into a tensor that something else may read behind it, by that name or as a view of it."""
    others = [user for user in node.all_input_nodes[0].users if user is not node]
    # What a layer with weights gives lies in memory of its own.
    return writes(module, node) and not all(user < node and has_weights(module, user) for user in others)
