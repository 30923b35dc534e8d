"""Shares that a softmax gives, kept from wrapping around where a whole is more than 256 steps of their quantizer.

ONNX Runtime (1.31) makes of a softmax between integers one operator of them, which does not saturate: a share of more
steps comes out as what is left beyond 256. SKNet's branches, weighed by such shares, had an SQNR of 1.8 dB against what
the integers mean.
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
    """Put the maximum with the lowest float in front of a softmax whose shares may lie beyond their range, in place.

    Args:
        module: a program's, of ``aten`` operators.

    Returns:
        How many there are.
    """
    return keep_floats(module, _beyond)


def _beyond(node: fx.Node) -> Collection[fx.Node]:
    """The integers that a node takes the softmax of, if a share of 1 is more steps than a byte has."""
    given: Any = node.args[0] if node.target is _SOFTMAX else None
    of_integers = quantizing(moved(given)) == "dequantize_per_tensor"
    return [given] if of_integers and any(256 * step < 1 for step in _steps(node)) else []


def _steps(node: fx.Node) -> Iterator[float]:
    """The scales of quantizers behind a node."""
    for reader in node.users:
        if quantizing(reader) == "quantize_per_tensor":
            yield reader.args[1]  # type: ignore[misc]
        elif reader.target in MOVES:
            yield from _steps(reader)
