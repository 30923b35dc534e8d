"""What is put together of integers, read so that OpenVINO can open the graph.

A ReLU, or what computes with a constant, reads a concatenation in integers before it is quantized again.

All that is put together has the range of the whole, and its quantizer gives the very integers that it is given: who
reads floats loses nothing without it. OpenVINO (2026.4.1) makes a ReLU behind it, a product or a sum with a constant, a
part of the quantizers, moves the next one in front of the concatenation (``MoveFakeQuantize``), and ends the process by
SIGSEGV: a network with ``torch.cat([a, b], 1).relu()`` or ``* 0.5`` between its layers could not be opened.

The same step fails where a linear layer reads what is put together along another axis than its own, as the tokens of a
cross-attention are: it divides the layer's weight by a scale for each token. ``pixel_shuffle`` of channels, and a
convolution of tokens behind a move, fail likewise. There the quantizer is parted from the concatenation.
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
#: What puts together: `roll` becomes a concatenation of slices.
_JOINS = (_ATEN.cat.default, _ATEN.roll.default)
_CONVOLUTIONS = tuple(getattr(_ATEN, f"conv{axes}d").default for axes in (1, 2, 3))
_PASSED = MOVES | {_ATEN.neg.default, *_JOINS}
_TOKENS = 3  # axes of images, tokens and channels


def read_joined(module: fx.GraphModule) -> int:
    """Let ReLUs and arithmetic with constants read concatenations without the quantizer behind them, in place.

    Args:
        module: a program's, of ``aten`` operators.

    Returns:
        How many operators read another node.
    """
    found = 0
    in_range = [(node, range_) for node in module.graph.nodes if (range_ := _range_of_parts(node)) is not None]
    for given, range_ in in_range:
        for quantizer in [user for user in given.users if _range(user, "quantize_per_tensor") == range_]:
            for dequantizer in list(quantizer.users):
                for reader in [user for user in dequantizer.users if _is_merged(user)]:
                    reader.replace_input_with(dequantizer, given)
                    found += 1
                    if reader.target is _RELU:  # of integers of a range it gives such integers
                        in_range.append((reader, range_))
    module.graph.eliminate_dead_code()
    module.recompile()
    return found


def part_joined(module: fx.GraphModule) -> int:
    """Put the maximum with the lowest float between a concatenation and its quantizer, where need be, in place.

    Args:
        module: a program's, of ``aten`` operators, with the shapes that it notes.

    Returns:
        How many concatenations.
    """
    return keep_floats(module, lambda node: [*node.args[:1]] if _is_misread(node) else [])  # type: ignore[list-item]


def _is_misread(quantizer: fx.Node) -> bool:
    """Whether it quantizes what is put together of integers for one who then gets them wrongly."""
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
    """The range of all that is put together; None: it has several, or nothing is."""
    if node.target is not _ATEN.cat.default:
        return None
    parts: Any = node.args[0]
    first, *others = {_range(part, "dequantize_per_tensor") for part in parts}
    return None if others else first


def _range(node: Any, kind: str) -> tuple[Any, ...] | None:
    """Scale, zero-point, ends and type of a quantizer or dequantizer of one scale; None: it is no such one."""
    return (*node.args[1:],) if quantizing(node) == kind else None


def _is_merged(node: fx.Node) -> bool:
    return node.target in _MERGED and sum(given.op != "get_attr" for given in node.all_input_nodes) == 1
