"""Floors under norms that something is divided by: above what an engine's rounding leaves of a zero.

``functional.normalize`` divides by ``max(norm, 1e-12)``, so that a vector of zeros stays one. Of integers it is exactly
that where they are dequantized as ``(q − zero point) × scale``. OpenVINO (2026.4.1), where a quantizer and its
dequantizer become one FakeQuantize, computes ``q × ((high − low) / 255) + low`` of its range's ends, in float32: of a
zero it gives what rounding these leaves, some 100,000ths of a step, and 1e-12 lets a vector of them grow to length 1,
in a direction that is nobody's. So did the keys of Swin's second version where a window reaches beyond the image: those
of padded tokens are zeros.

The norm of integers' values is 0 or a step at least (no entry but zero is smaller). Where these values are what is
divided, a floor of half a step therefore gives every quotient that a smaller one gave (of a norm of 0 they are zeros),
and no residue reaches it. What is made of a norm otherwise, its logarithm or a quotient of another tensor, has the
floor that it was given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from optimize.quantization.graph.explicit_quantizers import MOVES, moved, quantizing

_ATEN = torch.ops.aten
_CLAMPS = (_ATEN.clamp_min.default, _ATEN.clamp.default)
#: What gives each number of a tensor, at one place or at several.
_COPIES = (*MOVES, _ATEN.expand.default, _ATEN.expand_as.default, _ATEN.broadcast_to.default)
_QUOTIENTS = (_ATEN.div.Tensor, _ATEN.div_.Tensor)


def raise_floors(module: fx.GraphModule) -> int:
    """Raise what keeps a norm that its dequantized integers are divided by from zero to half a step, in place.

    One that is half a step or more stays, as does one of a norm that anything else reads.

    Args:
        module: with explicit quantizers (see `optimize.quantization.graph.explicit_quantizers`).

    Returns:
        How many were raised.
    """
    raised = 0
    for node in module.graph.nodes:
        given = _normed(node.args[0]) if node.target in _CLAMPS and _only_below(node) else None
        if given is None or not _only_divides(node, given):
            continue
        step = given.args[1]
        assert isinstance(step, float)
        if 0 < node.args[1] < step / 2:
            node.args = (node.args[0], step / 2)
            raised += 1
    module.recompile()
    return raised


def _only_below(clamp: fx.Node) -> bool:
    """Whether it has a number as its lower end, and no upper one."""
    lower, *upper = clamp.args[1:]
    return isinstance(lower, int | float) and not any(end is not None for end in (*upper, clamp.kwargs.get("max")))


def _normed(norm: Any) -> fx.Node | None:
    """The dequantized integers that a node is a norm of; None where it is none, or of anything else."""
    if not isinstance(norm, fx.Node) or norm.target is not _ATEN.linalg_vector_norm.default:
        return None
    order = norm.args[1] if len(norm.args) > 1 else 2
    given = moved(norm.args[0])
    # Of an order above 0 it is as large as its largest entry.
    if not isinstance(order, int | float) or order <= 0 or quantizing(given) != "dequantize_per_tensor":
        return None
    assert isinstance(given, fx.Node)
    return given


def _only_divides(floored: fx.Node, given: fx.Node) -> bool:
    """Whether all who read a node divide by it what some integers are dequantized to."""
    waiting = [floored]
    while waiting:
        node = waiting.pop()
        for reader in node.users:
            if reader.target in _COPIES and reader.args[0] is node:
                waiting.append(reader)
            elif reader.target not in _QUOTIENTS or not _are_alike(moved(reader.args[0]), given):
                return False
    return True


def _are_alike(node: Any, given: fx.Node) -> bool:
    """Whether a node dequantizes the integers that another does: each reader may have a dequantizer of its own."""
    return isinstance(node, fx.Node) and (node.target, node.args) == (given.target, given.args)
