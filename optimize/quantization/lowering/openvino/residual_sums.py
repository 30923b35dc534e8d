"""Keeps residual sums apart from convolutions, so that OpenVINO rounds the addends as the graph says.

OpenVINO (2026.4.1) fuses the two. It adds a shortcut to a convolution's result before that is rounded to its
quantizer's integers. That is nearer to the float network and faster, but it is not what the graph says. The maximum of
an addend and the lowest float is the addend itself. Behind it OpenVINO rounds in a separate kernel.
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
    """Put the maximum with the lowest float between sums and addends that nothing else reads, in place.

    Args:
        module: of a program, with ``aten`` operators.

    Returns:
        The number of sums changed.
    """
    return keep_floats(module, _rounded)


def _rounded(node: fx.Node) -> Collection[fx.Node]:
    """Return the addends of a sum that are dequantized for it alone."""
    given: Any = node.all_input_nodes if node.target in _SUMS else []
    return [addend for addend in given if quantizing(addend) == "dequantize_per_tensor" and len(addend.users) == 1]
