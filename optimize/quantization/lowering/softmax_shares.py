"""Keeps the shares of a softmax from wrapping around if a share of 1 is more than 256 steps of their quantizer.

ONNX Runtime (1.31) fuses a softmax between integers into one operator that does not saturate. A share beyond 256 steps
wraps around. SKNet weights its branches with such shares. It had an SQNR of 1.8 dB to the exact result of its integers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import fx

from optimize.quantization.graph.explicit_quantizers import MOVES, moved, quantizing
from optimize.quantization.lowering.float_barrier import keep_floats

_SOFTMAX = torch.ops.aten.softmax.int


def keep_shares(module: fx.GraphModule) -> int:
    """Put the maximum with the lowest float in front of a softmax whose shares may exceed their range, in place.

    Args:
        module: of a program, with ``aten`` operators.

    Returns:
        The number of softmaxes changed.
    """
    return keep_floats(module, _beyond)


def _beyond(node: fx.Node) -> Collection[fx.Node]:
    """Return the integers whose softmax a node computes, if a share of 1 needs more steps than a byte has."""
    given: Any = node.args[0] if node.target is _SOFTMAX else None
    of_integers = quantizing(moved(given)) == "dequantize_per_tensor"
    return [given] if of_integers and any(256 * step < 1 for step in _steps(node)) else []


def _steps(node: fx.Node) -> Iterator[float]:
    """Yield the scales of the quantizers behind a node."""
    for reader in node.users:
        if quantizing(reader) == "quantize_per_tensor":
            yield reader.args[1]  # type: ignore[misc]
        elif reader.target in MOVES:
            yield from _steps(reader)
