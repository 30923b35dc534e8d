"""The linter's rules of ONNX Runtime fire on graphs of other tools that it gets wrong or refuses, and on no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import NodeProto, TensorProto, helper, numpy_helper
from onnxruntime.capi.onnxruntime_pybind11_state import Fail
from torch import nn
from torch.nn import functional

from optimize.lint.base import lint

RULE = "padded-pool"
AROUND = (0, 0, 1, 1, 0, 0, 1, 1)


def pooled(
    operator: str = "MaxPool",
    *,
    sides: tuple[int, ...] = AROUND,
    kernel: int = 3,
    front: Callable[[str], list[NodeProto]] = lambda gives: [helper.make_node("Identity", ["input"], [gives])],
    number: float | None = 0.0,
    behind: tuple[str, ...] = (),
    read_twice: bool = False,
    indices: bool = False,
    mode: str = "constant",
    **attributes: Any,
) -> onnx.ModelProto:
    """``input`` → what is in front → Pad → what is behind → a pool."""
    tensors: dict[str, np.ndarray] = {
        "sides": np.asarray(sides, np.int64),
        "scale": np.asarray(0.05, np.float32),
        "zero": np.asarray(200, np.uint8),
        "none": np.asarray(0, np.uint8),
        "least": np.asarray(0, np.float32),
        "lower": np.asarray(-1, np.float32),
        "lowest": np.asarray(np.finfo(np.float32).min),
    }
    if number is not None:
        tensors["number"] = np.asarray(number, np.float32)
    nodes, given = front("given"), "bordered"
    nodes.append(
        helper.make_node("Pad", ["given", "sides", *(["number"] if number is not None else [])], [given], mode=mode)
    )
    for name in behind:
        more: dict[str, Any] = {"to": TensorProto.FLOAT} if name == "Cast" else {}
        nodes.append(helper.make_node(name, [given, *(["lowest"] if name == "Max" else [])], [f"{given}_"], **more))
        given = f"{given}_"
    settings = {"kernel_shape": [kernel, kernel]} | attributes
    nodes.append(helper.make_node(operator, [given], ["answer", *(["places"] if indices else [])], **settings))
    answers = ["answer"]
    if read_twice:
        nodes.append(helper.make_node("Relu", ["bordered"], ["other"]))
        answers.append("other")
    graph = helper.make_graph(
        nodes,
        "foreign",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", 2, 8, 8])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in answers],
        [numpy_helper.from_array(value, name) for name, value in tensors.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def pair(zero: str) -> Callable[[str], list[NodeProto]]:
    """A quantizer and its counterpart in front."""
    return lambda gives: [
        helper.make_node("QuantizeLinear", ["input", "scale", zero], ["integers"]),
        helper.make_node("DequantizeLinear", ["integers", "scale", zero], [gives]),
    ]


def one(operator: str, *others: str) -> Callable[[str], list[NodeProto]]:
    """An operator in front."""
    return lambda gives: [helper.make_node(operator, ["input", *others], [gives])]


#: Graphs, by what is in them; the rule is to know which of them ONNX Runtime gets wrong, or cannot open.
GRAPHS: dict[str, Callable[[], onnx.ModelProto]] = {
    "a maximum": pooled,
    "without a number": lambda: pooled(number=None),
    "another number": lambda: pooled(number=-1.0),
    "an edge": lambda: pooled(number=None, mode="edge"),
    "along channels": lambda: pooled(sides=(0, 1, 1, 1, 0, 0, 1, 1)),
    "on one side": lambda: pooled(sides=(0, 0, 1, 0, 0, 0, 0, 0)),
    "no border": lambda: pooled(sides=(0,) * 8),
    "cut off": lambda: pooled(sides=(0, 0, -1, -1, 0, 0, 1, 1)),
    "behind a ReLU": lambda: pooled(front=one("Relu")),
    "behind a sigmoid": lambda: pooled(front=one("Sigmoid")),
    "behind a clip at 0": lambda: pooled(front=one("Clip", "least")),
    "behind a clip lower": lambda: pooled(front=one("Clip", "lower")),
    "behind integers": lambda: pooled(front=pair("zero")),
    "behind integers from 0 on": lambda: pooled(front=pair("none")),
    "in front of a cast": lambda: pooled(behind=("Cast",)),
    "in front of the remedy": lambda: pooled(behind=("Max",)),
    "read twice": lambda: pooled(read_twice=True),
    "with indices": lambda: pooled(indices=True),
    "with a border of its own": lambda: pooled(pads=[1, 1, 1, 1]),
    "with holes": lambda: pooled(kernel=2, dilations=[2, 2]),
    "rounded up": lambda: pooled(ceil_mode=1, strides=[2, 2]),
    "placed by itself": lambda: pooled(auto_pad="VALID"),
    "a wide border": lambda: pooled(sides=(0, 0, 2, 2, 0, 0, 2, 2), kernel=2),
    "an average": lambda: pooled("AveragePool"),
    "an average of single places": lambda: pooled("AveragePool", kernel=1, strides=[2, 2]),
    "an average over a wide border": lambda: pooled("AveragePool", sides=(0, 0, 2, 2, 0, 0, 2, 2), kernel=2),
    "an average over two borders": lambda: pooled(
        "AveragePool", sides=(0, 0, 2, 2, 0, 0, 2, 2), pads=[1, 1, 1, 1], count_include_pad=1
    ),
    "an average over one of two borders": lambda: pooled(
        "AveragePool", sides=(0, 0, 2, 2, 0, 0, 2, 2), pads=[1, 1, 1, 1]
    ),
}


def answer(model: onnx.ModelProto, *, optimized: bool) -> np.ndarray | None:
    """What ONNX Runtime answers of numbers below zero; None if it cannot open the graph."""
    options, levels = onnxruntime.SessionOptions(), onnxruntime.GraphOptimizationLevel
    options.log_severity_level = 4
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimized else levels.ORT_DISABLE_ALL
    images = -np.random.default_rng(0).random((2, 2, 8, 8), np.float32) - 0.5
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options)
        found: np.ndarray = session.run(None, {"input": images})[0]
    except Fail:
        return None
    return found


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("target", ["cpu", "x86"])
def test_zeros_in_front_of_a_pool_are_found_where_onnx_runtime_makes_them_its_border(name, target):
    model = GRAPHS[name]()
    meant, found = (answer(model, optimized=optimized) for optimized in (False, True))
    assert meant is not None
    wrong = found is None or not np.allclose(meant, found, atol=1e-5)
    assert (RULE in {finding.rule for finding in lint(model, target)}) == wrong
    assert RULE not in {finding.rule for finding in lint(model, "tensorrt")}


class Bordered(nn.Module):
    """As networks have it that were ported from TensorFlow."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.max_pool2d(functional.pad(self.stem(x), (0, 1, 0, 1)), 3, 2)


