"""Rules of weights. Integers in the file, one scale per output channel, and a quantized input."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from onnx import NodeProto, TensorProto

from optimize.lint.base import CPUS, TENSORRT, Fault, LintTarget, rule
from optimize.lint.graph import LAYERS, MOVES, Graph, attribute, label

# Operators between a weight and its layer that keep its axes.
_KEEPS_AXES = ("Identity", "Dropout", "Cast")


@rule("unfolded-weight", "warning")
def unfolded(graph: Graph, target: LintTarget) -> Iterator[Fault]:
    """Weights are integers in the file, not floats behind a QuantizeLinear.

    Both are legal (TensorRT takes "high-precision" and "pre-quantized weights", see "Explicit Quantization" in its
    documentation). But the file is four times as large. And the tool that folds the weights later rounds ties in its
    own way.
    """
    for node in graph.of("QuantizeLinear"):
        if graph.constant(node.input[0]):
            yield Fault(
                label(node),
                f"the constant {node.input[0]} is stored in float and quantized whenever the graph is loaded",
                "store the integers themselves, with a DequantizeLinear alone",
            )


@rule("half-quantized-layer", "warning")
def half_quantized(graph: Graph, target: LintTarget) -> Iterator[Fault]:
    """Input and weight of a layer are both quantized, or neither. With one in float, it computes in float."""
    for layer in graph.of(*LAYERS):
        if len(layer.input) < 2 or not graph.constant(layer.input[1]):
            continue
        weight, taken = graph.weight(layer), graph.dequantized(layer)
        if taken and weight is None:
            yield Fault(
                label(layer),
                "its input is quantized and its weight is in float",
                "quantize its weight, or keep both in float",
            )
        elif weight is not None and not taken and not graph.constant(layer.input[0]):
            yield Fault(
                label(layer),
                "its weight is quantized and its input is in float",
                "quantize its input, or keep both in float",
            )


@rule("axis", "error")
def axes(graph: Graph, target: LintTarget) -> Iterator[Fault]:
    """A weight with several scales has one for each output channel.

    The channels are axis 0 of a convolution's weight, and axis 1 of a transposed one's. For a Gemm or MatMul they are
    the columns of the product. ONNX's default is axis 1. TensorRT's parser: "The number of scales is not equal to the
    number of output channels" (onnx-tensorrt, ``QuantDequantLinearHelper``). Blocks of weights (``block_size``, from
    opset 21 on) have their own scales. They are not checked.
    """
    for layer in graph.of(*LAYERS):
        weight = graph.weight(layer)
        shape = graph.stored_shape(weight)
        scale = graph.tensor(weight, 1) if weight is not None else None
        if weight is None or scale is None or not shape or (count := int(np.prod(scale.dims))) == 1:
            continue
        if attribute(weight, "block_size", 0):
            continue
        given = int(attribute(weight, "axis", 1)) % len(shape)
        wanted = _output_axis(graph, layer, len(shape))
        if wanted is not None and wanted < len(shape) and (given != wanted or shape[given] != count):
            yield Fault(
                label(weight),
                f"the weight {list(shape)} of {label(layer)} has {count} scales along axis {given}, and its output "
                f"channels lie along axis {wanted}",
                f"write axis={wanted} and a scale for each of the {shape[wanted]} channels",
            )


@rule("int32-bias", "error", TENSORRT)
def int32_bias(graph: Graph, target: LintTarget) -> Iterator[Fault]:
    """Biases are floats for TensorRT.

    For an int32 bias behind a DequantizeLinear its parser says "only activation types allowed as input to this layer"
    (onnx-tensorrt issue 850, TensorRT issue 3360). The types that docs/operators.md lists are INT8, FP8, FP4 and INT4.
    """
    for node in graph.of("DequantizeLinear"):
        if graph.constant(node.input[0]) and graph.integers(node) == TensorProto.INT32:
            yield Fault(
                label(node),
                "a bias of int32 is dequantized",
                "write the bias in float (ONNX Runtime's quantizer: extra_options QuantizeBias=False)",
            )


@rule("weight-128", "warning", CPUS)
def least_integer(graph: Graph, target: LintTarget) -> Iterator[Fault]:
    """Symmetric weights of 8 bits stay within −127 … 127. Then −w is representable whenever w is.

    A −128 shows that the tool clipped to other bounds than those of its scales. Torch's two conversions differ in it.
    """
    for layer in graph.of(*LAYERS):
        weight = graph.weight(layer)
        integers = graph.values(weight, 0) if weight is not None else None
        if weight is not None and integers is not None and integers.dtype == np.int8 and (integers == -128).any():
            count = int((integers == -128).sum())
            yield Fault(label(weight), f"{count} integers are −128", "quantize weights to −127 … 127 (quant_min=-127)")


def _output_axis(graph: Graph, layer: NodeProto, rank: int) -> int | None:
    """Return the axis of a layer's stored weight with its output channels.

    None: the weight is moved in another way.
    """
    of_a_map = layer.op_type in ("Conv", "ConvTranspose")
    last = not (layer.op_type == "Gemm" and attribute(layer, "transB", 0))
    node = graph.producer(layer, 1)
    while node is not None and node.op_type in (*MOVES, "Cast"):
        if node.op_type == "Transpose" and not of_a_map:
            last = not last
        elif node.op_type not in _KEEPS_AXES:
            return None
        node = graph.producer(node)
    if of_a_map:
        return int(layer.op_type == "ConvTranspose")
    return rank - 1 if last else max(rank - 2, 0)
