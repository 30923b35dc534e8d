"""Layers of an int8 graph in FP16: their weights are stored so, and the answers stay what they were."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper

from optimize.errors import PassError
from optimize.export.onnx_graph.half_layers import halve_layers
from optimize.passes.onnx_int8 import OnnxInt8
from optimize.passes.ptq import Ptq
from serve.runtime.engines.base import executions_for, open_engine

KEPT = ("expand.0", "head")


@pytest.fixture(scope="module", params=[(), ("fuse",)], ids=["float", "fused"])
def parent(request, made, session):
    first = made(*request.param) if request.param else made()
    return session.apply(first, Ptq(images=64, keep_float=KEPT)).artifact


def weights(path) -> dict[str, np.ndarray]:
    """Float weights of convolutions and linear layers, by name."""
    graph = onnx.load(str(path)).graph
    read = {node.input[1] for node in graph.node if node.op_type in ("Conv", "Gemm", "MatMul")}
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer if tensor.name in read}


@pytest.mark.parametrize("given", ["uint8", "float"])
def test_the_named_layers_alone_are_stored_and_computed_in_fp16(given: str, parent, session) -> None:
    plain = session.apply(parent, OnnxInt8(input=given, max_size_ratio=1.0), "plain").artifact
    half = session.apply(parent, OnnxInt8(input=given, max_size_ratio=1.0, half=("head",)), "half").artifact
    before, after = weights(plain.path), weights(half.path)
    assert sorted(array.dtype.name for array in before.values()) == ["float32"] * len(KEPT)
    (head,) = [array for array in after.values() if array.dtype == np.float16]
    (expected,) = [array for name, array in before.items() if "head" in name]
    assert np.array_equal(head, expected.astype(np.float16))
    assert sum(array.dtype == np.float32 for array in after.values()) == len(KEPT) - 1
    assert half.path.stat().st_size < plain.path.stat().st_size
    pixels = session.context.pixels(16)
    batch = pixels if given == "uint8" else session.context.example(16)
    executions = executions_for(half.card, "cpu")
    assert {execution.engine for execution in executions} >= {"onnxruntime", "openvino"}
    for execution in executions:
        with torch.no_grad():
            (first,) = open_engine(plain.folder, plain.card, execution).run(batch)
            (second,) = open_engine(half.folder, half.card, execution).run(batch)
        assert torch.allclose(first, second, atol=5e-3 * float(first.abs().max()))
        assert not torch.equal(first, second), "the weights were rounded"


def test_a_layer_that_is_not_in_float_cannot_be_halved(parent, session) -> None:
    with pytest.raises(PassError, match=r"this graph has no layer 'stem\.0' with float weights"):
        session.apply(parent, OnnxInt8(max_size_ratio=1.0, half=("stem.0",)))


def test_numbers_beyond_fp16_are_refused() -> None:
    weight = numpy_helper.from_array(np.full((4, 2), 7e4, np.float32), "head.weight")
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Gemm", ["input", "head.weight"], ["logits"], transB=1)],
        "g",
        [onnx.helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", 2])],
        [onnx.helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 4])],
        [weight],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)])
    with pytest.raises(PassError, match="head holds 7e\\+04, more than FP16's largest"):
        halve_layers(model, ["head"])
