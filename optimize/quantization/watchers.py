"""Nodes of a prepared graph: the modules that they call, and those that only watch what others give."""

from __future__ import annotations

from typing import Any

from torch import fx, nn
from torch.ao.quantization import FakeQuantizeBase
from torch.ao.quantization.observer import ObserverBase


def called_module(module: fx.GraphModule, node: Any) -> nn.Module | None:
    """The module that a node of a graph calls; None where it calls none, or is no node."""
    return module.get_submodule(str(node.target)) if isinstance(node, fx.Node) and node.op == "call_module" else None


def is_watcher(module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node is an observer or a fake-quantize module."""
    return isinstance(called_module(module, node), (ObserverBase, FakeQuantizeBase))


def remove_watcher(prepared: fx.GraphModule, node: fx.Node) -> None:
    """Take away an observer or fake-quantize module at one of its places; whoever read it reads what it watched."""
    before: Any = node.args[0]
    node.replace_all_uses_with(before)
    prepared.graph.erase_node(node)
    if all(other.target != node.target for other in prepared.graph.nodes):
        prepared.delete_submodule(str(node.target))  # one that sees nothing has no range
