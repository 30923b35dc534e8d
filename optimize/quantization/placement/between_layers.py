"""Keeps operators in float that lie between float layers, instead of rounding values that nobody quantized.

FX (2.11 to 2.14) observes every operator for which the backend has a pattern. A sum or a pool between two float layers
would still be computed in integers. So would operators on the image in front of the first layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import fx, nn
from torch.ao.nn.intrinsic.modules.fused import _FusedModule
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd

from optimize.quantization.graph.editing import made_of
from optimize.quantization.graph.nodes import called_function, called_module, is_watcher, remove_watcher
from optimize.tracing.constants import attribute

_FUNCTIONS = (functional.linear, functional.conv1d, functional.conv2d, functional.conv3d)
_PRODUCTS = (torch.matmul, torch.bmm, "matmul", "bmm")


def free_between(prepared: fx.GraphModule) -> int:
    """Remove observers of tensors that no integer operator gives or reads, in place.

    An operator without weights stays in float if all nearest layers before it, or all nearest layers behind it, do. At
    an end of the graph without layers on one side, the other side decides. Nothing changes if every layer is quantized.

    Args:
        prepared: with observers or fake-quantize modules.

    Returns:
        The number of observers removed.
    """
    quantized = {node: _is_quantized(prepared, node) for node in prepared.graph.nodes if has_weights(prepared, node)}
    if all(quantized.values()):
        return 0
    in_integers = integers_at(prepared.graph, quantized)
    watchers = [node for node in prepared.graph.nodes if is_watcher(prepared, node)]
    freed = 0
    for node in watchers:
        given = node.all_input_nodes[0]
        if quantized.get(given) or any(in_integers(user) for user in _readers(prepared, node)):
            continue
        if given not in quantized and in_integers(given):
            continue
        remove_watcher(prepared, node)
        freed += 1
    prepared.recompile()
    return freed


def free_image(prepared: fx.GraphModule) -> int:
    """Remove observers of operators on the image in front of all layers, in place. The image is rounded only once.

    The input of the first layers is still rounded. A network that normalises channels once more (torchvision's
    GoogLeNet and Inception) would round them before and after it.

    Args:
        prepared: with observers or fake-quantize modules.

    Returns:
        The number of observers removed.
    """
    constant, early = before_layers(prepared, lambda node: learned(prepared, node))
    freed = [
        node
        for node in (*constant, *early)
        if is_watcher(prepared, node) and node.users and early.issuperset(_readers(prepared, node))
    ]
    for node in freed:
        remove_watcher(prepared, node)
    prepared.recompile()
    return len(freed)


def before_layers(module: fx.GraphModule, has_learned: Callable[[fx.Node], bool]) -> tuple[set[fx.Node], set[fx.Node]]:
    """Return the nodes that depend on no image, and those computed from the image before any learned layer.

    Args:
        module: traced, with observers or without.
        has_learned: tells whether a node is a learned layer. See `learned`.
    """
    constant: set[fx.Node] = set()
    early: set[fx.Node] = set()
    for node in module.graph.nodes:
        given = node.all_input_nodes
        if node.op == "get_attr" or (given and constant.issuperset(given)):
            constant.add(node)
        elif node.op != "output" and not has_learned(node) and (constant | early).issuperset(given):
            early.add(node)
    return constant, early


def integers_at(graph: fx.Graph, quantized: Mapping[fx.Node, bool]) -> Callable[[fx.Node], bool]:
    """Return a function that tells whether a node is computed in integers, by its nearest layers. See `free_between`.

    Args:
        graph: the graph of the layers.
        quantized: whether each layer with weights is quantized.
    """
    before = _nearest(graph.nodes, quantized, backwards=False)
    behind = _nearest(reversed(graph.nodes), quantized, backwards=True)

    def found(node: fx.Node) -> bool:
        if node.op in ("placeholder", "output", "get_attr"):
            return False
        if node in quantized:
            return quantized[node]
        return all(side is not False for side in (before[node], behind[node]))

    return found


def _nearest(
    nodes: Iterable[fx.Node], quantized: Mapping[fx.Node, bool], *, backwards: bool
) -> dict[fx.Node, bool | None]:
    """Return for each node whether one of the nearest layers on one side is quantized, and None without such layers.

    ``nodes`` are in the graph's order, or in reverse order to look behind (``backwards``).
    """
    found: dict[fx.Node, bool | None] = {}
    for node in nodes:
        near = list(node.users) if backwards else node.all_input_nodes
        said = [quantized[other] if other in quantized else found.get(other) for other in near]
        known = [each for each in said if each is not None]
        found[node] = any(known) if known else None
    return found


def _readers(module: fx.GraphModule, watcher: fx.Node) -> Iterable[fx.Node]:
    """Yield the readers of an observed tensor, and skip other observers."""
    for user in watcher.users:
        if is_watcher(module, user):
            yield from _readers(module, user)
        else:
            yield user


def has_weights(module: fx.GraphModule, node: fx.Node) -> bool:
    """Tell whether a node is a convolution or a linear layer, as a module or as a function."""
    if node.op == "call_function":
        return node.target in _FUNCTIONS
    layer = called_module(module, node)
    if isinstance(layer, (_ConvNd, nn.Linear)):  # also QAT layers that are fused with a norm
        return True
    return isinstance(layer, _FusedModule) and isinstance(next(layer.children()), (_ConvNd, nn.Linear))


def learned(module: fx.GraphModule, node: fx.Node) -> bool:
    """Tell whether a node computes with weights, or multiplies two activations as layers do.

    A product with a fixed matrix does not count. The first coefficient of a cosine transform is some hundred times as
    large as the last. Integers for all of them leave nothing of most (timm's CSATv2).
    """
    layer = called_module(module, node)
    if layer is not None:
        return not is_watcher(module, node) and next(layer.parameters(), None) is not None
    if called_function(node) in _FUNCTIONS:
        return not all(fixed(module, value) for value in node.all_input_nodes[1:])
    return called_function(node) in _PRODUCTS and not any(fixed(module, value) for value in node.all_input_nodes)


def fixed(module: fx.GraphModule, value: fx.Node) -> bool:
    """Tell whether a tensor depends neither on the images nor on parameters."""
    for node in made_of(value):
        if node.op == "placeholder" or (node.op == "call_module" and not is_watcher(module, node)):
            return False
        if node.op == "get_attr" and isinstance(attribute(module, str(node.target)), nn.Parameter):
            return False
    return True


def _is_quantized(module: fx.GraphModule, node: fx.Node) -> bool:
    """Tell whether a layer is quantized. Weights given to a function always are."""
    return node.op == "call_function" or getattr(called_module(module, node), "qconfig", None) is not None
