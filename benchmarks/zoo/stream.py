"""The residual stream of a transformer: which layers end its branches, found by structure, and its sums rounded."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from optimize.errors import PassError
from optimize.tracing.trace import graph_as_is

#: Residual branches up to which a transformer is drawn as all networks are: ViT-L has as many, MaxViT-T 51, ViT-H 64.
DEEP = 48

_ENDS = (nn.Linear, nn.Conv2d, nn.MultiheadAttention)
_SUMS = (operator.add, operator.iadd, torch.add, "add", "add_")
#: What lies between a branch's last layer and the sum without a weight of its own; attention answers with a pair.
_PASSING = (nn.Dropout, nn.Identity)
_PASSING_CALLS = ("getitem", "dropout", "stochastic_depth")


def branch_ends(module: nn.Module) -> list[nn.Module]:
    """The last layer of each residual branch of a network with layer norms, in the order of its forward.

    A branch is what is added to a tensor that it was computed from.

    Args:
        module: in any mode, which it keeps.

    Returns:
        A layer for each branch; none of a network without layer norms, or one that cannot be traced.
    """
    if not any(isinstance(layer, nn.LayerNorm) for layer in module.modules()):
        return []
    try:
        graph = graph_as_is(module)
    except PassError:
        return []
    layers = dict(module.named_modules())
    return [end for node in graph.nodes if node.target in _SUMS and (end := _end(node, layers)) is not None]


def deep_branch_ends(module: nn.Module) -> list[nn.Module]:
    """Those of a transformer with more than `DEEP` branches; none of another network."""
    ends = branch_ends(module)
    return ends if len(ends) > DEEP else []


def _end(total: fx.Node, layers: Mapping[str, nn.Module]) -> nn.Module | None:
    parts = [_source(part, layers) for part in total.args if isinstance(part, fx.Node)]
    if len(parts) != len(total.args):  # a number is added
        return None
    for shortcut, branch in (parts, parts[::-1]):
        layer = _called(branch, layers)
        if isinstance(layer, _ENDS) and _reads(branch, shortcut):
            return layer
    return None


def _source(node: fx.Node, layers: Mapping[str, nn.Module]) -> fx.Node:
    """What a node passes on."""
    while isinstance(_called(node, layers), _PASSING) or getattr(node.target, "__name__", "") in _PASSING_CALLS:
        node = node.all_input_nodes[0]
    return node


def _called(node: fx.Node, layers: Mapping[str, nn.Module]) -> nn.Module | None:
    return layers[str(node.target)] if node.op == "call_module" else None


def _reads(node: fx.Node, other: fx.Node) -> bool:
    """Whether a node was computed from another."""
    seen, waiting = {node}, [node]
    while waiting:
        new = set(waiting.pop().all_input_nodes) - seen
        seen |= new
        waiting += new
    return other in seen


class RoundedSums(TorchFunctionMode):
    """While it is entered, each sum of two tensors of one shape is rounded."""

    def __init__(self, rounded: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._rounded = rounded

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """See `TorchFunctionMode`."""
        found = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") not in ("add", "add_"):
            return found
        alike = all(isinstance(part, torch.Tensor) and part.shape == found.shape for part in args[:2])
        return found.copy_(self._rounded(found)) if alike else found  # a sum in place stays in place
