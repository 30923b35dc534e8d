"""The linter of quantized graphs: each rule fires on a graph that is broken in its way, and on none that is not."""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, strategies
from onnx import NodeProto, TensorProto, helper, numpy_helper
from typer.testing import CliRunner

from optimize.cli import app
from optimize.lint.base import TARGETS, LintTarget, lint, rules
from optimize.lint.graph import Graph
from optimize.lint.untrusted_files import read_graph
from serve.runtime.errors import UserError


class Written:
    """``input`` → Q/DQ → Conv → Relu → Q/DQ → Conv, plus the shortcut → Relu → Q/DQ → pool → Q/DQ → ``logits``.

    The second convolution gives the sum its floats; the shortcut has its Q/DQ. Every edit breaks one thing.
    """

    def __init__(self, signed: bool, most: int = 127) -> None:
        self.nodes: list[NodeProto] = []
        self.tensors: dict[str, Any] = {}
        self.ranks: dict[str, int] = {}
        self.kind: Any = np.int8 if signed else np.uint8
        self.most = most  # of a weight's integers
        self.opset = 20
        self.rng = np.random.default_rng(0)
        self.pair("input", "x")
        self.conv("x", "first")
        self.add("Relu", ["first"], "first_relu")
        self.pair("first_relu", "y")
        self.conv("y", "second")
        self.add("Add", ["second", "y"], "sum")
        self.add("Relu", ["sum"], "sum_relu")
        self.pair("sum_relu", "z")
        self.add("GlobalAveragePool", ["z"], "pooled")
        self.pair("pooled", "logits")

    def add(self, operator: str, taken: list[str], gives: str, **attributes: Any) -> None:
        self.nodes.append(helper.make_node(operator, taken, [gives], name=f"{operator}_{gives}", **attributes))

    def pair(self, taken: str, gives: str, scale: float = 0.1) -> None:
        self.tensors |= {f"{gives}_scale": np.float32(scale), f"{gives}_zero": self.kind(0)}
        self.add("QuantizeLinear", [taken, f"{gives}_scale", f"{gives}_zero"], f"{gives}_q")
        self.add("DequantizeLinear", [f"{gives}_q", f"{gives}_scale", f"{gives}_zero"], gives)

    def conv(self, taken: str, gives: str) -> None:
        self.tensors |= {
            f"{gives}_w": self.rng.integers(-self.most, self.most + 1, (4, 4, 1, 1)).astype(np.int8),
            f"{gives}_ws": np.full(4, 0.01, np.float32),
            f"{gives}_wz": np.zeros(4, np.int8),
            f"{gives}_b": np.zeros(4, np.float32),
        }
        self.add("DequantizeLinear", [f"{gives}_w", f"{gives}_ws", f"{gives}_wz"], f"{gives}_wf", axis=0)
        self.add("Conv", [taken, f"{gives}_wf", f"{gives}_b"], gives)

    def node(self, gives: str) -> NodeProto:
        return next(node for node in self.nodes if gives in node.output)

    def before(self, gives: str, operator: str, taken: list[str], given: str, **attributes: Any) -> None:
        """Put a node before the one that gives ``gives``."""
        made = helper.make_node(operator, taken, [given], name=f"{operator}_{given}", **attributes)
        self.nodes.insert(self.nodes.index(self.node(gives)), made)

    def model(self, kind: int = TensorProto.FLOAT) -> onnx.ModelProto:
        model = helper.make_model(
            helper.make_graph(
                self.nodes,
                "written",
                [helper.make_tensor_value_info("input", kind, ["batch", 4, 8, 8])],
                [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 4, 1, 1])],
                [numpy_helper.from_array(np.asarray(value), name) for name, value in self.tensors.items()],
                value_info=[
                    helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * rank)
                    for name, rank in self.ranks.items()
                ],
            ),
            opset_imports=[helper.make_opsetid("", self.opset), helper.make_opsetid("com.microsoft", 1)],
            ir_version=10,
        )
        onnx.checker.check_model(model)
        return model


def clamped(graph: Written, gives: str, scale: float = 0.1, high: float | None = None) -> None:
    """A Clip before the quantizer of ``gives``, to the 7 bits of its scale or to ``high``."""
    graph.tensors |= {f"{gives}_low": np.float32(0), f"{gives}_high": np.float32(127 * scale if high is None else high)}
    quantizer = graph.node(f"{gives}_q")
    graph.before(f"{gives}_q", "Clip", [quantizer.input[0], f"{gives}_low", f"{gives}_high"], f"{gives}_clipped")
    quantizer.input[0] = f"{gives}_clipped"


def whole(target: LintTarget) -> Written:
    return Written(signed=target == "tensorrt", most=63 if target == "x86" else 127)


@pytest.mark.parametrize("target", TARGETS)
def test_a_graph_that_is_made_for_its_target_has_no_findings(target: LintTarget) -> None:
    assert lint(whole(target).model(), target) == ()


def test_the_graph_that_the_others_are_made_of_runs() -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(Written(signed=True).model().SerializeToString())
    (found,) = session.run(None, {"input": np.random.default_rng(1).random((2, 4, 8, 8), np.float32)})
    assert found.shape == (2, 4, 1, 1)
    assert found.any()


Edit = Callable[[Written], object]


def scale(value: float) -> Edit:
    return lambda graph: graph.tensors.update(y_scale=np.float32(value))


def channel_scale(graph: Written) -> None:
    graph.tensors["first_ws"][2] = 0


def computed(graph: Written) -> None:
    graph.before("y_q", "ReduceMax", ["first_relu"], "computed", keepdims=0)
    graph.node("y_q").input[1] = graph.node("y").input[1] = "computed"


def computed_zero_point(graph: Written) -> None:
    graph.before("y_q", "Identity", ["y_zero"], "computed")
    graph.node("y_q").input[2] = graph.node("y").input[2] = "computed"


def zero_point(graph: Written) -> None:
    graph.tensors["y_zero"] = graph.kind(3)


def weight_zero_point(graph: Written) -> None:
    graph.tensors["second_wz"][1] = 2


def fewer_zero_points(graph: Written) -> None:
    graph.tensors["second_wz"] = np.zeros(1, np.int8)


def per_channel_activation(graph: Written) -> None:
    graph.tensors |= {"y_scale": np.full(4, 0.1, np.float32), "y_zero": np.zeros(4, graph.kind)}
    for name in ("y_q", "y"):
        graph.node(name).attribute.append(helper.make_attribute("axis", 1))


