"""Borders of a constant along one axis: written in float where OpenVINO would write them in integers, and wrongly.

OpenVINO (2026.4.1) moves a dequantizer behind a Pad. Where that has borders along one axis alone, zeros for channels
that a shortcut lacks or a token before the first, and the integers have a zero-point or the constant is not 0, it fills
them with something else, and what is behind them may be off by half of what it is. Along two axes, as around a map, it
is right.

An average that counts the zeros around a map counts the integer 0 there, where that is another number: the borders of
MaxViT's shortcuts, which no ReLU ends, were up to 62 steps off. And one that is written as an average times a share
(see `optimize.export.onnx_graph.pool_rewrites`) is rounded before that.
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
_MODE = 2  # the mode among the arguments of `aten.pad`, and behind it the number; of the other the number alone


def keep_borders(module: fx.GraphModule) -> int:
    """Put the maximum with the lowest float in front of what gets such a border, in place.

    Args:
        module: a program's, of ``aten`` operators.

    Returns:
        How many there are.
    """
    return keep_floats(module, _bordered)


def _bordered(node: fx.Node) -> Collection[fx.Node]:
    """What a node puts a constant around, along one axis, where that is not 0 around integers that have 0 for 0."""
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
    """What an average takes, where that comes from integers, and zeros count that are not theirs, or it is shared."""
    images, _, _, padding, ceil, counted, divisor = settings_of(node)
    before = moved(images)
    zeros = counted and any(padding)
    shared = divisor is not None or (zeros and ceil)
    of_integers = quantizing(before) == "dequantize_per_tensor"
    return [images] if of_integers and (shared or (zeros and _is_shifted(before))) else []


def _is_shifted(node: Any) -> bool:
    """Whether a node gives the floats of integers that do not have 0 for 0."""
    return quantizing(node) == "dequantize_per_tensor" and bool(node.args[2] != 0)


def _may_be_shifted(node: fx.Node) -> bool:
    """Whether a tensor is not known to come from integers that have 0 for 0."""
    while quantizing(node) != "dequantize_per_tensor":
        if len(node.all_input_nodes) != 1:
            return True
        (node,) = node.all_input_nodes
    return _is_shifted(node)
