"""Rules of scales and zero points: their values quantize at all, and suit the target."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from optimize.lint.base import TENSORRT, Fault, LintTarget, rule
from optimize.lint.graph import Graph, label, shown

_PAIR = ("QuantizeLinear", "DequantizeLinear")


@rule("scale", "error")
def scales(graph: Graph, target: LintTarget) -> Iterator[Fault]:
    """Scales are positive, finite and normal numbers.

    ONNX's QuantizeLinear divides by them. TensorRT's parser asserts "Scale coefficients must all be positive"
    (onnx-tensorrt, ``QuantDequantLinearHelper``). A scale of 0 comes from a tensor without values in calibration.
    Processors in FTZ mode flush a subnormal number to 0. So does the fast arithmetic of GPUs.
    """
    for node in graph.of(*_PAIR):
        scale = graph.values(node, 1)
        if scale is None:
            continue
        smallest = _smallest_normal(scale.dtype)
        scale = np.asarray(scale, np.float64)
        for bad, word in (
            (np.isnan(scale), "NaN"),
            (np.isinf(scale), "infinite"),
            (scale == 0, "0"),
            (scale < 0, "negative"),
            ((scale > 0) & (scale < smallest), "subnormal"),
        ):
            if bad.any():
                where = f" in {int(bad.sum())} of {bad.size} channels" if bad.size > 1 else ""
                yield Fault(
                    label(node),
                    f"its scale is {word}{where}",
                    "calibrate with images that reach this tensor, or give a constant tensor the scale 1",
                )
                break


@rule("computed-scale", "error")
def computed_scales(graph: Graph, target: LintTarget) -> Iterator[Fault]:
    """Scales and zero points are constants of the file. In a static graph, calibration found them.

    ONNX Runtime fuses only constant ones (``QDQ::…NodeGroupSelector``). With a computed scale a layer stays in float.
    """
    for node in graph.of(*_PAIR):
        for number, what in ((1, "scale"), (2, "zero-point")):
            given = number < len(node.input) and node.input[number]
            if given and graph.tensor(node, number) is None:
                yield Fault(
                    label(node),
                    f"its {what} is computed, not a constant",
                    "fold constants before quantizing, and quantize statically",
                )


@rule("zero-point", "error")
def zero_points(graph: Graph, target: LintTarget) -> Iterator[Fault]:
    """TensorRT needs zero points of 0 everywhere, CPUs for weights.

    TensorRT's parser: "TensorRT only supports symmetric quantization. The zero point for the
    QuantizeLinear/DequantizeLinear operator must be all zeros", and "The scale and zero point must have the same
    volume" (onnx-tensorrt, ``QuantDequantLinearHelper``; docs/operators.md). On CPUs, the
    kernels that VNNI makes fast have no zero point for each weight channel.
    """
    for node in graph.of(*_PAIR):
        zero, scale = graph.values(node, 2), graph.tensor(node, 1)
        if zero is None:
            continue
        weight = graph.constant(node.input[0])
        if (target == "tensorrt" or weight) and np.asarray(zero, np.float64).any():
            yield Fault(
                label(node),
                f"its zero-point is {shown(zero)}, and {'a weight' if weight else target} wants 0",
                "quantize symmetrically (ONNX Runtime: WeightSymmetric, ActivationSymmetric; torch: qscheme)",
            )
        elif scale is not None and zero.size != int(np.prod(scale.dims)):
            yield Fault(
                label(node),
                f"it has {int(np.prod(scale.dims))} scales and {zero.size} zero-points",
                "write as many of the one as of the other",
            )


@rule("per-channel-activation", "error", TENSORRT)
def per_channel_activations(graph: Graph, target: LintTarget) -> Iterator[Fault]:
    """An activation has one scale: "Activations-quantization does not support per-axis quantization".

    Source: a comment in onnx-tensorrt's ``QuantDequantLinearHelper``.
    """
    for node in graph.of(*_PAIR):
        scale = graph.tensor(node, 1)
        if scale is not None and int(np.prod(scale.dims)) > 1 and not graph.constant(node.input[0]):
            yield Fault(label(node), "an activation has a scale for each channel", "quantize activations per tensor")


def _smallest_normal(dtype: np.dtype[Any]) -> float:
    return float(np.finfo(dtype).tiny) if dtype in (np.float16, np.float32, np.float64) else 0.0
