"""Sums and means over axes: kept in float where OpenVINO would compute them from integers, and wrongly.

OpenVINO (2026.4.1, measured on a CPU with AVX-512 VNNI and without AMX) moves a dequantizer behind a ReduceSum or
ReduceMean and reduces the integers. Of 16 values along the second of three axes nothing that is right comes out (the
error is as large as the sums), and a sum of integers with a zero-point that is quantized again is off by 6 to 110 times
the largest sum, over whichever axes. An einsum sums so what has an axis that nothing else has. Means over a map, axes 2
and 3 of four, are right; over the two last of three they are not.

Behind the larger of its input and the lowest float, which is the input, no dequantizer is moved: the numbers are those
that the graph means, in every engine.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from optimize.lint.graph import of_a_map, summed_alone

_ATEN = torch.ops.aten
_SUMS = (_ATEN.sum.dim_IntList, _ATEN.sum.default)
_MEANS = (_ATEN.mean.dim, _ATEN.mean.default)
_LOWEST = "lowest_float"


def keep_reductions(module: fx.GraphModule) -> int:
    """Put the maximum with the lowest float in front of what is summed, or meant over anything but a map, in place.

    Args:
        module: a program's, of ``aten`` operators.

    Returns:
        How many there are.
    """
    found = 0
    for node in list(module.graph.nodes):
        if node.target in (*_SUMS, *_MEANS) and not _of_a_map(node):
            node.args = (kept(module, node, node.args[0]), *node.args[1:])
            found += 1
        elif node.target is _ATEN.einsum.default and (alone := summed_alone(node.args[0])):
            operands = [kept(module, node, x) if i in alone else x for i, x in enumerate(node.args[1])]
            node.args = (node.args[0], operands, *node.args[2:])
            found += 1
    module.recompile()
    return found


def kept(module: fx.GraphModule, node: fx.Node, given: fx.Node) -> fx.Node:
    """The maximum of what a node is given and the lowest float, which is what it is given, written before it."""
    with module.graph.inserting_before(node):
        if not hasattr(module, _LOWEST):
            module.register_buffer(_LOWEST, torch.tensor(torch.finfo(torch.float32).min))
        return module.graph.call_function(_ATEN.maximum.default, (given, module.graph.get_attr(_LOWEST)))


def _of_a_map(node: fx.Node) -> bool:
    """Whether it is a mean over the rows and columns of a map."""
    if node.target is not _ATEN.mean.dim:
        return False
    given: Any = node.args[0]
    axes: Any = node.args[1]
    return axes is not None and of_a_map(axes, given.meta["val"].ndim)
