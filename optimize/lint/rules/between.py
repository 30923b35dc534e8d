"""Rules of what lies between quantized layers: sums, pools and norms in float there cost what quantization won."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto

from optimize.lint.base import Fault, LintTarget, rule
from optimize.lint.graph import LAYERS, Graph, label

_POOLS = ("MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool")


@rule("doubled-pair", "warning")
def doubled(graph: Graph, target: LintTarget) -> Iterator[Fault]:
    """Nothing is dequantized only to be quantized again: the second pair rounds anew, or does nothing."""
    for node in graph.of("QuantizeLinear"):
        before = graph.producer(node)
        if before is None or before.op_type != "DequantizeLinear" or graph.constant(node.input[0]):
            continue
        same = all(_equal(graph.values(node, number), graph.values(before, number)) for number in (1, 2))
        said = "by the same scale" if same else "by another scale"
        yield Fault(
            label(node),
            f"it quantizes {said} what {label(before)} has just dequantized",
            "take away the pair" if same else "let both sides share one scale",
        )


@rule("residual-in-float", "warning")
def residuals(graph: Graph, target: LintTarget) -> Iterator[Fault]:
    """The shortcut of a residual sum between quantized layers is quantized; one addend may come from a layer as it is.

    "Quantize the residual input in skip-connections" (TensorRT, Q/DQ Layer-Placement Recommendations; its TensorFlow
    toolkit's ``ResNetV1QDQCase``): the sum becomes part of the convolution that gives its other addend. With a shortcut
    in float that convolution gives floats, too.
    """
    for node in graph.of("Add", "Sum"):
        addends = [number for number, name in enumerate(node.input) if not graph.constant(name)]
        if len(addends) < 2 or not graph.before_integers(node):
            continue
        floats = [number for number in addends if not graph.dequantized(node, number)]
        if not floats or not any(graph.behind_integers(node, number) for number in addends):
            continue
        if len(floats) == 1 and _straight_from_layer(graph, graph.producer(node, floats[0])):
            continue
        yield Fault(
            label(node),
            f"{len(floats)} of the {len(addends)} tensors that it adds come in float",
            f"quantize the shortcut, {node.input[floats[-1]]}, before the sum",
        )


@rule("pool-in-float", "warning")
def pools(graph: Graph, target: LintTarget) -> Iterator[Fault]:
    """A pool between quantized layers takes integers.

    TensorRT moves a QuantizeLinear to before a MaxPool by itself ("Explicit Quantization": it commutes), not to before
    one that takes means.
    """
    for node in graph.of(*_POOLS, "ReduceMean"):
        if node.op_type in ("MaxPool", "GlobalMaxPool") and target == "tensorrt":
            continue
        between = graph.behind_integers(node) and graph.before_integers(node)
        if between and not graph.dequantized(node):
            yield Fault(label(node), "it pools in float between quantized layers", "quantize its input")


@rule("unfused-batchnorm", "warning")
def norms(graph: Graph, target: LintTarget) -> Iterator[Fault]:
    """A batch norm behind a layer is part of its weights, and quantized with them."""
    for node in graph.of("BatchNormalization"):
        before = graph.producer(node)
        while before is not None and before.op_type in ("QuantizeLinear", "DequantizeLinear") and graph.alone(before):
            before = graph.producer(before)
        if before is not None and before.op_type in LAYERS and graph.alone(before):
            yield Fault(
                label(node),
                f"it normalises what {label(before)} alone gives",
                "fold it into that layer before quantizing (the pass fuse; ONNX Runtime: quant_pre_process)",
            )


def _straight_from_layer(graph: Graph, producer: NodeProto | None) -> bool:
    return producer is not None and producer.op_type in LAYERS and graph.alone(producer)


def _equal(one: NDArray[Any] | None, other: NDArray[Any] | None) -> bool:
    if one is None or other is None:
        return one is other
    return bool(np.array_equal(one, other))
