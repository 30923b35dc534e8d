"""Keeps constant padding along one axis in float, because OpenVINO computes it wrongly in integers.

OpenVINO (2026.4.1) moves a dequantizer behind a Pad. It then fills padding along one axis wrongly, if the integers have
a zero point or the constant differs from zero. Examples are zeros for channels that a shortcut lacks, and a token
before the first. Results behind it may be off by half of their value. Padding along two axes, as around a map, is
right.

An average that counts padding zeros counts the integer 0 there, though it stands for another number. MaxViT's
shortcuts, which end without a ReLU, were up to 62 steps off at their borders. Some averages are written as a plain
average times a factor (see `optimize.export.onnx_graph.pool_rewrites`). They would be rounded before the factor.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from optimize.export.onnx_graph.pool_rewrites import settings_of
from optimize.quantization.graph.explicit_quantizers import moved, quantizing
from optimize.quantization.lowering.float_barrier import keep_floats

_PADS = (torch.ops.aten.pad.default, torch.ops.aten.constant_pad_nd.default)
_AVERAGES = tuple(getattr(torch.ops.aten, f"avg_pool{axes}d").default for axes in (1, 2, 3))
_MODE = 2  # position of the mode in `aten.pad`, followed by the value. The other operator only has the value


def keep_borders(module: fx.GraphModule) -> int:
    """Put the maximum with the lowest float in front of such padding, in place.

    Args:
        module: of a program, with ``aten`` operators.

    Returns:
        The number of nodes changed.
    """
    return keep_floats(module, _bordered)


def _bordered(node: fx.Node) -> Collection[fx.Node]:
    """Return a node's input if it is padded along one axis with another value than the integer 0."""
    if node.target in _AVERAGES:
        return _averaged(node)
    if node.target not in _PADS or {"reflect", "replicate", "circular"} & {*node.args[_MODE:]}:
        return []
    given: Any = node.args[0]
    sizes: Any = node.args[1]
    number = next((value for value in node.args[_MODE:] if isinstance(value, int | float)), 0)
    along = sum(any(ends) for ends in zip(sizes[::2], sizes[1::2], strict=True))
    return [given] if along == 1 and (number or _may_be_shifted(given)) else []


def _averaged(node: fx.Node) -> Collection[fx.Node]:
    """Return an average's input if it comes from integers, and the average counts other zeros or has a factor."""
    images, _, _, padding, ceil, counted, divisor = settings_of(node)
    before = moved(images)
    zeros = counted and any(padding)
    shared = divisor is not None or (zeros and ceil)
    of_integers = quantizing(before) == "dequantize_per_tensor"
    return [images] if of_integers and (shared or (zeros and _is_shifted(before))) else []


def _is_shifted(node: Any) -> bool:
    """Tell whether a node dequantizes integers with a zero point other than 0."""
    return quantizing(node) == "dequantize_per_tensor" and bool(node.args[2] != 0)


def _may_be_shifted(node: fx.Node) -> bool:
    """Tell whether a tensor may come from integers with a zero point other than 0."""
    while quantizing(node) != "dequantize_per_tensor":
        if len(node.all_input_nodes) != 1:
            return True
        (node,) = node.all_input_nodes
    return _is_shifted(node)
