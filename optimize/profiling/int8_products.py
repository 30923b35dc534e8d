"""The product of two int8 matrices as an ONNX graph, to measure the int8 peak of graph engines.

Its weights use the same integers as artifacts for this CPU. Without VNNI, 8-bit weights would saturate, and the
measured operation would not be a product.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from optimize.quantization.targets import x86_target

INPUT = "a"


def int8_product_graph(side: int) -> bytes:
    """Return a graph of one product of ``uint8`` activations and ``int8`` weights, both ``(side, side)``, in Q/DQ.

    Its input is the activations' integers, so that only the product is timed. Its output is ``uint8``.
    """
    constants = [
        numpy_helper.from_array(weights(side), "w"),
        numpy_helper.from_array(np.array(0.01, np.float32), "scale"),
        numpy_helper.from_array(np.array(128, np.uint8), "zero"),
        numpy_helper.from_array(np.array(0, np.int8), "weight_zero"),
    ]
    nodes = [
        _node("DequantizeLinear", ("a", "scale", "zero"), "a_float"),
        _node("DequantizeLinear", ("w", "scale", "weight_zero"), "w_float"),
        _node("MatMul", ("a_float", "w_float"), "product"),
        _node("QuantizeLinear", ("product", "scale", "zero"), "answer"),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.UINT8, [side, side]) for name in (INPUT, "answer")]
    graph = helper.make_graph(nodes, "product", ends[:1], ends[1:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    body: bytes = model.SerializeToString()
    return body


def activations(side: int) -> np.ndarray:
    """Return integers for its input."""
    return np.random.default_rng(1).integers(0, 256, (side, side), dtype=np.uint8)


def weights(side: int) -> np.ndarray:
    """Return integers for its weights."""
    most = x86_target().weight_max
    return np.random.default_rng(0).integers(-most, most + 1, (side, side), dtype=np.int8)


def _node(kind: str, given: Sequence[str], answer: str) -> NodeProto:
    return helper.make_node(kind, list(given), [answer], name=answer)
