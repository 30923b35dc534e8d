"""Floors under norms that something is divided by: above what an engine's rounding leaves of a zero.

``functional.normalize`` divides by ``max(norm, 1e-12)``, so that a vector of zeros stays one. Of integers it is exactly
that where they are dequantized as ``(q − zero point) × scale``. OpenVINO (2026.4.1), where a quantizer and its
dequantizer become one FakeQuantize, computes ``q × ((high − low) / 255) + low`` of its range's ends, in float32: of a
zero it gives what rounding these leaves, some 100,000ths of a step, and 1e-12 lets a vector of them grow to length 1,
in a direction that is nobody's. So did the keys of Swin's second version where a window reaches beyond the image: those
of padded tokens are zeros.

The norm of integers' values is 0 or a step at least (no entry but zero is smaller). A floor of half a step therefore
gives every quotient that a smaller one gave, and no residue reaches it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from optimize.quantization.explicit import moved, quantizing

_ATEN = torch.ops.aten
_CLAMPS = (_ATEN.clamp_min.default, _ATEN.clamp.default)


def raise_floors(module: fx.GraphModule) -> int:
    """Raise what keeps a norm of dequantized integers from zero to half a step, where it is less, in place.

    Args:
        module: with explicit quantizers (see `optimize.quantization.explicit`).

    Returns:
        How many were raised.
    """
    raised = 0
    for node in module.graph.nodes:
        step = _step_of_norm(node.args[0]) if node.target in _CLAMPS and _only_below(node) else None
        if step is not None and 0 < node.args[1] < step / 2:
            node.args = (node.args[0], step / 2)
            raised += 1
    module.recompile()
    return raised


def _only_below(clamp: fx.Node) -> bool:
    """Whether it has a number as its lower end, and no upper one."""
    lower, *upper = clamp.args[1:]
    return isinstance(lower, int | float) and not any(end is not None for end in (*upper, clamp.kwargs.get("max")))


def _step_of_norm(norm: Any) -> float | None:
    """The scale of the integers that a node is a norm of; None where it is none, or of anything else."""
    if not isinstance(norm, fx.Node) or norm.target is not _ATEN.linalg_vector_norm.default:
        return None
    order = norm.args[1] if len(norm.args) > 1 else 2
    given = moved(norm.args[0])
    # Of an order above 0 it is as large as its largest entry.
    if not isinstance(order, int | float) or order <= 0 or quantizing(given) != "dequantize_per_tensor":
        return None
    scale = given.args[1]
    assert isinstance(scale, float)
    return scale
