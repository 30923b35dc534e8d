"""Raises the lower bound of norms that something is divided by, above the rounding residue of a zero.

``functional.normalize`` divides by ``max(norm, 1e-12)``, so that a vector of zeros stays zero. Integers that are
dequantized as ``(q − zero point) × scale`` give exact zeros. OpenVINO (2026.4.1) fuses a quantizer and its dequantizer
into one FakeQuantize. It computes ``q × ((high − low) / 255) + low`` from the range's ends in float32. A zero then
leaves a residue of some 100,000ths of a step. With 1e-12 as bound, a vector of residues grows to length 1. Its
direction is arbitrary. This happened to the keys of Swin's second version where a window reaches beyond the image. The
keys of padded tokens are zeros.

The norm of dequantized integers is 0 or at least one step. Every entry other than 0 is at least a step. If these
integers are also the dividend, a bound of half a step gives the same quotients as a smaller one. With a norm of 0 they
are zeros. No residue reaches that bound. Other uses of a norm, such as its logarithm or the quotient of another tensor,
keep their bound.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from optimize.quantization.graph.explicit_quantizers import MOVES, moved, quantizing

_ATEN = torch.ops.aten
_CLAMPS = (_ATEN.clamp_min.default, _ATEN.clamp.default)
#: Operators that return each value of a tensor, at one place or at several.
_COPIES = (*MOVES, _ATEN.expand.default, _ATEN.expand_as.default, _ATEN.broadcast_to.default)
_QUOTIENTS = (_ATEN.div.Tensor, _ATEN.div_.Tensor)


def raise_floors(module: fx.GraphModule) -> int:
    """Raise the lower bound of a norm by which its own dequantized integers are divided to half a step, in place.

    A bound of half a step or more stays. So does one whose norm has other readers.

    Args:
        module: with explicit quantizers (see `optimize.quantization.graph.explicit_quantizers`).

    Returns:
        The number of bounds raised.
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
    """Tell whether a clamp has a number as its lower bound, and no upper bound."""
    lower, *upper = clamp.args[1:]
    return isinstance(lower, int | float) and not any(end is not None for end in (*upper, clamp.kwargs.get("max")))


def _normed(norm: Any) -> fx.Node | None:
    """Return the dequantized integers of which a node is the norm, or None."""
    if not isinstance(norm, fx.Node) or norm.target is not _ATEN.linalg_vector_norm.default:
        return None
    order = norm.args[1] if len(norm.args) > 1 else 2
    given = moved(norm.args[0])
    # A norm of an order above 0 is at least as large as its largest entry.
    if not isinstance(order, int | float) or order <= 0 or quantizing(given) != "dequantize_per_tensor":
        return None
    assert isinstance(given, fx.Node)
    return given


def _only_divides(floored: fx.Node, given: fx.Node) -> bool:
    """Tell whether all readers of a node divide the given dequantized integers by it."""
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
    """Tell whether two nodes dequantize the same integers. Each reader may have its own dequantizer."""
    return isinstance(node, fx.Node) and (node.target, node.args) == (given.target, given.args)
