"""Sums and means over axes: kept in float where OpenVINO would compute them from integers, and wrongly.

OpenVINO (2026.4.1, measured on a CPU with AVX-512 VNNI and without AMX) moves a dequantizer behind a ReduceSum or
ReduceMean and reduces the integers. Of 16 values along the second of three axes nothing that is right comes out (the
error is as large as the sums), and a sum of integers with a zero-point that is quantized again is off by 6 to 110 times
the largest sum, over whichever axes. An einsum sums so what has an axis that nothing else has. Means over a map, axes 2
and 3 of four, are right; over the two last of three they are not.

A norm, which does not ask how large its numbers are, is computed from the integers, too: what it adds to their variance
is then less by the square of the scale. Where numbers differ by few and small steps that is much.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from optimize.export.onnx_graph.variances import DEVIATIONS
from optimize.lint.graph import counts_beside, of_a_map, summed_alone
from optimize.quantization.graph.explicit_quantizers import moved, quantizing
from optimize.quantization.lowering.float_barrier import keep_floats

_ATEN = torch.ops.aten
_SUMS = (_ATEN.sum.dim_IntList, _ATEN.sum.default)
_MEANS = (_ATEN.mean.dim, _ATEN.mean.default)
# Which argument of a norm is what it adds to a variance, and what that is by default.
_EPSILONS: dict[Any, int] = {_ATEN.layer_norm.default: 4, _ATEN.group_norm.default: 4, _ATEN.instance_norm.default: 7}
_EPSILON = 1e-5


def keep_reductions(module: fx.GraphModule) -> int:
    """Put the maximum with the lowest float in front of what is summed, or meant over anything but a map, in place.

    A variance is such a mean; a norm is one where what it adds counts.

    Args:
        module: a program's, of ``aten`` operators.

    Returns:
        How many there are.
    """
    return keep_floats(module, _reduced)


def _reduced(node: fx.Node) -> Collection[fx.Node]:
    """What a node sums, means over anything but a map, or norms."""
    given: Any = node.args
    if (place := _EPSILONS.get(node.target)) is not None:
        before, epsilon = moved(given[0]), given[place] if len(given) > place else _EPSILON
        of_integers = quantizing(before) == "dequantize_per_tensor"
        return [given[0]] if of_integers and counts_beside(epsilon, before.args[1]) else []
    if node.target in (*_SUMS, *_MEANS, *DEVIATIONS) and not _of_a_map(node):
        return [given[0]]
    if node.target is _ATEN.einsum.default:
        return [given[1][number] for number in summed_alone(given[0])]
    return []


def _of_a_map(node: fx.Node) -> bool:
    """Whether it is a mean over the rows and columns of a map."""
    if node.target is not _ATEN.mean.dim:
        return False
    given: Any = node.args[0]
    axes: Any = node.args[1]
    return axes is not None and of_a_map(axes, given.meta["val"].ndim)
