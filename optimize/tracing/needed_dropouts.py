"""Dropouts that must stay although the network is in eval mode, because the network writes into their result.

In training the result of a dropout is a new tensor. In eval mode it is the input tensor itself, and without the dropout
it always is. If such a network is trained further, it overwrites a tensor that the activation in front saved for its
gradient. Autograd refuses that.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from optimize.tracing.naming import free_name

#: The dropout layers, and the functions that do the same as each.
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_LAYERS: dict[Any, type[nn.Module]] = {
    functional.dropout: nn.Dropout,
    functional.dropout1d: nn.Dropout1d,
    functional.dropout2d: nn.Dropout2d,
    functional.dropout3d: nn.Dropout3d,
    functional.alpha_dropout: nn.AlphaDropout,
    functional.feature_alpha_dropout: nn.FeatureAlphaDropout,
}


def written_into(graph_module: fx.GraphModule, example: torch.Tensor) -> list[fx.Node]:
    """Return the dropouts that protect their input from later in-place writes.

    A dropout that alone reads a layer with weights needs no protection: the gradient of that layer uses its input.

    Args:
        graph_module: in eval mode.
        example: an input ``(N, C, H, W)``.
    """
    dropouts = {node for node in graph_module.graph.nodes if _is_dropout(graph_module, node)}
    keeping = {node for node in dropouts if not _is_of_weights(graph_module, node.all_input_nodes[0])}
    if not keeping:
        return []  # nothing to run the network for
    watching = _Watching(graph_module, keeping)
    with torch.no_grad():
        watching.run(example.clone())
    return [node for node, (tensor, version) in watching.given.items() if tensor._version != version]


def write_as_layers(graph_module: fx.GraphModule, example: torch.Tensor) -> None:
    """Write the functional dropouts among `written_into` as layers, in place. Tracing in eval mode disabled them."""
    if not any(node.target in _LAYERS for node in graph_module.graph.nodes):
        return  # also no need to run it: others call `written_into` for layers
    for node in written_into(graph_module, example):
        if node.target not in _LAYERS:
            continue
        call = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]
        call.apply_defaults()
        asked = call.arguments
        if asked["training"] is not False or not isinstance(asked["p"], int | float):
            continue  # always on, or its rate is computed
        name = free_name(graph_module, f"{node.name}_0")
        graph_module.add_submodule(name, _LAYERS[node.target](asked["p"], asked["inplace"]).eval())
        with graph_module.graph.inserting_before(node):
            layer = graph_module.graph.call_module(name, (asked["input"],))
        layer.meta = node.meta.copy()
        node.replace_all_uses_with(layer)
        graph_module.graph.erase_node(node)


def _is_dropout(graph_module: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_module":
        return isinstance(graph_module.get_submodule(str(node.target)), DROPOUTS)
    return node.target in _LAYERS


def _is_of_weights(graph_module: fx.GraphModule, given: fx.Node) -> bool:
    """Tell whether a node is a layer with weights and has one reader."""
    if given.op != "call_module" or len(given.users) > 1:
        return False
    return next(graph_module.get_submodule(str(given.target)).parameters(), None) is not None


class _Watching(fx.Interpreter):
    """Records the values of some nodes with their version counter, which also counts writes into views."""

    def __init__(self, graph_module: fx.GraphModule, watched: set[fx.Node]) -> None:
        super().__init__(graph_module)
        self._watched = watched
        self.given: dict[fx.Node, tuple[torch.Tensor, int]] = {}

    def run_node(self, n: fx.Node) -> Any:
        """See `fx.Interpreter`."""
        value = super().run_node(n)
        if n in self._watched:
            self.given[n] = (value, value._version)
        return value
