"""Rounds the bounds of clamps between quantizers of one scale to that scale's steps.

torch.ao (2.11 to 2.14) gives a clamp the range of its input. A bound between two integers is rounded to the nearer one
when the result is quantized. OpenVINO (2026.4.1) fuses clamp and quantizer, and gives all values beyond such a bound
another integer. In a small network, a clamp to −1 and 1 left 28 dB to the exact result of its integers. With bounds
that are integers, OpenVINO gives the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from optimize.quantization.graph.explicit_quantizers import quantizing

_ATEN = torch.ops.aten
_CLAMPS = (_ATEN.clamp.default, _ATEN.hardtanh.default)


def round_clamps(module: fx.GraphModule) -> int:
    """Round the bounds of clamps to their quantized values if both sides have integers of one scale, in place.

    Args:
        module: with explicit quantizers (see `optimize.quantization.graph.explicit_quantizers`).

    Returns:
        The number of clamps changed.
    """
    moved = 0
    for node in module.graph.nodes:
        if node.target not in _CLAMPS or node.kwargs or quantizing(node.args[0]) != "dequantize_per_tensor":
            continue
        integers = node.args[0].args[1:6]
        if not all(quantizing(user) == "quantize_per_tensor" and user.args[1:6] == integers for user in node.users):
            continue
        given, *ends = node.args
        ends = ends or [-1.0, 1.0]  # defaults of a hardtanh
        node.target = _ATEN.clamp.default
        node.args = (given, *(None if end is None else _rounded(end, integers) for end in ends))
        moved += 1
    module.recompile()
    return moved


def _rounded(end: Any, integers: tuple[Any, ...]) -> float:
    """Return the quantized value of a bound."""
    decomposed = torch.ops.quantized_decomposed
    integer = decomposed.quantize_per_tensor(torch.tensor(float(end)), *integers)
    value: torch.Tensor = decomposed.dequantize_per_tensor(integer, *integers)
    return value.item()