def unfolded(graph: Written) -> None:
    graph.tensors["first_w"] = graph.tensors["first_w"].astype(np.float32) * 0.01
    graph.before("first_wf", "QuantizeLinear", ["first_w", "first_ws", "first_wz"], "first_wq", axis=0)
    graph.node("first_wf").input[0] = "first_wq"


def grouped(width: int, groups: int = 2, side: int = 1, **settings: Any) -> Callable[[Written], None]:
    """The first convolution has groups of so many channels."""

    def edit(graph: Written) -> None:
        graph.tensors["first_w"] = np.ones((4, width, side, side), np.int8)
        graph.node("first").attribute.extend(
            helper.make_attribute(*each) for each in {"group": groups, **settings}.items()
        )

    return edit


def narrow(channels: int, answers: int, groups: int = 2, side: int = 3, zero: int = 3) -> Callable[[Written], None]:
    """The first convolution has groups of so many channels and answers, and reads integers with a zero-point."""

    def edit(graph: Written) -> None:
        count = groups * answers
        graph.tensors |= {
            "first_w": np.ones((count, channels, side, side), np.int8),
            "first_ws": np.full(count, 0.01, np.float32),
            "first_wz": np.zeros(count, np.int8),
            "first_b": np.zeros(count, np.float32),
            "x_zero": graph.kind(zero),
        }
        graph.node("first").attribute.append(helper.make_attribute("group", groups))

    return edit


def float_weight(graph: Written) -> None:
    graph.tensors["first_wf"] = graph.tensors.pop("first_w").astype(np.float32)
    graph.nodes.remove(next(node for node in graph.nodes if node.output[0] == "first_wf"))


def float_input(graph: Written) -> None:
    graph.node("first").input[0] = "input"


def axis(graph: Written) -> None:
    del graph.node("first_wf").attribute[:]  # and ONNX's default is 1


def int32_bias(graph: Written) -> None:
    graph.tensors |= {"first_b": np.zeros(4, np.int32), "first_bs": np.float32(0.001)}
    graph.before("first", "DequantizeLinear", ["first_b", "first_bs"], "first_bf")
    graph.node("first").input[2] = "first_bf"


def blocks(graph: Written) -> None:
    graph.opset = 21
    graph.tensors |= {"first_ws": np.full((4, 2, 1, 1), 0.01, np.float32), "first_wz": np.zeros((4, 2, 1, 1), np.int8)}
    node = graph.node("first_wf")
    node.attribute[0].i = 1
    node.attribute.append(helper.make_attribute("block_size", 2))


def transposed(axis: int) -> Edit:
    """The second layer is a transposed convolution, whose output channels lie along its weight's axis 1."""

    def edit(graph: Written) -> None:
        graph.node("second").op_type = "ConvTranspose"
        graph.node("second_wf").attribute[0].i = axis

    return edit


def unsigned_weight(graph: Written) -> None:
    graph.tensors |= {"first_w": np.ones((4, 4, 1, 1), np.uint8), "first_wz": np.zeros(4, np.uint8)}


def least(graph: Written) -> None:
    graph.tensors["first_w"][0, 0, 0, 0] = -128


def floats_alone(graph: Written) -> None:
    graph.nodes = [helper.make_node("GlobalAveragePool", ["input"], ["logits"])]
    graph.tensors = {}


def other_sign(graph: Written) -> None:
    graph.tensors["y_zero"] = np.uint8(0) if graph.kind is np.int8 else np.int8(0)


def wide(graph: Written) -> None:
    graph.tensors["y_zero"] = np.int16(0)


def one_clamp(graph: Written) -> None:
    clamped(graph, "x")


def relu6_instead(graph: Written) -> None:
    clamped(graph, "x")
    clamped(graph, "y", high=25.0)


def wide_weight(one: int) -> Edit:
    def edit(graph: Written) -> None:
        graph.tensors["second_w"] = np.where(np.arange(16) == 5, one, 63).reshape(4, 4, 1, 1).astype(np.int8)

    return edit


def doubled(graph: Written) -> None:
    graph.pair("y", "again")
    pair = [graph.nodes.pop(), graph.nodes.pop()][::-1]
    place = graph.nodes.index(graph.node("second"))
    graph.nodes[place:place] = pair
    graph.node("second").input[0] = "again"


def float_shortcut(graph: Written) -> None:
    graph.node("sum").input[1] = "first_relu"


def float_addends(graph: Written) -> None:
    graph.node("sum").op_type = "Sum"
    float_shortcut(graph)


def float_mean(graph: Written) -> None:
    float_pool(graph)
    graph.tensors["axes"] = np.array([2, 3])
    graph.node("pooled").op_type = "ReduceMean"
    graph.node("pooled").input.append("axes")


def float_pool(graph: Written) -> None:
    graph.nodes = [node for node in graph.nodes if node.output[0] not in ("z_q", "z")]
    graph.node("pooled").input[0] = "sum_relu"


def norm(graph: Written) -> None:
    graph.tensors |= {name: np.ones(4, np.float32) for name in ("gamma", "beta", "mean", "var")}
    graph.before("first_relu", "BatchNormalization", ["first", "gamma", "beta", "mean", "var"], "normed")
    graph.node("first_relu").input[0] = "normed"


def norm_behind_a_pair(graph: Written) -> None:
    graph.tensors |= {"between_scale": np.float32(0.1), "between_zero": graph.kind(0)}
    graph.before("first_relu", "QuantizeLinear", ["first", "between_scale", "between_zero"], "between_q")
    graph.before("first_relu", "DequantizeLinear", ["between_q", "between_scale", "between_zero"], "between")
    norm(graph)
    graph.node("normed").input[0] = "between"


def old(graph: Written) -> None:
    graph.opset = 25


def foreign(graph: Written) -> None:
    graph.before("first_relu", "Gelu", ["first"], "gelu", domain="com.microsoft")
    graph.node("first_relu").input[0] = "gelu"


def unsupported(graph: Written) -> None:
    graph.before("first_relu", "Det", ["first"], "unread")


def unlisted(graph: Written) -> None:
    graph.opset = 24
    graph.node("first_relu").op_type = "Swish"


def dilated_pool(graph: Written) -> None:
    graph.before("z_q", "MaxPool", ["sum_relu"], "dilated", kernel_shape=[2, 2], dilations=[2, 2])
    graph.node("z_q").input[0] = "dilated"


def long_pool(graph: Written) -> None:
    graph.before("z_q", "AveragePool", ["sum_relu"], "long", kernel_shape=[2])
    graph.node("z_q").input[0] = "long"