def test_what_torchs_exporter_makes_of_zeros_in_front_of_a_maximum_is_found():
    torch.manual_seed(0)
    module, batch = Bordered().eval(), torch.randn(2, 2, 8, 8)
    assert module.stem.bias is not None
    module.stem.bias.data.fill_(-5.0)  # all below zero
    program = torch.onnx.export(module, (batch,), dynamo=True, input_names=["input"], verbose=False)
    assert program is not None
    model = program.model_proto
    session = onnxruntime.InferenceSession(model.SerializeToString())
    with torch.no_grad():
        meant = module(batch).numpy()
    assert np.abs(session.run(None, {"input": batch.numpy()})[0] - meant).max() > 1
    (finding,) = (finding for finding in lint(model, "cpu") if finding.rule == RULE)
    assert finding.said == "it reads the zeros of node_pad, and ONNX Runtime leaves these zeros out of its maxima"
    assert "Max with the lowest float" in finding.remedy


def shares(
    scale: float, zero: int = 0, axis: int = 1, *, remedied: bool = False, floats: bool = False
) -> onnx.ModelProto:
    """``input`` → a pair → a softmax over two branches → an axis more → a pair."""
    tensors: dict[str, np.ndarray] = {
        "scale": np.asarray(0.05, np.float32),
        "zero": np.asarray(128, np.uint8),
        "shares_scale": np.asarray(scale, np.float32),
        "shares_zero": np.asarray(zero, np.uint8),
        "last": np.asarray([-1], np.int64),
        "lowest": np.asarray(np.finfo(np.float32).min),
    }
    given = "input"
    nodes = []
    if not floats:
        nodes += pair("zero")("given")
        given = "given"
    if remedied:
        nodes.append(helper.make_node("Max", [given, "lowest"], ["larger"]))
        given = "larger"
    nodes += [
        helper.make_node("Softmax", [given], ["shares"], axis=axis),
        helper.make_node("Unsqueeze", ["shares", "last"], ["longer"]),
        helper.make_node("QuantizeLinear", ["longer", "shares_scale", "shares_zero"], ["numbers"]),
        helper.make_node("DequantizeLinear", ["numbers", "shares_scale", "shares_zero"], ["answer"]),
    ]
    graph = helper.make_graph(
        nodes,
        "shares",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", 2, 8, 8])],
        [helper.make_tensor_value_info("answer", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in tensors.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


SHARES: dict[str, Callable[[], onnx.ModelProto]] = {
    "of steps of a 256th": lambda: shares(1 / 256),
    "up to 1": lambda: shares(1 / 255),
    "up to a half": lambda: shares(0.5 / 255),
    "up to less with a zero-point": lambda: shares(1 / 255, 180),
    "over the last axis": lambda: shares(0.1 / 255, axis=-1),
    "behind the remedy": lambda: shares(0.5 / 255, remedied=True),
    "of floats": lambda: shares(0.5 / 255, floats=True),
}


@pytest.mark.parametrize("name", SHARES)
def test_shares_beyond_their_range_are_found_where_onnx_runtime_wraps_them_around(name):
    model = SHARES[name]()
    meant, found = (answer(model, optimized=optimized) for optimized in (False, True))
    assert meant is not None
    assert found is not None
    wrong = np.abs(meant - found).max() > 0.05
    assert ("softmax-range" in {finding.rule for finding in lint(model, "cpu")}) == wrong
