"""Separates maxima and minima over axes from the quantizer behind them, which OpenVINO fuses wrongly.

OpenVINO (2026.4.1) lets a ReduceMax or ReduceMin of floats write the bytes of the quantizer behind it. It does so if a
layer reads them, and it gets them wrong. A maximum over a map behind a ReLU, or over channels as in CBAM, keeps 12 dB.
Maxima of dequantized values, as right behind a convolution, are right.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from optimize.quantization.lowering.float_barrier import keep_floats

_ATEN = torch.ops.aten
_ALONE = (_ATEN.amax.default, _ATEN.amin.default)
_OF_SEVERAL = (_ATEN.max.dim, _ATEN.min.dim, _ATEN.aminmax.default)
_NORMS = (_ATEN.linalg_vector_norm.default, _ATEN.norm.ScalarOpt_dim)


def keep_extremes(module: fx.GraphModule) -> int:
    """Put the maximum with the lowest float behind maxima and minima over axes, in place.

    Args:
        module: of a program, with ``aten`` operators.

    Returns:
        The number of readers changed.
    """
    return keep_floats(module, _extremes)


def _extremes(reader: fx.Node) -> Collection[fx.Node]:
    return [given for given in reader.all_input_nodes if reader.op != "output" and _is_extreme(given)]


def _is_extreme(node: fx.Node) -> bool:
    """Tell whether a node gives the largest or smallest value or magnitude. An index does not count."""
    given: Any = node.args
    of_several = node.target is operator.getitem and given[0].target in _OF_SEVERAL
    of_magnitudes = node.target in _NORMS and len(given) > 1 and math.isinf(given[1])
    return node.target in _ALONE or of_several or of_magnitudes
