"""Properties of graph nodes: the modules that they call, their readers, and whether they are observers."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import fx, nn
from torch.ao.quantization import FakeQuantizeBase
from torch.ao.quantization.observer import ObserverBase
from torch.nn import functional

#: Sums of two tensors.
SUMS: Final = (operator.add, operator.iadd, torch.add, "add", "add_")
#: Operators whose inputs share one range. torch.ao takes that of the first input.
TOGETHER: Final = frozenset({torch.cat, torch.concat, torch.concatenate, torch.stack, torch.hstack, torch.vstack})
_MOVING = (
    *(torch.cat, torch.flatten, torch.permute, torch.transpose, torch.reshape, torch.roll, operator.getitem),
    *("flatten", "permute", "transpose", "reshape", "view", "contiguous", "unsqueeze", "squeeze", "expand", "roll"),
    functional.dropout,
)
_MOVING_MODULES = (nn.Dropout, nn.Identity, nn.Flatten)


def called_module(module: fx.GraphModule, node: Any) -> nn.Module | None:
    """Return the module that a node calls, or None if it calls none or is no node."""
    return module.get_submodule(str(node.target)) if isinstance(node, fx.Node) and node.op == "call_module" else None


def called_function(node: Any) -> Any:
    """Return the function that a node calls, or the name of the method, or None if it calls neither.

    A node's target alone is not enough: a network's own tensor or layer may also be named ``mean``.
    """
    return node.target if isinstance(node, fx.Node) and node.op in ("call_function", "call_method") else None


def what_is_called(module: fx.GraphModule, node: Any) -> Any:
    """Return what a node calls: a module's class, a function or a method's name, or None if it calls nothing."""
    called = called_module(module, node)
    return called_function(node) if called is None else type(called)


def is_layer_norm(module: fx.GraphModule, node: fx.Node) -> bool:
    """Tell whether a node is a layer norm, as a module or, as in timm, as a function."""
    return what_is_called(module, node) in (functional.layer_norm, nn.LayerNorm)


def only_moves(module: fx.GraphModule, node: fx.Node) -> bool:
    """Tell whether a node passes values on unchanged, in another shape or order or concatenated."""
    called = called_module(module, node)
    return called_function(node) in _MOVING if called is None else isinstance(called, _MOVING_MODULES)


def leads_to(node: fx.Node, wanted: Callable[[fx.Node], bool], onward: Callable[[fx.Node], bool]) -> bool:
    """Tell whether a ``wanted`` node reads a node directly, or through nodes that satisfy ``onward``."""
    waiting, seen = [node], {node}
    while waiting:
        for user in waiting.pop().users:
            if wanted(user):
                return True
            if user not in seen and onward(user):
                seen.add(user)
                waiting.append(user)
    return False


def is_watcher(module: fx.GraphModule, node: fx.Node) -> bool:
    """Tell whether a node is an observer or a fake-quantize module."""
    return isinstance(called_module(module, node), (ObserverBase, FakeQuantizeBase))


def holds_watcher(module: fx.GraphModule, node: Any) -> bool:
    """Tell whether a node is a wrapper from the PT2E front end that contains an observer."""
    return isinstance(getattr(called_module(module, node), "observer", None), ObserverBase)


def remove_watcher(prepared: fx.GraphModule, node: fx.Node) -> None:
    """Remove an observer or fake-quantize module at one of its places. Its readers then read its input."""
    before: Any = node.args[0]
    node.replace_all_uses_with(before)
    prepared.graph.erase_node(node)
    if all(other.target != node.target for other in prepared.graph.nodes):
        prepared.delete_submodule(str(node.target))  # an unused one would have no range
