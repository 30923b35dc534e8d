"""Operators between layers that stay in float: they stay in float, too, instead of rounding what nobody quantized.

FX (2.11 to 2.14) watches every operator that the backend has a pattern for, so that a sum or a pool between two layers
of which neither is quantized would still be computed in integers. So would what is done to an image before any layer.
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
    """Take away the watchers of tensors that nothing in integers gives or reads, in place.

    An operator without weights stays in float where the nearest layers before it, or the nearest behind it, all do; at
    the graph's ends, where there are none on one side, the other side decides. Nothing happens where every layer is
    quantized.

    Args:
        prepared: with observers or fake-quantize modules.

    Returns:
        How many were taken away.
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
    """Take away the watchers of what is done to the image in front of every layer, in place: it is rounded once.

    What the first layers read still is. Channels that a network normalises once more (torchvision's GoogLeNet and
    Inception) would be rounded before it, and behind it.

    Args:
        prepared: with observers or fake-quantize modules.

    Returns:
        How many were taken away.
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
    """What depends on no image, and what is made of the image before any layer that has learned something.

    Args:
        module: traced, with watchers or without.
        has_learned: whether a node is such a layer; see `learned`.
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
    """Whether a node is computed in integers, by what its nearest layers are; see `free_between`.

    Args:
        graph: of all of them.
        quantized: whether each layer with weights is.
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
    """Whether one of the nearest layers on one side of each node is quantized; None where there is none.

    ``nodes`` come in the graph's order, or for what lies behind (``backwards``) in the reverse of it.
    """
    found: dict[fx.Node, bool | None] = {}
    for node in nodes:
        near = list(node.users) if backwards else node.all_input_nodes
        said = [quantized[other] if other in quantized else found.get(other) for other in near]
        known = [each for each in said if each is not None]
        found[node] = any(known) if known else None
    return found


def _readers(module: fx.GraphModule, watcher: fx.Node) -> Iterable[fx.Node]:
    """What reads a watched tensor, other watchers passed over."""
    for user in watcher.users:
        if is_watcher(module, user):
            yield from _readers(module, user)
        else:
            yield user


def has_weights(module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node is a convolution or a linear layer, as a module or as a function."""
    if node.op == "call_function":
        return node.target in _FUNCTIONS
    layer = called_module(module, node)
    if isinstance(layer, (_ConvNd, nn.Linear)):  # those of QAT that are fused with a norm, too
        return True
    return isinstance(layer, _FusedModule) and isinstance(next(layer.children()), (_ConvNd, nn.Linear))


def learned(module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node computes with weights, or multiplies tensors of images as layers do.

    A product with a fixed matrix does not: of the coefficients of a cosine transform, the first is some hundred times
    as large as the last, and integers for all of them leave nothing of most (timm's CSATv2).
    """
    layer = called_module(module, node)
    if layer is not None:
        return not is_watcher(module, node) and next(layer.parameters(), None) is not None
    if called_function(node) in _FUNCTIONS:
        return not all(fixed(module, value) for value in node.all_input_nodes[1:])
    return called_function(node) in _PRODUCTS and not any(fixed(module, value) for value in node.all_input_nodes)


def fixed(module: fx.GraphModule, value: fx.Node) -> bool:
    """Whether a tensor depends neither on the images nor on parameters."""
    for node in made_of(value):
        if node.op == "placeholder" or (node.op == "call_module" and not is_watcher(module, node)):
            return False
        if node.op == "get_attr" and isinstance(attribute(module, str(node.target)), nn.Parameter):
            return False
    return True


def _is_quantized(module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a layer is; the weights that a function is given always are."""
    return node.op == "call_function" or getattr(called_module(module, node), "qconfig", None) is not None