def pool_with_indices(graph: Written) -> None:
    graph.before("z_q", "MaxPool", ["sum_relu"], "places", kernel_shape=[2, 2])
    graph.node("places").output.append("indices")
    graph.node("z_q").input[0] = "places"


def low_floor(graph: Written) -> None:
    graph.tensors |= {"y_zero": graph.kind(118), "floor": np.float32(1e-12)}
    for operator, taken, gives in (
        ("Transpose", ["y"], "turned"),
        ("ReduceL2", ["turned"], "length"),
        ("Clip", ["length", "floor"], "kept"),
        ("Div", ["y", "kept"], "direction"),
    ):
        graph.before("second", operator, taken, gives)


def low_maximum(graph: Written) -> None:
    low_floor(graph)
    graph.node("length").op_type, graph.node("kept").op_type = "ReduceL1", "Max"


def low_maximum_swapped(graph: Written) -> None:
    low_maximum(graph)
    graph.node("kept").input[:] = ["floor", "length"]


def half_a_step(graph: Written) -> None:
    low_floor(graph)
    graph.tensors["floor"] = np.float32(0.05)


def copied_floor(graph: Written) -> None:
    """The numerator has a dequantizer of its own, and the norm as many numbers as that."""
    low_floor(graph)
    graph.tensors["sizes"] = np.asarray([1, 4, 8, 8], np.int64)
    graph.before("direction", "DequantizeLinear", ["y_q", "y_scale", "y_zero"], "again")
    graph.before("direction", "Transpose", ["kept"], "raised")
    graph.before("direction", "Expand", ["raised", "sizes"], "copies")
    graph.node("direction").input[:] = ["again", "copies"]


def floor_of_a_logarithm(graph: Written) -> None:
    low_floor(graph)
    graph.node("direction").op_type = "Log"
    graph.node("direction").input[:] = ["kept"]


def floor_of_another(graph: Written) -> None:
    low_floor(graph)
    graph.node("direction").input[0] = "x"


def floor_that_is_divided(graph: Written) -> None:
    low_floor(graph)
    graph.node("direction").input[:] = ["kept", "y"]


def reduced(operator: str, *axes: int, kept: bool = False, rank: int | None = None) -> Edit:
    """Sums or means over axes of what is dequantized, of a rank that the file tells or not, or of its maximum with the
    lowest float."""

    def edit(graph: Written) -> None:
        graph.tensors |= {"axes": np.asarray(axes, np.int64), "lowest": np.finfo(np.float32).min}
        graph.ranks |= {"y": rank} if rank is not None else {}
        if kept:
            graph.before("second", "Max", ["y", "lowest"], "same")
        graph.before("second", operator, ["same" if kept else "y", "axes"], "reduced")
        graph.before("second", "Mul", ["y", "reduced"], "weighted")

    return edit


def extreme(operator: str, between: tuple[str, ...] = ("Sigmoid",), behind: tuple[str, ...] = ()) -> Edit:
    """The maximum or minimum of what is dequantized and goes through operators, quantized behind others."""

    def edit(graph: Written) -> None:
        taken = "y"
        for name in (*between, operator, *behind, "QuantizeLinear", "DequantizeLinear"):
            inputs = [taken, "y_scale", "y_zero"] if name.endswith("Linear") else [taken]
            taken = {operator: "extreme"}.get(name, f"{name}_of_{taken}")
            graph.before("second", name, inputs, taken)
        graph.node("second").input[0] = taken

    return edit


def averaged(*, zero: int = 118, quantized: bool = True, **attributes: int) -> Edit:
    """An average over a border of what is dequantized; ``pads`` is how wide that is."""

    def edit(graph: Written) -> None:
        graph.tensors["y_zero"] = graph.kind(zero)
        settings: dict[str, Any] = {"kernel_shape": [3, 3], **attributes, "pads": [attributes.get("pads", 1)] * 4}
        graph.before("second", "AveragePool", ["y"], "averaged", **settings)
        if quantized:
            graph.before("second", "QuantizeLinear", ["averaged", "y_scale", "y_zero"], "averaged_q")

    return edit


def normed(epsilon: float) -> Edit:
    """What is dequantized by steps of a tenth, normed."""

    def edit(graph: Written) -> None:
        graph.tensors |= {"ones": np.ones(4, np.float32), "zeros": np.zeros(4, np.float32)}
        graph.before("second", "InstanceNormalization", ["y", "ones", "zeros"], "normed", epsilon=epsilon)

    return edit


def einsum(equation: str) -> Edit:
    """Of what is dequantized, which nothing reads."""
    return lambda graph: graph.before("second", "Einsum", ["y"], "reduced", equation=equation)


def copied(operator: str, taken: str = "", *, at: int = 0, biased: bool = True) -> Edit:
    """A token for each image, of a Shape: one size of it (by itself, or as ``taken``), or all."""

    def edit(graph: Written) -> None:
        places = {"at": np.array([at]), "behind": np.array([at + 1]), "rest": np.array([4, 1, 1])}
        graph.tensors |= {name: value.astype(np.int64) for name, value in places.items()}
        graph.tensors |= {"token": np.ones((1, 4, 1, 1), np.float32)}
        graph.before("second", "Shape", ["y"], "sizes", **({} if taken else {"start": at, "end": at + 1}))
        if taken:
            graph.before("second", taken, ["sizes", *(["at", "behind"] if taken == "Slice" else ["at"])], "count")
        graph.before("second", "Concat", ["count" if taken else "sizes", "rest"], "shape", axis=0)
        given = ["shape"] if operator == "ConstantOfShape" else ["token", "shape"]
        graph.before("second", operator, given, "copies")
        graph.before("second", "Add", ["y", "copies"], "with_token")
        if not biased:
            for name in ("first", "second"):
                del graph.node(name).input[2]

    return edit


def like_another(graph: Written) -> None:
    graph.tensors |= {"token": np.ones((1, 4, 1, 1), np.float32)}
    graph.before("second", "Shape", ["y"], "sizes")
    graph.before("second", "Expand", ["token", "sizes"], "copies")
    graph.before("second", "Add", ["y", "copies"], "with_token")


def joined(operator: str, *others: str, zero: int = 118, pair: bool = True) -> Edit:
    """What is put together of integers, quantized again or not, and what an operator makes of it."""

    def edit(graph: Written) -> None:
        graph.tensors |= {"half": np.float32(0.5), "y_zero": graph.kind(zero)}
        graph.before("second", "Concat", ["y", "y"], "parts", axis=2)
        if pair:
            graph.before("second", "QuantizeLinear", ["parts", "y_scale", "y_zero"], "parts_q")
            graph.before("second", "DequantizeLinear", ["parts_q", "y_scale", "y_zero"], "together")
        graph.before("second", operator, ["together" if pair else "parts", *others], "made")
        graph.before("second", "QuantizeLinear", ["made", "y_scale", "y_zero"], "made_q")

    return edit


