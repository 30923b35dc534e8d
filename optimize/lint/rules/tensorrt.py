"""Rules of TensorRT's ONNX parser for more than quantizers: opset, operators, and the places for uint8.

Source: onnx-tensorrt's docs/operators.md of TensorRT 10.15. That of 11.2 has the same range of opsets. The release
notes of 11.5 add opset 25.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from onnx import TensorProto

from optimize.lint.base import TENSORRT, Fault, LintTarget, rule
from optimize.lint.graph import Graph, attribute, label, qualified

_OPSETS = (9, 24)
_PER_CHANNEL = 13

# Operators marked N, and Swish, which is of opset 24 and not listed.
_UNSUPPORTED = frozenset(
    {
        "AffineGrid",
        "Bernoulli",
        "BitShift",
        "BitwiseAnd",
        "BitwiseNot",
        "BitwiseOr",
        "BitwiseXor",
        "CenterCropPad",
        "Col2Im",
        "Compress",
        "ConcatFromSequence",
        "ConvInteger",
        "DFT",
        "Det",
        "DynamicQuantizeLinear",
        "ImageDecoder",
        "MatMulInteger",
        "MaxRoiPool",
        "MaxUnpool",
        "MelWeightMatrix",
        "Multinomial",
        "NegativeLogLikelihoodLoss",
        "Optional",
        "OptionalGetElement",
        "OptionalHasElement",
        "QLinearConv",
        "QLinearMatMul",
        "RegexFullMatch",
        "SequenceAt",
        "SequenceConstruct",
        "SequenceEmpty",
        "SequenceErase",
        "SequenceInsert",
        "SequenceLength",
        "SequenceMap",
        "SoftmaxCrossEntropyLoss",
        "SplitToSequence",
        "StringConcat",
        "StringNormalizer",
        "StringSplit",
        "Swish",
        "TfIdfVectorizer",
        "Unique",
    }
)
# fmt: on


@rule("opset", "error", TENSORRT)
def opsets(graph: Graph, target: LintTarget) -> Iterator[Fault]:
    """The opset is 9 to 24 ("TensorRT 10.15 supports operators in the inclusive range of opset 9 to opset 24").

    Below 13, ONNX has no per-channel scales.
    """
    low, high = _OPSETS
    if not low <= graph.opset <= high:
        yield Fault("the graph", f"its opset is {graph.opset}", f"export with an opset from {_PER_CHANNEL} to {high}")


@rule("operator", "error", TENSORRT)
def operators(graph: Graph, target: LintTarget) -> Iterator[Fault]:
    """The parser imports every operator. Each is of ONNX's own domain, and marked Y in docs/operators.md.

    Operators of ONNX Runtime's domain (``com.microsoft``) are its own. QLinearConv and similar operators are not
    imported.
    """
    for node in graph.of():
        foreign = node.domain not in ("", "ai.onnx")
        if foreign or node.op_type in _UNSUPPORTED:
            yield Fault(
                label(node),
                f"TensorRT's parser has no {qualified(node)}",
                "write quantized layers as QuantizeLinear, DequantizeLinear and the float operator (quant_format QDQ)",
            )


@rule("pool-shape", "error", TENSORRT)
def pools(graph: Graph, target: LintTarget) -> Iterator[Fault]:
    """Pools have 2 or 3 dimensions, no dilations and no indices (docs/operators.md: MaxPool, AveragePool)."""
    for node in graph.of("MaxPool", "AveragePool"):
        kernel, dilations = attribute(node, "kernel_shape", ()), attribute(node, "dilations", ())
        if (
            np.size(kernel) not in (2, 3)
            or any(entry != 1 for entry in np.asarray(dilations).tolist())
            or len(node.output) > 1
        ):
            yield Fault(
                label(node),
                "it has another rank than 2 or 3, dilations, or indices",
                "pool in 2 dimensions without them",
            )


@rule("uint8-inside", "error", TENSORRT)
def bytes_inside(graph: Graph, target: LintTarget) -> Iterator[Fault]:
    """A uint8 input of the graph is cast to float before anything else.

    docs/operators.md: "UINT8 is only supported as network input or output tensor types".
    """
    pixels = {name for name, kind in graph.inputs.items() if kind == TensorProto.UINT8}
    for node in graph.of():
        if pixels & set(node.input) and node.op_type != "Cast":
            yield Fault(label(node), "it computes with uint8", "cast the graph's input to float first")
