"""Sums and products with a number, kept in float: torch's packed kernels compute others than the reference form says.

FX (2.11 to 2.14; pytorch PR 61859) gives the answer of such an operator the range of what it reads. The reference form,
and each graph made of it, round to that range and cut off what lies outside. The packed program does neither: a product
changes the scale of its integers and none of these, and a sum rounds the number to a multiple of its scale. Of a small
network with ``0.37 * x + 0.02`` between two layers half of the integers were others, and torchvision's GoogLeNet and
Inception, which normalise their images once more, had an SQNR of 15 and 14 dB to what their integers mean.

Called as a method, the same sum is one that FX has no kernel for, as it has none for a difference or a quotient: in
every engine it is computed in float, between a dequantizer and the quantizer of what reads it.

So is that of a column and a row: torch's integer sum (2.11 to 2.14) makes room for as much as its first operand has,
and warns that it soon will not make more. Of a small and a large one the large is the first.

Python's ``sum`` of tensors begins with a 0, which is left out: the exporter does so, and quantizes once what was two.

Arguments by name are FX's other blind spot: of ``torch.add(x, y, alpha=3)`` it drops the 3, and on ``other=`` it fails.
"""

from __future__ import annotations

import operator
from typing import Any, Final

import torch
from torch import fx

from optimize.quantization.graph.editing import is_float, replace, shape_of
from optimize.quantization.graph.in_place_writes import writes

_METHODS: Final[dict[Any, str]] = {
    **dict.fromkeys((operator.add, operator.iadd, torch.add), "add"),
    **dict.fromkeys((operator.mul, operator.imul, torch.mul), "mul"),
}


def free_scalars(module: fx.GraphModule) -> int:
    """Write sums and products with a number, and what FX has no kernel for, as calls of a tensor's method, in place.

    Args:
        module: traced, with the shapes that `note_shapes` notes.

    Returns:
        How many were written.
    """
    for node in [node for node in module.graph.nodes if node.target is operator.add and node.args[0] == 0]:
        if is_float(node.args[1]) and not any(writes(module, user) for user in node.users):
            replace(node, node.args[1])
    found = [node for node in module.graph.nodes if node.op == "call_function" and node.target in _METHODS]
    written = 0
    for node in found:
        settings = dict(node.kwargs)
        operands = [*node.args, *(settings.pop(name) for name in ("input", "other") if name in settings)]
        if len(operands) != 2 or all(shape_of(operand) is None for operand in operands):
            continue  # of sizes
        grows = shape_of(node) is not None and shape_of(node) not in map(shape_of, operands)
        if not all(is_float(operand) for operand in operands) or settings or grows:
            if "alpha" not in settings:
                operands.sort(key=lambda operand: (not is_float(operand), shape_of(operand) is None))
            elif shape_of(operands[0]) is None:  # only a tensor has methods, and it is the second that is multiplied
                with module.graph.inserting_before(node):
                    operands = [module.graph.call_method("mul", (operands[1], settings.pop("alpha"))), operands[0]]
            node.op, node.target = "call_method", _METHODS[node.target]
            written += 1
        elif shape_of(operands[0]) != shape_of(node):
            operands.reverse()
        node.args, node.kwargs = tuple(operands), settings
    module.recompile()
    return written
