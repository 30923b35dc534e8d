"""What TensorRT's parser asks of operators: each limit is found where it is broken, and not where it is kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import NodeProto, TensorProto, helper, numpy_helper

from optimize.lint.base import Finding, LintTarget, lint


def found(*nodes: NodeProto, target: LintTarget = "tensorrt", **constants: Any) -> list[Finding]:
    """What the rule finds in a graph of these nodes, behind ``input`` with four axes and ``number``, an integer."""
    inputs = [
        helper.make_tensor_value_info("input", TensorProto.FLOAT, [1, 4, 8, 8]),
        helper.make_tensor_value_info("row", TensorProto.FLOAT, [1, 8]),
        helper.make_tensor_value_info("number", TensorProto.INT64, [1]),
    ]
    output = helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, ["any"])
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    model = helper.make_model(
        helper.make_graph(list(nodes), "one", inputs, [output], tensors),
        opset_imports=[helper.make_opsetid("", 20)],
    )
    onnx.checker.check_model(model)
    return [finding for finding in lint(model, target) if finding.rule == "operator-limit"]


def node(operator: str, *taken: str, gives: tuple[str, ...] = ("y",), **attributes: Any) -> NodeProto:
    return helper.make_node(operator, taken, gives, name="it", **attributes)


ONE = np.array([1], np.int64)


@pytest.mark.parametrize(
    ("broken", "constants", "said"),
    [
        (node("ReduceMean", "input", "number"), {}, "axes is no initializer"),
        (node("ReduceL2", "input", "number"), {}, "axes is no initializer"),
        (node("Squeeze", "input", "number"), {}, "axes depends on the graph's input"),
        (node("Unsqueeze", "input", "number"), {}, "axes depends on the graph's input"),
        (node("CumSum", "input", "number"), {}, "axis depends on the graph's input"),
        (node("TopK", "input", "k", gives=("y", "places")), {"k": np.array([3840], np.int64)}, "top 3840"),
        (node("TopK", "input", "k", gives=("y", "places"), sorted=0), {"k": ONE}, "sorted is 0"),
        (node("Resize", "input", "", "s", mode="cubic"), {"s": np.ones(4, np.float32)}, "mode is cubic"),
        (node("Resize", "input", "", "s", mode="linear", antialias=1), {"s": np.ones(4, np.float32)}, "antialias is 1"),
        (
            node("Resize", "input", "", "s", coordinate_transformation_mode="half_pixel_symmetric"),
            {"s": np.ones(4, np.float32)},
            "coordinate_transformation_mode is half_pixel_symmetric",
        ),
        (
            node("ScatterND", "input", "places", "more", reduction="add"),
            {"places": np.zeros((1, 1), np.int64), "more": np.zeros((1, 4, 8, 8), np.float32)},
            "reduction is add",
        ),
        (node("Dropout", "input", "", "on"), {"on": np.array(True)}, "it drops"),
        (node("LpPool", "input", kernel_shape=[2, 2], dilations=[2, 2]), {}, "dilations"),
        (
            node("LayerNormalization", "input", "scale", gives=("y", "mean")),
            {"scale": np.ones(8, np.float32)},
            "mean or its deviation",
        ),
        (node("Constant", value_string="words"), {}, "value_string"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_broken_limit_is_found_for_tensorrt_alone(broken: NodeProto, constants: dict[str, Any], said: str) -> None:
    (finding,) = found(broken, **constants)
    assert finding.node == "it"
    assert said in finding.said
    assert finding.remedy
    assert not found(broken, target="cpu", **constants)


@pytest.mark.parametrize(
    ("kept", "constants"),
    [
        (node("ReduceMean", "input", "axes"), {"axes": ONE}),
        (node("ReduceMean", "input"), {}),
        (node("ReduceMean", "input", ""), {}),
        (node("Squeeze", "input", "axes"), {"axes": np.array([0], np.int64)}),
        (node("TopK", "input", "k", gives=("y", "places")), {"k": np.array([3839], np.int64)}),
        (node("TopK", "input", "number", gives=("y", "places")), {}),
        (node("Resize", "input", "", "s"), {"s": np.ones(4, np.float32)}),
        (node("Dropout", "input", "", "on"), {"on": np.array(False)}),
        (node("LpPool", "input", kernel_shape=[2, 2], dilations=[1, 1]), {}),
        (node("LayerNormalization", "input", "scale"), {"scale": np.ones(8, np.float32)}),
        (node("Constant", value=numpy_helper.from_array(np.ones(2, np.float32))), {}),
    ],
    ids=lambda value: value.op_type if isinstance(value, NodeProto) else "",
)
def test_what_keeps_to_the_limits_has_no_finding(kept: NodeProto, constants: dict[str, Any]) -> None:
    assert not found(kept, **constants)


def test_axes_that_are_computed_from_constants_are_known_to_squeeze_and_not_to_a_mean() -> None:
    """docs/operators.md: "resolvable to a constant" there, "must be an initializer" here."""
    axes = helper.make_node("Add", ["one", "one"], ["axes"])
    assert not found(axes, node("Unsqueeze", "input", "axes"), one=ONE)
    (finding,) = found(axes, node("ReduceMax", "input", "axes"), one=ONE)
    assert finding.node == "it"


@pytest.mark.parametrize(("taken", "faults"), [("input", 0), ("row", 1)])
def test_a_grid_is_sampled_from_maps_alone(taken: str, faults: int) -> None:
    grid: dict[str, Any] = {"grid": np.zeros((1, 2, 2, 2), np.float32)}
    assert len(found(node("GridSample", taken, "grid"), **grid)) == faults


def test_another_domains_operator_of_that_name_is_not_judged_by_it() -> None:
    foreign = helper.make_node("TopK", ["input", "k"], ["y", "places"], domain="com.microsoft", sorted=0)
    model = helper.make_model(
        helper.make_graph(
            [foreign],
            "one",
            [helper.make_tensor_value_info("input", TensorProto.FLOAT, [8])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["any"])],
            [numpy_helper.from_array(ONE, "k")],
        ),
        opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)],
    )
    assert [finding.rule for finding in lint(model, "tensorrt") if finding.node.startswith("TopK")] == ["operator"]
