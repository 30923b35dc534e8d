"""Rules of integers. The graph has some, their types suit the target, and they are within its range."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from onnx import NodeProto, TensorProto

from optimize.lint.base import CPUS, TENSORRT, Fault, LintTarget, rule
from optimize.lint.graph import LAYERS, Graph, label
from serve.runtime.device.cpu_integers import WEIGHT_MAX

_PAIR = ("QuantizeLinear", "DequantizeLinear")
_WHOLE = ("QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger", "QLinearAdd", "QGemm")
#: Types that DequantizeLinear reads and QuantizeLinear makes in TensorRT 10.15 (onnx-tensorrt, docs/operators.md).
_OF_TENSORRT = {"INT8", "INT4", "FLOAT8E4M3FN", "FLOAT4E2M1"}
#: The largest activations of 7 bits and of 8.
_SEVEN_BITS, _EIGHT_BITS = 127, 255
_MOST_OF_16_BITS = 32_767


@rule("nothing-quantized", "error")
def nothing(graph: Graph, target: LintTarget) -> Iterator[Fault]:
    """A quantized graph has quantizers. Some exporters silently return a float graph."""
    if not any(graph.of(*_PAIR, *_WHOLE)):
        yield Fault(
            "the graph", "nothing is quantized: this is a float graph", "quantize it first, then lint the result"
        )


@rule("integer-type", "error", TENSORRT)
def types(graph: Graph, target: LintTarget) -> Iterator[Fault]:
    """Integers are signed and of 8 bits (or of 4, or FP8, for weights).

    DequantizeLinear takes INT8, FP8, FP4 and INT4 (onnx-tensorrt, docs/operators.md). "UINT8 is only supported as
    network input or output tensor types". Its parser otherwise takes uint8 for int8 ("TensorRT will use INT8 instead").
    """
    for node in graph.of(*_PAIR):
        kind = TensorProto.DataType.Name(graph.integers(node))
        if kind not in _OF_TENSORRT and not (kind == "INT32" and graph.constant(node.input[0])):  # see int32-bias
            yield Fault(label(node), f"its integers are {kind}", "quantize to int8 (torch.qint8, QuantType.QInt8)")


@rule("slow-integers", "warning", CPUS)
def slow(graph: Graph, target: LintTarget) -> Iterator[Fault]:
    """Activations are uint8 and weights int8, the types that VNNI multiplies.

    On a CPU, ONNX Runtime was four times slower with int8 activations than with uint8 (1.31, ResNet-18).
    """
    for layer in graph.of(*LAYERS):
        for number, wanted in ((0, "UINT8"), (1, "INT8")):
            before = graph.weight(layer) if number else graph.producer(layer)
            if before is None or before.op_type != "DequantizeLinear":
                continue
            kind = TensorProto.DataType.Name(graph.integers(before))
            if kind != wanted:
                what = "weight" if number else "input"
                yield Fault(label(layer), f"its {what} is {kind}", f"quantize it to {wanted.lower()}")


@rule("saturating-sums", "error", ("x86",))
def sums(graph: Graph, target: LintTarget) -> Iterator[Fault]:
    """The sum of two products of a layer's input and its weight fits into 16 bits. One of the two has 7 bits.

    CPUs without VNNI multiply unsigned by signed bytes, and add pairs of products in 16 bits. VPMADDUBSW, which does
    it, saturates. Two products of 255 · 127 do not fit. There are two remedies. Weights of -63 to 63 are one (ONNX
    Runtime's ``reduce_range``, NNCF's ``overflow_fix``). Activations of 0 to 127 are the other, and each needs a Clip
    (torch's ``reduce_range``).
    """
    for layer in graph.of(*LAYERS):
        given, weight = graph.dequantizer(layer), graph.weight(layer)
        integers = graph.values(weight, 0) if weight is not None else None
        if given is None or integers is None or not integers.size or graph.integers(given) != TensorProto.UINT8:
            continue
        reach, largest = _reach(graph, given), int(np.abs(integers.astype(np.int32)).max())
        if 2 * reach * largest > _MOST_OF_16_BITS:
            yield Fault(
                label(layer),
                f"its input reaches {reach} and its weight {largest}: two such products do not fit into 16 bits",
                f"quantize its weight to -{WEIGHT_MAX} to {WEIGHT_MAX}, or put a Clip to 0 and {_SEVEN_BITS} behind "
                "its input's quantizer",
            )


@rule("lost-clamp", "error", CPUS)
def clamps(graph: Graph, target: LintTarget) -> Iterator[Fault]:
    """If activations have 7 bits, each quantizer of a layer's input has a Clip that keeps them there.

    QuantizeLinear saturates at 255, the end of its type, and not at the end of 7 bits. The exporter of torch 2.11 to
    2.14 drops the clamp (onnxscript pull request 3052). A clamp counts as lost if other quantizers of the graph have
    one. A ReLU6's Clip does not count, unless its bound becomes an integer within the range. A Clip on the integers,
    behind the quantizer, is better. A float Clip before it keeps ONNX Runtime (1.31) from computing the layer in
    integers.
    """
    read = [node for node in graph.of("QuantizeLinear") if _feeds_layer(graph, node)]
    unsigned = [node for node in read if graph.integers(node) == TensorProto.UINT8]
    if not any(_bounds(graph, node) == (0, _SEVEN_BITS) for node in unsigned):
        return
    for node in unsigned:
        bounds = _bounds(graph, node)
        if bounds is None or bounds[1] > _SEVEN_BITS:
            largest = _EIGHT_BITS if bounds is None else bounds[1]
            yield Fault(
                label(node),
                f"a layer's input reaches {largest}, where 7 bits end at {_SEVEN_BITS}",
                f"put a Clip to {0} and {_SEVEN_BITS} behind it",
            )


def _feeds_layer(graph: Graph, quantizer: NodeProto) -> bool:
    return any(
        taker.op_type in LAYERS and not graph.constant(quantizer.input[0])
        for dequantizer in graph.takers(graph.last(quantizer))
        if dequantizer.op_type == "DequantizeLinear"
        for taker in graph.takers(dequantizer)
    )


def _reach(graph: Graph, dequantizer: NodeProto) -> int:
    """Return the largest integer that a DequantizeLinear of uint8 can get."""
    quantizer = graph.quantizer(dequantizer)
    bounds = None if quantizer is None else _bounds(graph, quantizer)
    return _EIGHT_BITS if bounds is None else min(bounds[1], _EIGHT_BITS)


def _bounds(graph: Graph, quantizer: NodeProto) -> tuple[int, int] | None:
    """Return the integer bounds of a quantizer's Clip, behind it or before it. None if there is no such Clip.

    The quantizer has the type uint8. If the Clip has no bound, or an infinite one, the end of uint8 counts.
    """
    behind, before = graph.kept_to(quantizer), graph.producer(quantizer)
    clip = before if behind is None else behind
    if clip is None or clip.op_type != "Clip":
        return None
    low, high = _end(graph, clip, 1, -math.inf), _end(graph, clip, 2, math.inf)
    if low is None or high is None:
        return None
    if behind is None:
        scale, zero = (graph.values(quantizer, number) for number in (1, 2))
        if scale is None or zero is None or scale.size != 1 or zero.size != 1 or not scale.item() > 0:
            return None
        low, high = (end / float(scale.item()) + float(zero.item()) for end in (low, high))
    return round(low) if math.isfinite(low) else 0, round(high) if math.isfinite(high) else _EIGHT_BITS


def _end(graph: Graph, clip: NodeProto, number: int, without: float) -> float | None:
    """Return a bound of a Clip, or ``without`` if it is omitted. None: it is computed."""
    if not any(clip.input[number : number + 1]):
        return without
    end = graph.values(clip, number)
    return None if end is None or end.size != 1 else float(end.item())
