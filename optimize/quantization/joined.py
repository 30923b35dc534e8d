"""What computes with a number or a constant behind a concatenation in integers reads it before it is quantized again.

All that is put together has the range of the whole, and its quantizer gives the very integers that it is given: who
reads floats loses nothing without it. OpenVINO (2026.4.1) takes the product or sum with a constant behind it for a part
of the dequantizer, moves the next quantizer in front of the concatenation (``MoveFakeQuantize``), and ends the process
by SIGSEGV: a network with ``torch.cat([a, b], 1) * 0.5`` between its layers could not be opened.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from optimize.quantization.explicit import quantizing

_ATEN = torch.ops.aten
_ARITHMETIC = frozenset(
    getattr(getattr(_ATEN, name), kind) for name in ("add", "sub", "mul", "div") for kind in ("Tensor", "Scalar")
)


def read_joined(module: fx.GraphModule) -> int:
    """Let arithmetic with constants read concatenations without the quantizer behind them, in place.

    Args:
        module: a program's, of ``aten`` operators.

    Returns:
        How many operators read another node.
    """
    found = 0
    for joined in [node for node in module.graph.nodes if node.target is _ATEN.cat.default]:
        ranges = {_range(part, "dequantize_per_tensor") for part in joined.args[0]}
        for quantizer in list(joined.users):
            if ranges != {_range(quantizer, "quantize_per_tensor")}:
                continue
            for dequantizer in list(quantizer.users):
                for reader in [user for user in dequantizer.users if _with_a_constant(user)]:
                    reader.replace_input_with(dequantizer, joined)
                    found += 1
    module.graph.eliminate_dead_code()
    module.recompile()
    return found


def _range(node: Any, kind: str) -> tuple[Any, ...] | None:
    """Scale, zero-point, ends and type of a quantizer or dequantizer of one scale; None: it is no such one."""
    return (*node.args[1:],) if quantizing(node) == kind else None


def _with_a_constant(node: fx.Node) -> bool:
    return node.target in _ARITHMETIC and sum(given.op != "get_attr" for given in node.all_input_nodes) == 1
