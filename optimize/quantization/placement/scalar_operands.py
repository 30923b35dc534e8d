"""Keeps sums and products with a number in float, because torch's packed kernels differ from the reference form.

FX (2.11 to 2.14; pytorch PR 61859) gives the output of such an operator the range of its input. The reference form, and
each graph made of it, rounds to that range and clips values outside it. The packed program does neither. A product
changes the scale of its integers, but not the integers. A sum rounds the number to a multiple of its scale. In a small
network with ``0.37 * x + 0.02`` between two layers, half of the integers differed. Torchvision's GoogLeNet and
Inception normalise their images once more. They had an SQNR of 15 and 14 dB to the exact result of their integers.

FX has no kernel for the same sum called as a method, as it has none for a difference or a quotient. Every engine then
computes it in float, between a dequantizer and the quantizer of its reader.

The same is done for a sum of a column and a row. Torch's integer sum (2.11 to 2.14) allocates the size of its first
operand, and warns that it will soon stop to grow it. With a small and a large operand, the large one comes first.

Python's ``sum`` of tensors begins with a 0. It is left out here: the exporter leaves it out and would quantize once
where there were two quantizers.

FX also mishandles keyword arguments. It drops the 3 of ``torch.add(x, y, alpha=3)``, and it fails on ``other=``.
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
    """Write sums and products with a number, and those without an FX kernel, as method calls of a tensor, in place.

    Args:
        module: traced, with the shapes that `note_shapes` notes.

    Returns:
        The number of calls written.
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
            continue  # arithmetic on sizes
        grows = shape_of(node) is not None and shape_of(node) not in map(shape_of, operands)
        if not all(is_float(operand) for operand in operands) or settings or grows:
            if "alpha" not in settings:
                operands.sort(key=lambda operand: (not is_float(operand), shape_of(operand) is None))
            elif shape_of(operands[0]) is None:  # only tensors have methods, and `alpha` scales the second one
                with module.graph.inserting_before(node):
                    operands = [module.graph.call_method("mul", (operands[1], settings.pop("alpha"))), operands[0]]
            node.op, node.target = "call_method", _METHODS[node.target]
            written += 1
        elif shape_of(operands[0]) != shape_of(node):
            operands.reverse()
        node.args, node.kwargs = tuple(operands), settings
    module.recompile()
    return written