def along(axis: int, apart: bool = False) -> Edit:
    """What is put together of integers along an axis, quantized again, and what a linear layer makes of it."""

    def edit(graph: Written) -> None:
        weight = {"w": np.ones((8, 8), np.int8), "ws": np.float32(0.01), "wz": np.int8(0)}
        graph.tensors |= {f"linear_{name}": value for name, value in weight.items()}
        graph.tensors["lowest"] = np.finfo(np.float32).min
        graph.ranks["parts"] = 4
        graph.before("second", "Concat", ["y", "y"], "parts", axis=axis)
        graph.before("second", "Max", ["parts", "lowest"], "larger")
        graph.before("second", "QuantizeLinear", ["larger" if apart else "parts", "y_scale", "y_zero"], "parts_q")
        graph.before("second", "DequantizeLinear", ["parts_q", "y_scale", "y_zero"], "together")
        graph.before("second", "DequantizeLinear", ["linear_w", "linear_ws", "linear_wz"], "linear_wf")
        graph.before("second", "MatMul", ["together", "linear_wf"], "linear")

    return edit


def padded(*sizes: int, zero: int = 118, number: float = 0.0, sliced: bool = False, **attributes: Any) -> Edit:
    """A border around what is dequantized, or a part of it."""

    def edit(graph: Written) -> None:
        graph.tensors |= {"sizes": np.asarray(sizes, np.int64), "y_zero": graph.kind(zero)}
        graph.tensors["number"] = np.float32(number)
        if sliced:
            graph.tensors |= {"start": np.asarray([1], np.int64), "end": np.asarray([3], np.int64)}
            graph.before("second", "Slice", ["y", "start", "end", "start"], "part")
        graph.before("second", "Pad", ["part" if sliced else "y", "sizes", "number"], "wide", **attributes)

    return edit


def bordered_pool(graph: Written) -> None:
    """Zeros around what a layer gives, in front of a maximum."""
    graph.tensors["sides"] = np.asarray([0, 0, 1, 1, 0, 0, 1, 1], np.int64)
    graph.before("first_relu", "Pad", ["first", "sides"], "bordered")
    graph.before("first_relu", "MaxPool", ["bordered"], "largest", kernel_shape=[3, 3])
    graph.node("first_relu").input[0] = "largest"


def padded_layer(
    *sizes: int,
    number: float = 0,
    axes: tuple[int, ...] = (),
    integers: bool = False,
    also: str = "",
    again: float = 0,
    **attributes: Any,
) -> Edit:
    """A border around what the second convolution reads, in front of its quantizer or in its integers."""

    def edit(graph: Written) -> None:
        graph.tensors |= {"sides": np.asarray(sizes, np.int64), "y_zero": graph.kind(118)}
        graph.tensors["number"] = graph.kind(number) if integers else np.float32(number)
        graph.tensors |= {"axes": np.asarray(axes, np.int64)} if axes else {}
        taken = "y_q" if integers else "y" if again else "first_relu"
        graph.tensors["again_scale"] = np.float32(again or 0.1)
        given = [taken, "sides", "number", *(["axes"] if axes else [])]
        graph.before("second", "Pad", given, "around", **attributes)
        if not integers:
            graph.before("second", "QuantizeLinear", ["around", "again_scale", "y_zero"], "around_q")
        read = ["around" if integers else "around_q", "again_scale", "y_zero"]
        graph.before("second", "DequantizeLinear", read, "wide")
        graph.node("second").input[0] = "wide"
        if also:
            graph.before("second", also, ["wide"], "other")

    return edit


def narrow_softmax(graph: Written) -> None:
    """The shares of a pair's numbers, in a scale that ends below 1."""
    graph.before("second", "Softmax", ["y"], "shares", axis=1)
    graph.tensors["shares_scale"] = np.float32(1 / 300)
    graph.tensors["shares_zero"] = graph.kind(0)
    for operator, taken, gives in (
        ("QuantizeLinear", "shares", "shares_q"),
        ("DequantizeLinear", "shares_q", "shared"),
    ):
        graph.before("second", operator, [taken, "shares_scale", "shares_zero"], gives)
    graph.node("second").input[0] = "shared"


EVERYWHERE = ("cpu", "x86", "tensorrt")

