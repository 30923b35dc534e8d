"""Nodes of a graph: the modules that they call, what reads them, and those that only watch what others give."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import fx, nn
from torch.ao.quantization import FakeQuantizeBase
from torch.ao.quantization.observer import ObserverBase
from torch.nn import functional

#: What adds two tensors.
SUMS: Final = (operator.add, operator.iadd, torch.add, "add", "add_")
#: What gives all that it is given one range: torch.ao takes that of the first.
TOGETHER: Final = frozenset({torch.cat, torch.concat, torch.concatenate, torch.stack, torch.hstack, torch.vstack})
_MOVING = (
    *(torch.cat, torch.flatten, torch.permute, torch.transpose, torch.reshape, torch.roll, operator.getitem),
    *("flatten", "permute", "transpose", "reshape", "view", "contiguous", "unsqueeze", "squeeze", "expand", "roll"),
    functional.dropout,
)
_MOVING_MODULES = (nn.Dropout, nn.Identity, nn.Flatten)


def called_module(module: fx.GraphModule, node: Any) -> nn.Module | None:
    """The module that a node of a graph calls; None where it calls none, or is no node."""
    return module.get_submodule(str(node.target)) if isinstance(node, fx.Node) and node.op == "call_module" else None


def called_function(node: Any) -> Any:
    """The function that a node calls, or the name of the method; None where it calls neither.

    A node's target alone does not tell: a network's own tensor or layer may be called ``mean``, too.
    """
    return node.target if isinstance(node, fx.Node) and node.op in ("call_function", "call_method") else None


def what_is_called(module: fx.GraphModule, node: Any) -> Any:
    """What a node calls: a module's class, a function or a method's name; None where it calls nothing."""
    called = called_module(module, node)
    return called_function(node) if called is None else type(called)


def is_layer_norm(module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node is a layer norm, as a module or, as timm's are, as a function."""
    return what_is_called(module, node) in (functional.layer_norm, nn.LayerNorm)


def only_moves(module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node hands numbers on as they are, in another shape or order or put together."""
    called = called_module(module, node)
    return called_function(node) in _MOVING if called is None else isinstance(called, _MOVING_MODULES)


def leads_to(node: fx.Node, wanted: Callable[[fx.Node], bool], onward: Callable[[fx.Node], bool]) -> bool:
    """Whether a wanted node reads what another gives, or what becomes of it in nodes that are gone on from."""
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
    """Whether a node is an observer or a fake-quantize module."""
    return isinstance(called_module(module, node), (ObserverBase, FakeQuantizeBase))


def holds_watcher(module: fx.GraphModule, node: Any) -> bool:
    """Whether a node is a watcher of PT2E's, which hold an observer."""
    return isinstance(getattr(called_module(module, node), "observer", None), ObserverBase)


def remove_watcher(prepared: fx.GraphModule, node: fx.Node) -> None:
    """Take away an observer or fake-quantize module at one of its places; whoever read it reads what it watched."""
    before: Any = node.args[0]
    node.replace_all_uses_with(before)
    prepared.graph.erase_node(node)
    if all(other.target != node.target for other in prepared.graph.nodes):
        prepared.delete_submodule(str(node.target))  # one that sees nothing has no range
