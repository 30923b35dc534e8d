"""Writes convolutions whose padding depends on the image size, as timm's ``Conv2dSame``, as a pad and a convolution.

Tracing knows no sizes. It keeps such a layer as one call of a foreign class, which torch.ao would leave in float.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd

from optimize.errors import PassError
from optimize.quantization.graph.editing import shape_of
from optimize.quantization.graph.nodes import called_module
from optimize.tracing.constants import NotConstantError
from optimize.tracing.foreign_layers import as_convolution
from optimize.tracing.trace import note_shapes, trace


def write_out_same(module: fx.GraphModule, example: torch.Tensor) -> int:
    """Write such layers as calls of ``pad`` and torch convolutions with the same names, in place.

    A layer that does anything else with its images stays unchanged.

    Args:
        module: traced, in eval mode.
        example: an input, ``float32 (N, C, H, W)``.

    Returns:
        The number of layers written.
    """
    found: dict[str, list[fx.Node]] = {}
    for node in module.graph.nodes:
        if _is_foreign(called_module(module, node)):
            found.setdefault(str(node.target), []).append(node)
    if not found:
        return 0
    note_shapes(module, example)
    written = 0
    for name, nodes in found.items():
        calls = [_written(module.get_submodule(name), node) for node in nodes]
        known = [call for call in calls if call is not None]
        if len(known) < len(calls) or len({convolution.extra_repr() for _, convolution in known}) > 1:
            continue
        for node, (pad, _) in zip(nodes, known, strict=True):
            if pad is not None:
                with module.graph.inserting_before(node):
                    padded = module.graph.call_function(functional.pad, (node.args[0], *pad.args[1:]), dict(pad.kwargs))
                node.args = (padded,)
        module.set_submodule(name, known[0][1])
        written += 1
    module.recompile()
    return written


def _is_foreign(layer: nn.Module | None) -> bool:
    return isinstance(layer, _ConvNd) and type(layer).__module__.partition(".")[0] != "torch"


def _written(layer: nn.Module, node: fx.Node) -> tuple[fx.Node | None, nn.Module] | None:
    """Return the pad of a layer's call, and the convolution behind it. None: the layer is anything else."""
    shape = shape_of(node.args[0]) if len(node.args) == 1 and not node.kwargs else None
    if shape is None:
        return None
    try:
        inner = trace(layer, torch.zeros(shape))
    except PassError:
        return None
    (images,) = (each for each in inner.graph.nodes if each.op == "placeholder")
    (answer,) = next(iter(reversed(inner.graph.nodes))).args
    if not isinstance(answer, fx.Node) or answer.op != "call_function":
        return None
    before: Any = answer.args[0] if answer.args else answer.kwargs["input"]
    pads = before.op == "call_function" and before.target is functional.pad
    if (before.args[0] if pads else before) is not images or (pads and before.all_input_nodes != [images]):
        return None
    try:
        with torch.no_grad():
            convolution = as_convolution(inner, answer)
    except NotConstantError:
        return None
    return None if convolution is None else (before if pads else None, convolution.eval())
