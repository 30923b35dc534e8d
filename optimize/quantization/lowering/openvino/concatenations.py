"""Rewrites reads of integer concatenations so that OpenVINO can open the graph.

A concatenation has one range, and its quantizer returns the same integers. Readers of floats lose nothing without it.
OpenVINO (2026.4.1) fuses a ReLU behind it, or a product or a sum with a constant, into the quantizers. It then moves
the next quantizer in front of the concatenation (``MoveFakeQuantize``). That ends the process by SIGSEGV. A network
with ``torch.cat([a, b], 1).relu()`` or ``* 0.5`` between its layers could not be opened. So a ReLU or arithmetic with a
constant reads the concatenation without the quantizer.

The same step fails if a linear layer reads a concatenation along another axis than its own. The tokens of a
cross-attention are an example. OpenVINO divides the layer's weight by a scale for each token. A ``pixel_shuffle`` of
channels, and a convolution of tokens that were moved, fail likewise. There the quantizer is separated from the
concatenation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from optimize.quantization.graph.explicit_quantizers import MOVES, quantizing
from optimize.quantization.graph.nodes import leads_to
from optimize.quantization.lowering.float_barrier import keep_floats

_ATEN = torch.ops.aten
_RELU = _ATEN.relu.default
_MERGED = {_RELU} | {
    getattr(getattr(_ATEN, name), kind) for name in ("add", "sub", "mul", "div") for kind in ("Tensor", "Scalar")
}
#: Concatenations. A `roll` becomes a concatenation of slices.
_JOINS = (_ATEN.cat.default, _ATEN.roll.default)
_CONVOLUTIONS = tuple(getattr(_ATEN, f"conv{axes}d").default for axes in (1, 2, 3))
_PASSED = MOVES | {_ATEN.neg.default, *_JOINS}
_TOKENS = 3  # axes of images, tokens and channels


def read_joined(module: fx.GraphModule) -> int:
    """Let ReLUs and arithmetic with constants read concatenations without the quantizer between them, in place.

    Args:
        module: of a program, with ``aten`` operators.

    Returns:
        The number of operators that read another node.
    """
    found = 0
    in_range = [(node, range_) for node in module.graph.nodes if (range_ := _range_of_parts(node)) is not None]
    for given, range_ in in_range:
        for quantizer in [user for user in given.users if _range(user, "quantize_per_tensor") == range_]:
            for dequantizer in list(quantizer.users):
                for reader in [user for user in dequantizer.users if _is_merged(user)]:
                    reader.replace_input_with(dequantizer, given)
                    found += 1
                    if reader.target is _RELU:  # with integers of one range as input, its output has the same range
                        in_range.append((reader, range_))
    module.graph.eliminate_dead_code()
    module.recompile()
    return found


def part_joined(module: fx.GraphModule) -> int:
    """Put the maximum with the lowest float between a concatenation and its quantizer where needed, in place.

    Args:
        module: of a program, with ``aten`` operators and noted shapes.

    Returns:
        The number of concatenations changed.
    """
    return keep_floats(module, lambda node: [*node.args[:1]] if _is_misread(node) else [])  # type: ignore[list-item]


def _is_misread(quantizer: fx.Node) -> bool:
    """Tell whether a node quantizes a concatenation of integers for a reader that then fails."""
    joined: Any = quantizer.args[0] if quantizing(quantizer) == "quantize_per_tensor" else None
    if joined is None or joined.target not in _JOINS:
        return False
    parts: Any = joined.args[0] if joined.target is _ATEN.cat.default else [joined.args[0]]
    if not all(quantizing(part) == "dequantize_per_tensor" for part in parts):
        return False
    rank = joined.meta["val"].ndim
    axis = joined.args[1] if joined.target is _ATEN.cat.default and len(joined.args) > 1 else 0
    own = joined.target is _ATEN.cat.default and axis % rank == rank - 1
    direct = {reader for pair in quantizer.users for reader in pair.users}

    def misreads(reader: fx.Node) -> bool:
        if reader.target is _ATEN.linear.default:
            return not (own and reader in direct)
        line = reader.target in _CONVOLUTIONS and rank == _TOKENS and reader not in direct
        return line or reader.target is _ATEN.pixel_shuffle.default

    return leads_to(quantizer, misreads, lambda node: node.target in _PASSED or bool(quantizing(node)))


def _range_of_parts(node: fx.Node) -> tuple[Any, ...] | None:
    """Return the common range of all concatenated parts, or None."""
    if node.target is not _ATEN.cat.default:
        return None
    parts: Any = node.args[0]
    first, *others = {_range(part, "dequantize_per_tensor") for part in parts}
    return None if others else first


def _range(node: Any, kind: str) -> tuple[Any, ...] | None:
    """Return scale, zero point, bounds and type of a per-tensor quantizer or dequantizer, or None for other nodes."""
    return (*node.args[1:],) if quantizing(node) == kind else None


def _is_merged(node: fx.Node) -> bool:
    return node.target in _MERGED and sum(given.op != "get_attr" for given in node.all_input_nodes) == 1