# The rule, the targets that it fires for, the node that it names, and what is done to the graph.
BROKEN: list[tuple[str, tuple[str, ...], str, Edit]] = [
    *[("scale", EVERYWHERE, "QuantizeLinear_y_q", scale(value)) for value in (0, -0.1, np.inf, np.nan, 1e-40)],
    ("scale", EVERYWHERE, "DequantizeLinear_first_wf", channel_scale),
    ("computed-scale", EVERYWHERE, "QuantizeLinear_y_q", computed),
    ("computed-scale", EVERYWHERE, "QuantizeLinear_y_q", computed_zero_point),
    ("zero-point", ("tensorrt",), "QuantizeLinear_y_q", zero_point),
    ("zero-point", EVERYWHERE, "DequantizeLinear_second_wf", weight_zero_point),
    ("zero-point", EVERYWHERE, "DequantizeLinear_second_wf", fewer_zero_points),
    ("norm-floor", ("cpu", "x86"), "Clip_kept", low_floor),
    ("norm-floor", ("cpu", "x86"), "Clip_kept", low_maximum),
    ("norm-floor", ("cpu", "x86"), "Clip_kept", low_maximum_swapped),
    ("norm-floor", ("cpu", "x86"), "Clip_kept", copied_floor),
    ("norm-floor", (), "Clip_kept", half_a_step),
    ("norm-floor", (), "Clip_kept", floor_of_a_logarithm),
    ("norm-floor", (), "Clip_kept", floor_of_another),
    ("norm-floor", (), "Clip_kept", floor_that_is_divided),
    *[
        ("integer-reduction", ("cpu", "x86"), "ReduceSum_reduced", reduced("ReduceSum", *axes))
        for axes in [(1,), (2, 3)]
    ],
    ("integer-reduction", ("cpu", "x86"), "ReduceMean_reduced", reduced("ReduceMean", 1)),
    *[
        ("integer-reduction", ("cpu", "x86"), "ReduceMean_reduced", reduced("ReduceMean", *axes, rank=rank))
        for axes, rank in [((-2, -1), 3), ((2, 3), 5), ((1, 2), 4)]
    ],
    *[
        ("integer-reduction", (), "ReduceMean_reduced", reduced("ReduceMean", *axes, rank=rank))
        for axes, rank in [((2, 3), None), ((-1, -2), None), ((2, -1), 4)]
    ],
    ("integer-reduction", (), "ReduceSum_reduced", reduced("ReduceSum", 1, kept=True)),
    ("integer-reduction", ("cpu", "x86"), "Einsum_reduced", einsum("bchw->bc")),
    ("integer-reduction", (), "Einsum_reduced", einsum("bchw->bhwc")),
    *[
        ("counted-images", ("cpu", "x86"), f"{operator}_copies", copied(operator, taken))
        for operator, taken in [("Expand", ""), ("Tile", "Gather"), ("Expand", "Slice"), ("ConstantOfShape", "Gather")]
    ],
    ("counted-images", (), "Expand_copies", copied("Expand", at=1)),
    ("counted-images", (), "Expand_copies", copied("Expand", "Gather", at=1)),
    ("counted-images", (), "Expand_copies", copied("Expand", biased=False)),
    ("counted-images", (), "Expand_copies", like_another),
    *[
        ("joined-pair", ("cpu", "x86"), f"{operator}_made", joined(operator, *others))
        for operator, *others in [("Relu",), ("Mul", "half"), ("Add", "half"), ("Sub", "half"), ("Div", "half")]
    ],
    ("norm-epsilon", ("cpu", "x86"), "InstanceNormalization_normed", normed(1e-2)),
    ("norm-epsilon", (), "InstanceNormalization_normed", normed(1e-4)),
    ("counted-zeros", ("cpu", "x86"), "AveragePool_averaged", averaged(count_include_pad=1)),
    ("counted-zeros", (), "AveragePool_averaged", averaged()),
    ("counted-zeros", (), "AveragePool_averaged", averaged(count_include_pad=1, zero=0)),
    ("counted-zeros", (), "AveragePool_averaged", averaged(count_include_pad=1, pads=0)),
    ("counted-end", ("cpu", "x86"), "AveragePool_averaged", averaged(zero=0, count_include_pad=1, ceil_mode=1)),
    ("counted-end", ("cpu", "x86"), "AveragePool_averaged", averaged(count_include_pad=1, ceil_mode=1, pads=0)),
    ("counted-end", (), "AveragePool_averaged", averaged(zero=0, count_include_pad=1)),
    ("counted-end", (), "AveragePool_averaged", averaged(ceil_mode=1)),
    ("counted-end", (), "AveragePool_averaged", averaged(count_include_pad=1, ceil_mode=1, pads=0, quantized=False)),
    *[("integer-extreme", ("cpu", "x86"), f"{name}_extreme", extreme(name)) for name in ("ReduceMax", "ReduceMin")],
    ("integer-extreme", ("cpu", "x86"), "ReduceMax_extreme", extreme("ReduceMax", ("Gelu",), ("Relu",))),
    ("integer-extreme", (), "ReduceMax_extreme", extreme("ReduceMax", ())),
    ("integer-extreme", (), "ReduceMax_extreme", extreme("ReduceMax", behind=("Sigmoid",))),
    *[
        ("integer-border", ("cpu", "x86"), "Pad_wide", padded(*sizes))
        for sizes in [(0, 2, 0, 0, 0, 2, 0, 0), (0, 0, 1, 0, 0, 0, 0, 0)]
    ],
    ("integer-border", ("cpu", "x86"), "Pad_wide", padded(0, 0, 0, 0, 0, 0, 0, 2, zero=0, number=0.5)),
    ("integer-border", ("cpu", "x86"), "Pad_wide", padded(0, 1, 0, 0, 0, 1, 0, 0, sliced=True)),
    ("integer-border", (), "Pad_wide", padded(0, 0, 1, 1, 0, 0, 1, 1)),
    ("integer-border", (), "Pad_wide", padded(0, 2, 0, 0, 0, 2, 0, 0, zero=0)),
    ("integer-border", (), "Pad_wide", padded(0, 0, 1, 0, 0, 0, 1, 0, mode="reflect")),
    *[("group-width", ("cpu", "x86"), "Conv_first", grouped(width)) for width in (68, 72, 96, 120, 132)],
    *[("group-width", (), "Conv_first", grouped(width)) for width in (4, 64, 66, 70, 128, 192)],
    *[("narrow-groups", ("cpu", "x86"), "Conv_first", narrow(*each)) for each in ((24, 96), (1, 17), (31, 31, 4, 2))],
    *[("narrow-groups", (), "Conv_first", narrow(*each)) for each in ((32, 96), (24, 16), (24, 32), (24, 96, 1))],
    ("narrow-groups", (), "Conv_first", narrow(24, 96, side=1)),
    ("narrow-groups", (), "Conv_first", narrow(24, 96, zero=0)),
    ("group-width", (), "Conv_first", grouped(72, groups=1)),
    ("group-width", (), "Conv_first", grouped(72, side=3)),
    ("group-width", (), "Conv_first", grouped(72, strides=[2, 2])),
    ("group-width", (), "Conv_first", grouped(72, pads=[0, 0, 0, 1])),
    ("joined-pair", (), "Relu_made", joined("Relu", pair=False)),
    ("joined-pair", (), "Mul_made", joined("Mul", "y")),
    ("joined-pair", (), "Relu_made", joined("Relu", zero=0)),
    ("joined-pair", (), "Abs_made", joined("Abs")),
    *[("joined-tokens", ("cpu", "x86"), "MatMul_linear", along(axis)) for axis in (1, 2, -2)],
    *[("joined-tokens", (), "MatMul_linear", along(axis)) for axis in (3, -1)],
    ("joined-tokens", (), "MatMul_linear", along(1, apart=True)),
    ("per-channel-activation", ("tensorrt",), "QuantizeLinear_y_q", per_channel_activation),
    ("unfolded-weight", EVERYWHERE, "QuantizeLinear_first_wq", unfolded),
    ("half-quantized-layer", EVERYWHERE, "Conv_first", float_weight),
    ("half-quantized-layer", EVERYWHERE, "Conv_first", float_input),
    ("axis", EVERYWHERE, "DequantizeLinear_first_wf", axis),
    ("axis", (), "DequantizeLinear_first_wf", blocks),
    ("axis", EVERYWHERE, "DequantizeLinear_second_wf", transposed(0)),
    ("axis", (), "DequantizeLinear_second_wf", transposed(1)),
    ("int32-bias", ("tensorrt",), "DequantizeLinear_first_bf", int32_bias),
    ("integer-type", (), "DequantizeLinear_first_bf", int32_bias),
    ("weight-128", ("cpu", "x86"), "DequantizeLinear_first_wf", least),
    ("nothing-quantized", EVERYWHERE, "the graph", floats_alone),
    ("integer-type", ("tensorrt",), "QuantizeLinear_y_q", other_sign),
    ("integer-type", ("tensorrt",), "QuantizeLinear_y_q", wide),
    ("slow-integers", ("cpu", "x86"), "Conv_second", other_sign),
    ("slow-integers", ("cpu", "x86"), "Conv_second", wide),
    ("slow-integers", ("cpu", "x86"), "Conv_first", unsigned_weight),
    ("lost-clamp", ("cpu", "x86"), "QuantizeLinear_y_q", one_clamp),
    ("lost-clamp", ("cpu", "x86"), "QuantizeLinear_y_q", relu6_instead),
    ("saturating-sums", ("x86",), "Conv_second", wide_weight(65)),
    ("saturating-sums", ("x86",), "Conv_second", wide_weight(-65)),
    ("saturating-sums", (), "Conv_second", wide_weight(-64)),
    ("doubled-pair", EVERYWHERE, "QuantizeLinear_again_q", doubled),
    ("residual-in-float", EVERYWHERE, "Add_sum", float_shortcut),
    ("residual-in-float", EVERYWHERE, "Add_sum", float_addends),
    ("padded-pool", ("cpu", "x86"), "MaxPool_largest", bordered_pool),
    ("padded-layer", EVERYWHERE, "Pad_around", padded_layer(0, 0, 0, 0, 0, 0, 1, 1)),
    ("padded-layer", EVERYWHERE, "Pad_around", padded_layer(1, 1, 1, 1, axes=(-2, 3))),
    ("padded-layer", EVERYWHERE, "Pad_around", padded_layer(0, 0, 1, 1, 0, 0, 1, 1, number=118, integers=True)),
    ("padded-layer", (), "Pad_around", padded_layer(0, 0, 1, 1, 0, 0, 1, 1, number=117, integers=True)),
    ("padded-layer", (), "Pad_around", padded_layer(0, 0, 1, 1, 0, 0, 1, 1, number=0.5)),
    ("padded-layer", (), "Pad_around", padded_layer(0, 0, 1, 1, 0, 0, -1, 1)),
    ("padded-layer", (), "Pad_around", padded_layer(0, 2, 0, 0, 0, 2, 0, 0)),
    ("padded-layer", (), "Pad_around", padded_layer(1, 1, axes=(1,))),
    ("padded-layer", EVERYWHERE, "Pad_around", padded_layer(0, 0, 1, 1, 0, 0, 1, 1, again=0.1)),
    ("padded-layer", (), "Pad_around", padded_layer(0, 0, 1, 1, 0, 0, 1, 1, again=0.2)),
    ("padded-layer", (), "Pad_around", padded_layer(0, 0, 1, 1, 0, 0, 1, 1, mode="reflect")),
    ("padded-layer", (), "Pad_around", padded_layer(0, 0, 1, 1, 0, 0, 1, 1, also="Sigmoid")),
    ("softmax-range", ("cpu", "x86"), "Softmax_shares", narrow_softmax),
    ("pool-in-float", EVERYWHERE, "GlobalAveragePool_pooled", float_pool),
    ("pool-in-float", EVERYWHERE, "GlobalAveragePool_pooled", float_mean),
    ("unfused-batchnorm", EVERYWHERE, "BatchNormalization_normed", norm),
    ("unfused-batchnorm", EVERYWHERE, "BatchNormalization_normed", norm_behind_a_pair),
    ("opset", ("tensorrt",), "the graph", old),
    ("operator", ("tensorrt",), "Gelu_gelu", foreign),
    ("operator", ("tensorrt",), "Det_unread", unsupported),
    ("operator", ("tensorrt",), "Relu_first_relu", unlisted),
    ("pool-shape", ("tensorrt",), "MaxPool_dilated", dilated_pool),
    ("pool-shape", ("tensorrt",), "AveragePool_long", long_pool),
    ("pool-shape", ("tensorrt",), "MaxPool_places", pool_with_indices),
]


