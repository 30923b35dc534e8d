"""Keeps sums and means over axes in float, because OpenVINO computes them wrongly from integers.

OpenVINO (2026.4.1) moves a dequantizer behind a ReduceSum or ReduceMean and reduces the integers. This was measured on
a CPU with AVX-512 VNNI and without AMX. Over 16 values along the second of three axes, all results are wrong. The error
is as large as the sums. A sum of integers with a zero point that is quantized again is off by 6 to 110 times the
largest sum, over any axes. An einsum computes such a sum for an axis that nothing else has. Means over a map, axes 2
and 3 of four, are right. Means over the last two of three axes are not.

A norm is also computed from the integers, because the scale of its input cancels. The epsilon that it adds to their
variance then counts less, by the square of the scale. That matters where values differ by few and small steps.
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
# Position of a norm's epsilon among its arguments, and the default epsilon.
_EPSILONS: dict[Any, int] = {_ATEN.layer_norm.default: 4, _ATEN.group_norm.default: 4, _ATEN.instance_norm.default: 7}
_EPSILON = 1e-5


def keep_reductions(module: fx.GraphModule) -> int:
    """Put the maximum with the lowest float in front of sums, and of means over other axes than a map's, in place.

    A variance is such a mean. A norm is one if its epsilon matters.

    Args:
        module: of a program, with ``aten`` operators.

    Returns:
        The number of nodes changed.
    """
    return keep_floats(module, _reduced)


def _reduced(node: fx.Node) -> Collection[fx.Node]:
    """Return the inputs that a node sums, averages over other axes than a map's, or normalises."""
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
    """Tell whether a node is a mean over the rows and columns of a map."""
    if node.target is not _ATEN.mean.dim:
        return False
    given: Any = node.args[0]
    axes: Any = node.args[1]
    return axes is not None and of_a_map(axes, given.meta["val"].ndim)
