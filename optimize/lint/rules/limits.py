"""Limits of TensorRT's ONNX parser: attributes of its operators, and inputs that must be known at build time.

Source: the column "Restrictions" of onnx-tensorrt's docs/operators.md for TensorRT 10.15. Pools have their own rule.
Cases that need shapes are left out (EyeLike, Hardmax, DeformConv, a dynamic Scan). So are bidirectional RNNs, and
operators of opset 23 and 24: Attention, RotaryEmbedding and TensorScatter.
"""

from __future__ import annotations

from collections.abc import Iterator

from onnx import NodeProto

from optimize.lint.base import TENSORRT, Fault, LintTarget, rule
from optimize.lint.graph import Graph, attribute, label

_MOST_OF_TOP = 3840
_GRID_RANK = 4
_NO_TENSORS = {"sparse_value", "value_string", "value_strings"}

# fmt: off
_REDUCTIONS = (
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd",
    "ReduceSum", "ReduceSumSquare",
)
# fmt: on

# By operator and input number: inputs that must be initializers, or computable from initializers.
_INITIALIZERS = {
    **{operator: {1: "axes"} for operator in _REDUCTIONS},
    "Dropout": {2: "training_mode"},
    "STFT": {1: "frame_step", 2: "window"},
}
_KNOWN = {
    "CumSum": {1: "axis"},
    "OneHot": {1: "depth"},
    "Squeeze": {1: "axes"},
    "Unsqueeze": {1: "axes"},
}

# By operator, the allowed values of an attribute.
_VALUES: dict[str, dict[str, tuple[int | str, ...]]] = {
    "LSTM": {"input_forget": (0,), "layout": (0,)},
    "Resize": {
        "mode": ("nearest", "linear"),
        "coordinate_transformation_mode": (
            *("half_pixel", "pytorch_half_pixel", "tf_half_pixel_for_nn", "asymmetric", "align_corners"),
        ),
        "nearest_mode": ("floor", "ceil", "round_prefer_floor", "round_prefer_ceil"),
        "keep_aspect_ratio_policy": ("stretch",),
        "antialias": (0,),
    },
    "ScatterND": {"reduction": ("none",)},
    "TopK": {"sorted": (1,)},
}


@rule("operator-limit", "error", TENSORRT)
def limits(graph: Graph, target: LintTarget) -> Iterator[Fault]:
    """An operator is used as the parser accepts it. Axes are constant, TopK takes below 3840 (docs/operators.md)."""
    for node in graph.of():
        if node.domain in ("", "ai.onnx"):
            yield from (Fault(label(node), said, remedy) for said, remedy in _broken(graph, node))


def _broken(graph: Graph, node: NodeProto) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with a node, and what would be right."""
    for number, name in _INITIALIZERS.get(node.op_type, {}).items():
        if _given(node, number) and graph.tensor(node, number) is None:
            yield f"its {name} is no initializer", "fold constants before the export, or give a constant"
    for number, name in _KNOWN.get(node.op_type, {}).items():
        if _given(node, number) and not graph.constant(node.input[number]):
            yield f"its {name} depends on the graph's input", f"give a constant {name}"
    for name, allowed in _VALUES.get(node.op_type, {}).items():
        if (found := _word(attribute(node, name, allowed[0]))) not in allowed:
            yield f"its {name} is {found}", f"{name} must be {' or '.join(map(str, allowed))}"
    yield from _special(graph, node)


def _special(graph: Graph, node: NodeProto) -> Iterator[tuple[str, str]]:
    if node.op_type == "TopK" and (most := graph.values(node, 1)) is not None and most.max(initial=0) >= _MOST_OF_TOP:
        yield f"it takes the top {most.max()}", f"take less than {_MOST_OF_TOP}"
    elif node.op_type == "Dropout" and (training := graph.values(node, 2)) is not None and training.any():
        yield "it drops", "export the network in evaluation mode"
    elif node.op_type == "LpPool" and any(entry != 1 for entry in attribute(node, "dilations", ())):
        yield "it has dilations", "pool without them"
    elif node.op_type == "LayerNormalization" and any(node.output[1:]):
        yield "it gives its mean or its deviation", "take its first output alone"
    elif node.op_type == "GridSample" and graph.rank(node.input[0]) not in (_GRID_RANK, None):
        yield "its input has another rank than 4", "sample maps of two dimensions"
    elif node.op_type == "Constant" and (kinds := {entry.name for entry in node.attribute} & _NO_TENSORS):
        yield f"it is a {kinds.pop()}", "give a dense tensor of numbers"


def _given(node: NodeProto, number: int) -> bool:
    return number < len(node.input) and node.input[number] != ""


def _word(value: int | bytes) -> int | str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
