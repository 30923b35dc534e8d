"""Pads grouped 1 × 1 convolutions whose width OpenVINO gets wrong on CPUs with AMX, and cuts the border off.

OpenVINO (2026.4.1) has a kernel for quantized 1 × 1 convolutions without stride or padding. It multiplies 64 channels
at once, also those of the next group. In groups of 72, 96 or 120 its results were all wrong. With padding it uses
another kernel, which is right. The border contains a layer's bias, and nobody reads it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from optimize.lint.graph import misfits_amx
from optimize.quantization.graph.explicit_quantizers import quantizing

_ATEN = torch.ops.aten
_CONVOLUTIONS: dict[Any, Any] = {
    getattr(operator, kind): operator.default
    for operator in (_ATEN.conv1d, _ATEN.conv2d, _ATEN.conv3d)
    for kind in ("default", "padding")
}
_UNTAGGED = {_ATEN.hardswish.default}  # elementwise, but not tagged so (torch 2.14)
_ALONG = 2  # the padded axis: the rows of a map, so that whole rows are cut off


def border_groups(module: fx.GraphModule) -> int:
    """Pad such convolutions by one row at either end, and cut the border off behind them, in place.

    If a quantizer reads the layer, the border is cut off behind it. Between the two, the slice would keep ONNX Runtime
    from computing the layer in integers.

    Args:
        module: of a program, with ``aten`` operators, whose narrow quantizers have their clamps.

    Returns:
        The number of convolutions changed.
    """
    found = [node for node in module.graph.nodes if _is_misread(node)]
    for node in found:
        args: Any = node.args
        given, weight, bias, steps, _, dilation, groups = args
        node.target = _CONVOLUTIONS[node.target]
        node.args = (given, weight, bias, steps, [1, *[0] * (len(steps) - 1)], dilation, groups)
        end = _end_of_layer(node)
        readers = list(end.users)
        with module.graph.inserting_after(end):
            inner = module.graph.call_function(_ATEN.slice.Tensor, (end, _ALONG, 1, -1))
        for reader in readers:
            reader.replace_input_with(end, inner)
    module.recompile()
    return len(found)


def _is_misread(node: fx.Node) -> bool:
    """Tell whether a node is a quantized 1 × 1 convolution without stride or padding, in groups of such a width."""
    if node.target not in _CONVOLUTIONS or len(node.args) < 7:
        return False  # the last argument is the groups
    args: Any = node.args
    given, weight, _, steps, border, _, groups = args
    if groups == 1 or quantizing(given) != "dequantize_per_tensor" or quantizing(weight) != "dequantize_per_channel":
        return False
    _, width, *kernel = weight.meta["val"].shape
    placed = any(step != 1 for step in steps) or (not isinstance(border, str) and any(border))
    return {*kernel} == {1} and not placed and misfits_amx(width)


def _end_of_layer(layer: fx.Node) -> fx.Node:
    """Return the quantizer behind a layer, or behind its activation, or that quantizer's clamp. Otherwise the layer."""
    node = layer
    while len(node.users) == 1:
        (node,) = node.users
        if quantizing(node) == "quantize_per_tensor":
            readers = list(node.users)
            return readers[0] if [reader.target for reader in readers] == [_ATEN.clamp.default] else node
        if len(node.all_input_nodes) > 1 or not _is_pointwise(node):
            break
    return layer


def _is_pointwise(node: fx.Node) -> bool:
    return node.target in _UNTAGGED or torch.Tag.pointwise in getattr(node.target, "tags", ())
