"""The ends of clamps between integers of one scale, at integers.

torch.ao (2.11 to 2.14) gives a clamp the range of what it clamps, and an end that lies between two integers becomes the
nearer one when what is clamped is quantized. OpenVINO (2026.4.1) makes one operator of clamp and quantizer, and gives
all that lies beyond such an end another integer: of what a small network's integers mean, a clamp to −1 and 1 left 28
dB. With ends that are integers it gives the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from optimize.quantization.graph.explicit_quantizers import quantizing

_ATEN = torch.ops.aten
_CLAMPS = (_ATEN.clamp.default, _ATEN.hardtanh.default)


def round_clamps(module: fx.GraphModule) -> int:
    """Move the ends of clamps to what they are quantized to, where integers of one scale lie on both sides, in place.

    Args:
        module: with explicit quantizers (see `optimize.quantization.graph.explicit_quantizers`).

    Returns:
        How many were moved.
    """
    moved = 0
    for node in module.graph.nodes:
        if node.target not in _CLAMPS or node.kwargs or quantizing(node.args[0]) != "dequantize_per_tensor":
            continue
        integers = node.args[0].args[1:6]
        if not all(quantizing(user) == "quantize_per_tensor" and user.args[1:6] == integers for user in node.users):
            continue
        given, *ends = node.args
        ends = ends or [-1.0, 1.0]  # a hardtanh's own
        node.target = _ATEN.clamp.default
        node.args = (given, *(None if end is None else _rounded(end, integers) for end in ends))
        moved += 1
    module.recompile()
    return moved


def _rounded(end: Any, integers: tuple[Any, ...]) -> float:
    """The number that an end is quantized to."""
    decomposed = torch.ops.quantized_decomposed
    integer = decomposed.quantize_per_tensor(torch.tensor(float(end)), *integers)
    value: torch.Tensor = decomposed.dequantize_per_tensor(integer, *integers)
    return value.item()
