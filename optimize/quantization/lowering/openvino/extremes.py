"""Maxima and minima over axes: kept from the quantizer behind them, which OpenVINO would make a part of them.

OpenVINO (2026.4.1) lets a ReduceMax or ReduceMin of floats write the bytes of the quantizer behind it, where a layer
reads those, and gets them wrong: of a maximum over a map behind a ReLU, or over channels as in CBAM, 12 dB are left.
Maxima of what is dequantized, as behind a convolution alone, are right.
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
        module: a program's, of ``aten`` operators.

    Returns:
        How many operators read one.
    """
    return keep_floats(module, _extremes)


def _extremes(reader: fx.Node) -> Collection[fx.Node]:
    return [given for given in reader.all_input_nodes if reader.op != "output" and _is_extreme(given)]


def _is_extreme(node: fx.Node) -> bool:
    """Whether a node gives the largest or smallest of numbers, or of their magnitudes; where that is, is whole."""
    given: Any = node.args
    of_several = node.target is operator.getitem and given[0].target in _OF_SEVERAL
    of_magnitudes = node.target in _NORMS and len(given) > 1 and math.isinf(given[1])
    return node.target in _ALONE or of_several or of_magnitudes