@pytest.mark.parametrize(("rule", "targets", "node", "edit"), BROKEN, ids=[f"{e[0]}-{i}" for i, e in enumerate(BROKEN)])
def test_each_fault_is_found_where_it_is(rule: str, targets: tuple[str, ...], node: str, edit: Edit) -> None:
    for target in TARGETS:
        graph = whole(target)
        edit(graph)
        found = [finding for finding in lint(graph.model(), target) if finding.rule == rule]
        assert bool(found) == (target in targets), (target, found)
        if found:
            assert node in [finding.node for finding in found]
            assert all(finding.said and finding.remedy for finding in found)


def by_channels(graph: Written) -> None:
    """A scale and a zero-point for each of two channels, whatever had one."""
    for node in graph.nodes:
        for name in node.input[1:3] if node.op_type in ("QuantizeLinear", "DequantizeLinear") else ():
            if name in graph.tensors and np.ndim(graph.tensors[name]) == 0:
                graph.tensors[name] = np.full(2, graph.tensors[name])


def stored_flat(graph: Written) -> None:
    """Weights whose integers are stored in a row, and get their shape behind the DequantizeLinear."""
    for node in [node for node in graph.nodes if node.op_type == "DequantizeLinear" and node.input[0] in graph.tensors]:
        name, gives = node.input[0], node.output[0]
        graph.tensors[f"{gives}_shape"] = np.asarray(np.shape(graph.tensors[name]), np.int64)
        graph.tensors[name] = np.ravel(graph.tensors[name])
        node.output[0] = f"{gives}_flat"
        made = helper.make_node("Reshape", [f"{gives}_flat", f"{gives}_shape"], [gives], name=f"Reshape_{gives}")
        graph.nodes.insert(graph.nodes.index(node) + 1, made)


# Rules that judge by one scale of a tensor, or by the shape that a weight is stored in: they are silent there.
SILENT: dict[Callable[[Written], None], set[str]] = {
    by_channels: {"norm-floor", "norm-epsilon", "lost-clamp", "softmax-range"},
    stored_flat: {"group-width", "narrow-groups", "axis"},
}


