"""Residual sums, kept from the convolutions that OpenVINO would make them a part of: their addends are rounded.

OpenVINO (2026.4.1) adds a shortcut to what a convolution gives before that is rounded to its quantizer's integers. That
is nearer to the float network and faster, and not what the graph says. Behind the larger of an addend and the lowest
float, which is the addend, it rounds as the graph says, in a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from optimize.quantization.graph.explicit_quantizers import quantizing
from optimize.quantization.lowering.float_barrier import keep_floats

_ATEN = torch.ops.aten
_SUMS = (_ATEN.add.Tensor, _ATEN.add_.Tensor)


def keep_sums(module: fx.GraphModule) -> int:
    """Put the maximum with the lowest float between sums and the addends that nothing else reads, in place.

    Args:
        module: a program's, of ``aten`` operators.

    Returns:
        How many sums there are.
    """
    return keep_floats(module, _rounded)


def _rounded(node: fx.Node) -> Collection[fx.Node]:
    """Those of a sum's addends that are dequantized for it alone."""
    given: Any = node.all_input_nodes if node.target in _SUMS else []
    return [addend for addend in given if quantizing(addend) == "dequantize_per_tensor" and len(addend.users) == 1]
