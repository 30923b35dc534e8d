"""Rules of operators between quantized layers. Sums, pools and norms in float lose what quantization gained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto

from optimize.lint.base import Fault, LintTarget, rule
from optimize.lint.graph import LAYERS, Graph, attribute, label

#: Operators that quantize, and that clip integers to a range.
_PAIR = ("QuantizeLinear", "DequantizeLinear", "Clip")
# Images and channels come before it.
_FIRST_PLACE = 2
_POOLS = ("MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool")


@rule("doubled-pair", "warning")
def doubled(graph: Graph, target: LintTarget) -> Iterator[Fault]:
    """Nothing is dequantized only to be quantized again. The second pair rounds again, or does nothing."""
    for node in graph.of("QuantizeLinear"):
        before = graph.producer(node)
        if before is None or before.op_type != "DequantizeLinear" or graph.constant(node.input[0]):
            continue
        same = all(_equal(graph.values(node, number), graph.values(before, number)) for number in (1, 2))
        said = "by the same scale" if same else "by another scale"
        yield Fault(
            label(node),
            f"it quantizes {said} what {label(before)} has just dequantized",
            "remove the pair" if same else "let both sides share one scale",
        )


@rule("residual-in-float", "warning")
def residuals(graph: Graph, target: LintTarget) -> Iterator[Fault]:
    """The shortcut of a residual sum between quantized layers is quantized. One addend may come directly from a layer.

    "Quantize the residual input in skip-connections" (TensorRT, Q/DQ Layer-Placement Recommendations. Its TensorFlow
    toolkit's ``ResNetV1QDQCase``). The sum then becomes part of the convolution that gives its other addend. With a
    float shortcut that convolution also gives floats.
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
    """A pool between quantized layers reads integers.

    TensorRT moves a QuantizeLinear in front of a MaxPool by itself ("Explicit Quantization": it commutes). It does not
    do so with an average pool.
    """
    for node in graph.of(*_POOLS, "ReduceMean"):
        if node.op_type in ("MaxPool", "GlobalMaxPool") and target == "tensorrt":
            continue
        between = graph.behind_integers(node) and graph.before_integers(node)
        if between and not graph.dequantized(node):
            yield Fault(label(node), "it pools in float between quantized layers", "quantize its input")


@rule("padded-layer", "warning")
def padded_layers(graph: Graph, target: LintTarget) -> Iterator[Fault]:
    """Zeros around the input of quantized convolutions are their own padding. Engines fold no Pad between quantizers.

    ONNX Runtime (1.31, ``PadFusion``) and OpenVINO (2026.4) fold a Pad that a convolution reads directly. A quantized
    convolution pads with the zero point, which stands for zero. A Pad between two scales stays. ONNX Runtime merges two
    pairs in a row (``DoubleQDQPairsRemover``), which gives other numbers.
    """
    for node in graph.of("Pad"):
        if not _is_of_zeros(graph, node):
            continue
        layers = list(_readers(graph, node))
        if layers and not _rounded_otherwise(graph, node) and all(_can_pad(graph, *layer, node) for layer in layers):
            yield Fault(
                label(node),
                f"it puts zeros around what {label(layers[0][0])} reads, in front of a quantizer or between it and the "
                "DequantizeLinear, and takes time",
                "add its sizes to the convolution's pads",
            )


def _is_of_zeros(graph: Graph, pad: NodeProto) -> bool:
    """Tell whether a Pad only adds zeros, or zero points for integers, in a constant number."""
    sizes, number = graph.values(pad, 1), graph.values(pad, 2)
    if sizes is None or (sizes < 0).any() or not sizes.any() or attribute(pad, "mode", b"constant") != b"constant":
        return False
    if number is None and any(pad.input[2:3]):
        return False
    added = 0 if number is None or not number.size else number.ravel()[0]
    zeros = [graph.values(taker, 2) for taker in graph.takers(pad) if taker.op_type == "DequantizeLinear"]
    return all(bool((np.asarray(0 if zero is None else zero) == added).all()) for zero in zeros or [None])


def _rounded_otherwise(graph: Graph, pad: NodeProto) -> bool:
    """Tell whether a Pad's input was dequantized, and its output is quantized with another scale."""
    before = graph.producer(pad)
    if before is None or before.op_type != "DequantizeLinear":
        return False
    pairs = [(taker, number) for taker in graph.takers(pad) if taker.op_type == "QuantizeLinear" for number in (1, 2)]
    return not all(_equal(graph.values(taker, number), graph.values(before, number)) for taker, number in pairs)


def _readers(graph: Graph, pad: NodeProto) -> Iterator[tuple[NodeProto, NodeProto]]:
    """Yield the readers of a Pad's output, also those behind quantizers. With each comes the node that it reads."""
    waiting, seen = [pad], set[str]()
    while waiting:
        given = waiting.pop()
        if given.output[0] in graph.outputs:
            yield given, given  # the graph's output is no layer
        for taker in graph.takers(given):
            if taker.op_type not in _PAIR:
                yield taker, given
            elif taker.output[0] not in seen:
                seen.add(taker.output[0])
                waiting.append(taker)


def _can_pad(graph: Graph, layer: NodeProto, given: NodeProto, pad: NodeProto) -> bool:
    """Tell whether a node is a convolution that reads a DequantizeLinear, and can pad as a Pad does."""
    kernel, sizes, axes = graph.kernel(layer) or (), graph.values(pad, 1), graph.values(pad, 3)
    read = [name == given.output[0] for name in layer.input]
    integers = graph.weight(layer) is not None and given.op_type == "DequantizeLinear"
    if layer.op_type != "Conv" or not integers or sizes is None or not read[0] or any(read[1:]):
        return False
    rank = len(kernel) or 4  # a file need not give a weight's shape, and most are of maps
    around = range(sizes.size // 2) if axes is None else [int(axis) % rank for axis in axes.ravel()]
    if sizes.size != 2 * len(around) or any(pad.input[3:]) != (axes is not None):
        return False
    ends = sizes.reshape(2, -1)
    of_channels = any(ends[:, place].any() for place, axis in enumerate(around) if axis < _FIRST_PLACE)
    return not of_channels and attribute(layer, "auto_pad", b"NOTSET") in (b"NOTSET", b"VALID")


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
                f"it normalizes the output of {label(before)}, which nothing else reads",
                "fold it into that layer before quantizing (the pass fuse; ONNX Runtime: quant_pre_process)",
            )


def _straight_from_layer(graph: Graph, producer: NodeProto | None) -> bool:
    return producer is not None and producer.op_type in LAYERS and graph.alone(producer)


def _equal(one: NDArray[Any] | None, other: NDArray[Any] | None) -> bool:
    if one is None or other is None:
        return one is other
    return bool(np.array_equal(one, other))