@pytest.mark.parametrize("otherwise", SILENT)
@pytest.mark.parametrize(("rule", "targets", "node", "edit"), BROKEN, ids=[f"{e[0]}-{i}" for i, e in enumerate(BROKEN)])
def test_a_fault_of_a_graph_that_is_written_otherwise_is_told_and_stops_nothing(
    rule: str, targets: tuple[str, ...], node: str, edit: Edit, otherwise: Callable[[Written], None]
) -> None:
    for target in TARGETS:
        graph = whole(target)
        edit(graph)
        otherwise(graph)
        found = lint(graph.model(), target)
        told = target in targets and rule not in SILENT[otherwise]
        assert any(finding.rule == rule for finding in found) == told
        assert all(finding.said and finding.remedy for finding in found)


def test_every_rule_has_a_graph_that_it_fires_on() -> None:
    assert {entry[0] for entry in BROKEN} | {"uint8-inside", "operator-limit"} == set(rules())


def test_the_documentation_has_every_rule_in_its_own_words() -> None:
    document = (Path(__file__).parents[3] / "docs" / "explanations" / "int8.md").read_text(encoding="utf-8")
    listed = [line for line in document.splitlines() if line.startswith("| `") and "`target`" not in line]
    expected = []
    for name, rule in rules().items():
        first = (inspect.getdoc(rule.check) or "").split("\n\n", maxsplit=1)[0].replace("\n", " ")
        told = "all" if rule.targets == TARGETS else ", ".join(rule.targets)
        expected.append(f"| `{name}` ({rule.severity}) | {told} | {first} |")
    assert [line for line in listed if line in expected] == expected


@pytest.mark.parametrize(("high", "reach"), [(None, 255), (12.6, 126), (12.9, 129), (25.0, 250)])
def test_on_any_x86_cpu_a_layer_of_8_bit_weights_needs_a_clamp_of_its_input(high: float | None, reach: int) -> None:
    graph = Written(signed=False)
    graph.tensors |= {f"{name}_w": np.full((4, 4, 1, 1), 127, np.int8) for name in ("first", "second")}
    clamped(graph, "x")
    if high is not None:
        clamped(graph, "y", high=high)
    found = [(f.node, f.said) for f in lint(graph.model(), "x86") if f.rule == "saturating-sums"]
    fits = 2 * reach * 127 < 2**15
    said = f"its input reaches {reach} and its weight 127: two such products do not fit into 16 bits"
    assert found == ([] if fits else [("Conv_second", said)])


@pytest.mark.parametrize(("high", "fires"), [(127, False), (126, False), (128, True), (255, True)])
def test_a_clamp_of_the_integers_themselves_is_one_too(high: int, fires: bool) -> None:
    graph = whole("x86")
    clamped(graph, "x")
    graph.tensors |= {"y_low": np.uint8(0), "y_high": np.uint8(high)}
    graph.before("y", "Clip", ["y_q", "y_low", "y_high"], "y_kept")
    graph.node("y").input[0] = "y_kept"
    found = [(finding.rule, finding.node) for finding in lint(graph.model(), "x86")]
    assert found == [("lost-clamp", "QuantizeLinear_y_q")] * fires


@pytest.mark.parametrize(
    ("low", "high", "reach"),
    [(0.0, np.inf, 255), (-np.inf, 12.6, 126), (-np.inf, np.inf, 255), (None, 12.6, 126), (0.0, None, 255)],
)
def test_a_clip_without_a_bound_on_one_side_keeps_to_the_other(low: Any, high: Any, reach: int) -> None:
    graph = Written(signed=False)
    graph.tensors |= {f"{name}_w": np.full((4, 4, 1, 1), 127, np.int8) for name in ("first", "second")}
    clamped(graph, "x")
    clamped(graph, "y")
    clip = graph.node("y_clipped")
    for number, (name, bound) in enumerate((("y_low", low), ("y_high", high)), 1):
        if bound is None:
            clip.input[number] = ""
        else:
            graph.tensors[name] = np.float32(bound)
    found = {finding.rule: (finding.node, finding.said) for finding in lint(graph.model(), "x86")}
    if reach <= 127:
        assert found == {}
    else:
        said = f"its input reaches {reach} and its weight 127: two such products do not fit into 16 bits"
        assert found["saturating-sums"] == ("Conv_second", said)
        said = f"a layer's input reaches {reach}, where 7 bits end at 127"
        assert found["lost-clamp"] == ("QuantizeLinear_y_q", said)


def test_a_clamp_of_integers_needs_no_lower_end() -> None:
    graph = Written(signed=False)
    for gives in ("x", "y"):
        graph.tensors |= {f"{gives}_high": np.uint8(127)}
        graph.before(gives, "Clip", [f"{gives}_q", "", f"{gives}_high"], f"{gives}_kept")
        graph.node(gives).input[0] = f"{gives}_kept"
    assert lint(graph.model(), "x86") == ()
    graph.tensors["y_high"] = np.uint8(200)
    assert "lost-clamp" in [finding.rule for finding in lint(graph.model(), "x86")]


@pytest.mark.parametrize("inside", [False, True])
def test_integers_without_a_zero_point_are_what_the_graph_says_that_they_are(inside: bool) -> None:
    graph = Written(signed=False)
    graph.opset = 23
    graph.nodes.remove(graph.node("x_q"))
    taken = "input"
    if inside:
        graph.before("x", "Cast", ["input"], taken := "cast", to=TensorProto.INT8)
    graph.nodes[graph.nodes.index(graph.node("x"))] = helper.make_node(
        "DequantizeLinear", [taken, "x_scale"], ["x"], output_dtype=TensorProto.FLOAT
    )
    model = graph.model(TensorProto.INT32 if inside else TensorProto.INT8)
    if inside:
        model.graph.value_info.append(helper.make_tensor_value_info(taken, TensorProto.INT8, None))
    found = [(finding.node, finding.said) for finding in lint(model, "cpu") if finding.rule == "slow-integers"]
    assert found == [("Conv_first", "its input is INT8")]


def test_a_quantizer_without_a_zero_point_gives_what_it_says_that_it_gives() -> None:
    graph = Written(signed=False)
    graph.opset = 23
    for gives in ("x_q", "x"):
        del graph.node(gives).input[2]
    graph.node("x_q").attribute.append(helper.make_attribute("output_dtype", int(TensorProto.INT8)))
    graph.node("x").attribute.append(helper.make_attribute("output_dtype", int(TensorProto.FLOAT)))
    found = [(finding.node, finding.said) for finding in lint(graph.model(), "cpu") if finding.rule == "slow-integers"]
    assert found == [("Conv_first", "its input is INT8")]


def test_what_is_left_out_depends_on_no_image_and_is_taken_by_nothing() -> None:
    written = whole("cpu")
    written.tensors |= {
        "gru_w": np.zeros((1, 12, 8), np.float32),
        "gru_r": np.zeros((1, 12, 4), np.float32),
        "most": np.float32(1),
    }
    gru = helper.make_node("GRU", ["input_rows", "gru_w", "gru_r"], ["", "Y_h"], hidden_size=4)
    written.before("x_q", "Squeeze", ["input"], "input_rows")
    written.nodes.insert(1, gru)
    written.before("second_wf", "Clip", ["second_ws", "", "most"], "kept")
    graph = Graph(written.model())
    assert graph.constant("kept")
    assert not graph.constant("Y_h")
    assert graph.takers(gru) == []


def test_pixels_are_cast_before_anything_else_for_tensorrt() -> None:
    graph = Written(signed=True)
    graph.before("x_q", "Cast", ["input"], "floats", to=TensorProto.FLOAT)
    graph.node("x_q").input[0] = "floats"
    assert lint(graph.model(TensorProto.UINT8), "tensorrt") == ()
    graph.before("floats", "Identity", ["input"], "bytes")
    graph.node("floats").input[0] = "bytes"
    assert [finding.rule for finding in lint(graph.model(TensorProto.UINT8), "tensorrt")] == ["uint8-inside"]


def test_a_max_pool_commutes_with_tensorrts_quantizers_and_not_with_onnx_runtimes() -> None:
    cases: list[tuple[LintTarget, list[str]]] = [("tensorrt", []), ("cpu", ["pool-in-float"])]
    for target, expected in cases:
        graph = whole(target)
        float_pool(graph)
        graph.node("pooled").op_type = "GlobalMaxPool"
        assert [finding.rule for finding in lint(graph.model(), target)] == expected


@pytest.mark.parametrize(
    ("operator", "shape", "axis", "attributes", "fires"),
    [
        ("Gemm", (4, 6), 0, {"transB": 1}, False),
        ("Gemm", (4, 6), 1, {"transB": 1}, True),
        ("Gemm", (6, 4), 1, {}, False),
        ("Gemm", (6, 4), 0, {}, True),
        ("MatMul", (6, 4), 1, {}, False),
        ("MatMul", (6, 4), -1, {}, False),
        ("MatMul", (6, 4), 0, {}, True),
    ],
)
def test_output_channels_lie_where_the_operator_has_them(
    operator: str, shape: tuple[int, int], axis: int, attributes: dict[str, Any], fires: bool
) -> None:
    count = shape[axis]
    tensors = {
        "s": np.float32(0.1),
        "z": np.uint8(0),
        "w": np.ones(shape, np.int8),
        "ws": np.full(count, 0.1, np.float32),
        "wz": np.zeros(count, np.int8),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["input", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["x"]),
        helper.make_node("DequantizeLinear", ["w", "ws", "wz"], ["wf"], axis=axis),
        helper.make_node(operator, ["x", "wf"], ["logits"], **attributes),
    ]
    model = helper.make_model(
        helper.make_graph(
            nodes,
            "linear",
            [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", 6])],
            [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 4])],
            [numpy_helper.from_array(np.asarray(value), name) for name, value in tensors.items()],
        ),
        opset_imports=[helper.make_opsetid("", 20)],
    )
    onnx.checker.check_model(model)
    assert [finding.rule for finding in lint(model, "cpu")] == (["axis"] if fires else [])


def test_the_command_names_node_and_remedy_and_its_exit_code_says_whether_any(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.onnx", tmp_path / "bad.onnx"
    onnx.save(Written(signed=True).model(), str(good))
    broken = Written(signed=True)
    zero_point(broken)
    onnx.save(broken.model(), str(bad))
    runner = CliRunner()
    assert runner.invoke(app, ["lint", str(good), "--target", "tensorrt"]).exit_code == 0
    result = runner.invoke(app, ["lint", str(bad), "--target", "tensorrt"])
    assert result.exit_code == 1
    line = "error: QuantizeLinear_y_q: its zero-point is 3, and tensorrt wants 0; quantize symmetrically"
    assert line in result.output
    result = runner.invoke(app, ["lint", str(bad), "--target", "tensorrt", "--json"])
    assert result.exit_code == 1
    findings = json.loads(result.stdout)["findings"]
    assert [finding["node"] for finding in findings] == ["QuantizeLinear_y_q", "DequantizeLinear_y"]
    assert set(findings[0]) == {"rule", "severity", "node", "said", "remedy"}
    assert runner.invoke(app, ["lint", str(bad)]).exit_code == 1, "int8 activations, for a CPU"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["missing.onnx"], "No such file or directory"),
        (["text.onnx"], "not a valid ONNX graph"),
        (["empty.onnx"], "not a valid ONNX graph"),
        (["empty.onnx", "--target", "gpu"], "--target must be one of cpu, x86, tensorrt, not 'gpu'"),
    ],
)
def test_mistakes_are_one_line(words: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "text.onnx").write_text("no graph")
    (tmp_path / "empty.onnx").write_bytes(b"")
    result = CliRunner().invoke(app, ["lint", str(tmp_path / words[0]), *words[1:]])
    assert (result.exit_code, said in result.output) == (2, True), result.output
    assert result.output.count("\n") == 1


@pytest.mark.parametrize("damage", [{"data_type": 29}, {"data_type": 0}, {"raw_data": bytes(3)}, {"dims": [3]}])
def test_a_tensor_that_cannot_be_read_is_named(damage: dict[str, Any]) -> None:
    model = Written(signed=True).model()
    scale = next(tensor for tensor in model.graph.initializer if tensor.name == "y_scale")
    for name, value in damage.items():
        scale.ClearField(name)
        getattr(scale, name).extend(value) if name == "dims" else setattr(scale, name, value)
    for target in TARGETS:
        with pytest.raises(UserError, match=r"the tensor 'y_scale' cannot be read \(.+\): the file is damaged"):
            lint(model, target)


@given(strategies.data())
def test_a_file_that_is_no_graph_is_refused_and_never_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, data: strategies.DataObject
) -> None:
    whole_file = Written(signed=True).model().SerializeToString()
    at = data.draw(strategies.integers(0, len(whole_file) - 1))
    patch = data.draw(strategies.binary(max_size=8))
    path = tmp_path_factory.getbasetemp() / "fuzzed.onnx"
    path.write_bytes(whole_file[:at] + patch + whole_file[at + len(patch) :][: data.draw(strategies.integers(0, 4000))])
    with contextlib.suppress(UserError):
        model = read_graph(path)
        for target in TARGETS:
            lint(model, target)
