"""The linter on files that nobody vouches for: it judges them, refuses them, or says what it cannot judge."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings, strategies
from onnx import NodeProto, TensorProto, helper, numpy_helper
from typer.testing import CliRunner, Result

from optimize.cli import app
from optimize.lint import base
from optimize.lint.base import Fault, LintTarget, Rule, lint
from optimize.lint.graph import Graph
from serve.runtime.errors import UserError
from tests.optimize.lint.test_lint import Written


def model_of(written: Written) -> onnx.ModelProto:
    """The graph, which `onnx.checker` need not accept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnx.checker, "check_model", lambda model: None)
        return written.model()


def whole() -> onnx.ModelProto:
    return model_of(Written(signed=False))


def node(model: onnx.ModelProto, gives: str) -> NodeProto:
    return next(entry for entry in model.graph.node if gives in entry.output)


def tensor(model: onnx.ModelProto, name: str) -> TensorProto:
    return next(entry for entry in model.graph.initializer if entry.name == name)


def judged(path: Path, *words: str) -> Result:
    """What the command says: one line for each mistake, and no traceback."""
    result = CliRunner().invoke(app, ["lint", str(path), *words])
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code in (0, 1, 2)
    assert "Traceback" not in result.output
    assert all(line.isprintable() for line in result.output.splitlines())
    assert (result.exit_code == 2) == any(line.startswith("error: ") for line in result.stderr.splitlines())
    return result


def written_to(folder: Path, model: onnx.ModelProto) -> Path:
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def opens(path: Path) -> bool:
    """Whether ONNX Runtime opens a file, as somebody opens it who sets no options."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception:  # noqa: BLE001 - of whatever type
        return False
    return True


def runs(path: Path) -> bool:
    """Whether ONNX Runtime runs it on an image."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        onnxruntime.InferenceSession(path, options).run(None, {"input": np.zeros((1, 4, 8, 8), np.float32)})
    except Exception:  # noqa: BLE001 - of whatever type
        return False
    return True


Edit = Callable[[Written], object]


def attribute(gives: str, name: str, value: Any) -> Edit:
    def edit(written: Written) -> None:
        kept = [entry for entry in written.node(gives).attribute if entry.name != name]
        del written.node(gives).attribute[:]
        written.node(gives).attribute.extend([*kept, helper.make_attribute(name, value)])

    return edit


def constant(name: str, value: Any) -> Edit:
    return lambda written: written.tensors.update({name: value})


def einsum(equation: bytes) -> Edit:
    return lambda written: written.before("second", "Einsum", ["y"], "reduced", equation=equation)


def opset(version: int) -> Edit:
    return lambda written: setattr(written, "opset", version)


def same_name(written: Written) -> None:
    written.node("first").name = written.node("second").name


#: By what is wrong: what is done to the graph, and a word of the line that says so.
REFUSED: dict[str, tuple[Edit, str]] = {
    "a float zero-point": (constant("y_zero", np.float32(0)), "y_zero_point"),
    "three pads": (attribute("first", "pads", [1, 2, 3]), "Attribute pads"),
    "steps of 0": (attribute("first", "strides", [0, 0]), "Attribute strides"),
    "an opset of the future": (opset(10**6), "1000000"),
    "another type of zero-point": (constant("first_wz", np.zeros(4, np.uint8)), "zero_point"),
    "a weight of one axis": (constant("first_w", np.ones(4, np.int8)), "Conv_first"),
    "a scale of text": (constant("y_scale", np.array("a", object)), "y_scale"),
    "an equation that is not UTF-8": (einsum(b"\xff\xfe"), "reduced"),
    "two nodes of a name": (same_name, "Conv_second"),
    "an unknown border": (attribute("first", "auto_pad", "AROUND"), "AutoPad"),
    "a scale of integers": (constant("y_scale", np.int64(1)), "y_scale"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_onnx_runtime_does_not_open_is_not_well_formed(name: str, tmp_path: Path) -> None:
    edit, word = REFUSED[name]
    written = Written(signed=False)
    edit(written)
    path = written_to(tmp_path, model_of(written))
    assert not opens(path)
    result = judged(path)
    assert result.exit_code == 2
    assert word in result.stderr
    assert "well-formed for" not in result.stdout


#: What ONNX Runtime opens, and cannot run.
MISFITS: dict[str, tuple[Edit, str]] = {
    "a group of 0": (attribute("first", "group", 0), "Conv_first: its group is 0"),
    "groups that do not divide": (attribute("first", "group", 3), "its group is 3"),
    "another kernel": (attribute("first", "kernel_shape", [3, 3]), "kernel_shape is [3, 3]"),
    "a weight for fewer channels": (constant("first_w", np.ones((4, 3, 1, 1), np.int8)), "image has 4 channels"),
    "a longer bias": (constant("first_b", np.zeros(5, np.float32)), "its bias is [5]"),
    "an axis that is not there": (attribute("first_wf", "axis", 9), "along axis 9 of 4"),
    "no scale": (constant("y_scale", np.zeros(0, np.float32)), "its scale [0] is empty"),
    "scales of two axes": (constant("first_ws", np.full((4, 1), 0.1, np.float32)), "more than one axis"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_onnx_runtime_opens_and_cannot_run_is_not_well_formed(name: str, tmp_path: Path) -> None:
    edit, said = MISFITS[name]
    written = Written(signed=False)
    edit(written)
    path = written_to(tmp_path, model_of(written))
    if name != "a group of 0":  # by which it divides
        assert not runs(path)
    result = judged(path)
    assert result.exit_code == 2
    assert said in result.stderr


def damaged(name: str, **fields: Any) -> Callable[[onnx.ModelProto], object]:
    """A tensor with other fields."""

    def edit(model: onnx.ModelProto) -> None:
        for field, value in fields.items():
            tensor(model, name).ClearField(field)
            if field == "dims":
                tensor(model, name).dims.extend(value)
            elif value is not None:
                setattr(tensor(model, name), field, value)

    return edit


def unread_type(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(TensorProto(name="unread", data_type=77, dims=[1], raw_data=b"1"))


def inner_type(model: onnx.ModelProto) -> None:
    unread = helper.make_node("Constant", [], ["unread"], value=TensorProto(data_type=77, dims=[1], raw_data=b"1"))
    graph = helper.make_graph([unread], "inner", [], [helper.make_tensor_value_info("unread", 1, [1])])
    model.graph.node.append(helper.make_node("If", ["y"], ["any"], then_branch=graph, else_branch=graph))


DAMAGED: dict[str, tuple[Callable[[onnx.ModelProto], object], str]] = {
    "an unknown type": (damaged("first_w", data_type=999), "its type is 999"),
    "an unknown type of what nothing reads": (unread_type, "its type is 77"),
    "an unknown type within an attribute": (inner_type, "its type is 77"),
    "too few bytes": (damaged("first_w", raw_data=b"12"), "it has 2 bytes, and its shape [4, 4, 1, 1] needs 16"),
    "too many bytes": (damaged("first_w", raw_data=bytes(17)), "it has 17 bytes"),
    "a size below zero": (damaged("first_w", dims=[-4, 4, 1, 1]), "its shape is [-4, 4, 1, 1]"),
    "a terabyte that is not there": (damaged("first_w", dims=[10**6, 10**6], raw_data=None), "needs 1000000000000"),
    "sizes beyond 64 bits": (damaged("first_w", dims=[2**32, 2**32]), f"needs {2**64}"),
    "a thousand axes": (damaged("first_w", dims=[1] * 1000), "it has 1000 axes"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_tensor_that_is_not_what_it_says_is_named_and_costs_no_memory(name: str, tmp_path: Path) -> None:
    edit, said = DAMAGED[name]
    model = whole()
    edit(model)
    path = written_to(tmp_path, model)
    tracemalloc.start()
    try:
        result = judged(path)
        assert tracemalloc.get_traced_memory()[1] < 50_000_000
    finally:
        tracemalloc.stop()
    assert result.exit_code == 2
    assert said in result.stderr


def outside(folder: Path) -> dict[str, object]:
    os.mkfifo(folder.parent / "pipe")  # which blocks whoever opens it
    return {"location": "../pipe"}


def pipe(folder: Path) -> dict[str, object]:
    os.mkfifo(folder / "pipe")
    return {"location": "pipe"}


def link(folder: Path) -> dict[str, object]:
    (folder.parent / "secret").write_bytes(bytes(16))
    (folder / "link").symlink_to(folder.parent / "secret")
    return {"location": "link"}


def terabytes(folder: Path) -> dict[str, object]:
    with (folder / "sparse").open("wb") as file:
        file.truncate(10**13)
    return {"location": "sparse"}


def short(folder: Path) -> dict[str, object]:
    (folder / "short").write_bytes(bytes(16))
    return {"location": "short", "offset": 1}


EXTERNAL: dict[str, tuple[Callable[[Path], dict[str, object]], str]] = {
    "missing": (lambda folder: {"location": "nowhere"}, "No such file"),
    "unnamed": (lambda folder: {}, "not a file beside the graph"),
    "absolute": (lambda folder: {"location": "/etc/passwd"}, "not a file beside the graph"),
    "outside": (outside, "not a file beside the graph"),
    "a pipe": (pipe, "not a file beside the graph"),
    "a link": (link, "not a file beside the graph"),
    "an address": (lambda folder: {"location": "*/_ORT_MEM_ADDR_/*", "offset": 4096}, "No such file"),
    "too short": (short, "before 17"),
    "at no number": (lambda folder: {**short(folder), "offset": "-1"}, "not a whole number"),
    "more than memory": (terabytes, "free"),
}


@pytest.mark.parametrize("name", EXTERNAL)
def test_data_in_another_file_is_read_from_beside_the_graph_alone(name: str, tmp_path: Path) -> None:
    edit, said = EXTERNAL[name]
    folder = tmp_path / "folder"
    folder.mkdir()
    model = whole()
    weight = tensor(model, "first_w")
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    if name == "more than memory":
        weight.dims[:] = [10**6, 10**7, 1, 1]
    for key, value in edit(folder).items():
        weight.external_data.add(key=key, value=str(value))
    result = judged(written_to(folder, model))
    assert result.exit_code == 2
    assert said in result.stderr


def test_data_in_a_file_beside_the_graph_is_judged(tmp_path: Path) -> None:
    model = whole()
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="weights", size_threshold=0)
    assert (tmp_path / "weights").exists()
    result = judged(tmp_path / "model.onnx")
    assert (result.exit_code, "is well-formed for cpu" in result.stdout) == (0, True)


def test_a_file_that_is_none_is_one_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    data = whole().SerializeToString()
    (tmp_path / "cut").write_bytes(data[: len(data) // 2])
    (tmp_path / "random").write_bytes(np.random.default_rng(0).bytes(5000))
    (tmp_path / "named").write_bytes(data.replace(b"Conv_first", b"\xff\xfe\xfd\xfcfirst!"))
    deep = b""
    for _ in range(300):  # a graph within a node within a graph
        attribute_of = b"\x32" + _length(deep) + deep
        of_node = b"\x2a" + _length(attribute_of) + attribute_of
        deep = b"\x0a" + _length(of_node) + of_node
    (tmp_path / "deep").write_bytes(b"\x3a" + _length(deep) + deep)
    for name in ("pipe", "cut", "random", "named", "deep", ""):
        result = judged(tmp_path / name)
        assert (result.exit_code, result.output.count("\n")) == (2, 1), (name, result.output)


def _length(data: bytes) -> bytes:
    number, coded = len(data), b""
    while number > 127:
        coded, number = coded + bytes([number & 127 | 128]), number >> 7
    return coded + bytes([number])


def test_a_rule_that_fails_is_a_line_and_the_others_have_their_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(graph: Graph, target: LintTarget):
        for layer in graph.of("Conv"):
            yield Fault(layer.name, "first\nsecond", "remedy")
            raise ZeroDivisionError("by its group")

    rules = {"fails": Rule("fails", "error", ("cpu",), fails), "slow-integers": base.rules()["slow-integers"]}
    monkeypatch.setattr(base, "rules", lambda: rules)
    path = written_to(tmp_path, model_of(Written(signed=True)))
    result = judged(path)
    assert result.exit_code == 2
    assert "the rule 'fails', at Conv_first: ZeroDivisionError: by its group" in result.stderr
    assert "error: Conv_first: first\\nsecond; remedy [fails]" in result.stdout
    assert result.stdout.count("[slow-integers]") == 2
    document = json.loads(CliRunner().invoke(app, ["lint", str(path), "--json"]).stdout)
    assert [entry["rule"] for entry in document["findings"]] == ["fails", "slow-integers", "slow-integers"]
    (entry,) = document["not_judged"]
    assert (entry["failed"], entry["why"]) == (True, "ZeroDivisionError: by its group")
    with pytest.raises(UserError, match="the rule 'fails', at Conv_first cannot be checked: ZeroDivisionError"):
        lint(onnx.load(path), "cpu")


def test_what_no_rule_looks_at_is_said(tmp_path: Path) -> None:
    model = whole()
    twice = helper.make_node("Add", ["a", "a"], ["b"])
    model.functions.append(helper.make_function("own", "Twice", ["a"], ["b"], [twice], [helper.make_opsetid("", 20)]))
    model.opset_import.append(helper.make_opsetid("own", 1))
    place = list(model.graph.node).index(node(model, "second"))
    model.graph.node.insert(place, helper.make_node("Twice", ["y"], ["doubled"], domain="own"))
    branch = helper.make_graph(
        [helper.make_node("Identity", ["y"], ["same"])], "branch", [], [helper.make_tensor_value_info("same", 1, None)]
    )
    condition = numpy_helper.from_array(np.array(True), "condition")
    model.graph.initializer.append(condition)
    chosen = helper.make_node("If", ["condition"], ["chosen"], "choice", then_branch=branch, else_branch=branch)
    model.graph.node.insert(place, chosen)
    path = written_to(tmp_path, model)
    assert opens(path)
    result = judged(path)
    assert result.exit_code == 0
    assert "well-formed" not in result.stdout
    assert "nothing found in the parts of" in result.stdout
    for what in ("operators own.Twice", "the bodies of functions own.Twice", "the graphs within choice"):
        assert f"not checked: {what}: the rules" in result.stdout


def test_another_domains_operator_is_no_convolution_and_without_its_library_the_graph_is_not_judged(
    tmp_path: Path,
) -> None:
    model = whole()
    model.opset_import.append(helper.make_opsetid("theirs", 1))
    theirs = helper.make_node("Conv", ["y", "first_wf"], ["more"], domain="theirs", group=b"\xff", kernel_shape="x")
    model.graph.node.insert(list(model.graph.node).index(node(model, "second")), theirs)
    path = written_to(tmp_path, model)
    assert not opens(path)
    result = judged(path)
    assert result.exit_code == 2
    assert "not checked: operators theirs.Conv" in result.stdout
    assert "it has no operators of theirs without their library" in result.stderr
    assert lint(model, "cpu") == ()


def test_what_has_no_kernel_on_a_cpu_is_not_judged_for_tensorrt_and_refused_for_a_cpu(tmp_path: Path) -> None:
    written = Written(signed=True)
    written.opset = 22
    for operator, taken, gives, to in (
        ("Cast", "pooled", "halved", {"to": TensorProto.BFLOAT16}),
        ("GlobalAveragePool", "halved", "again", {}),
        ("Cast", "again", "floats", {"to": TensorProto.FLOAT}),
    ):
        written.before("logits_q", operator, [taken], gives, **to)
    written.node("logits_q").input[0] = "floats"
    path = written_to(tmp_path, written.model())
    assert not opens(path)
    assert (
        "not checked: whether ONNX Runtime opens the graph: NotImplemented"
        in judged(path, "--target", "tensorrt").stderr
    )
    assert "is not well-formed: ONNX Runtime cannot open it: NotImplemented" in judged(path).stderr


def test_a_path_through_moves_that_meet_again_is_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    written = Written(signed=False)
    written.before("second", "Softmax", ["y"], "moved_0")
    for number in range(16):
        for half in "ab":
            written.before("second", "Identity", [f"moved_{number}"], f"{half}_{number}")
        written.before("second", "Reshape", [f"a_{number}", f"b_{number}"], f"moved_{number + 1}")
    asked, takers = [], Graph.takers

    def counted(graph: Graph, entry: NodeProto) -> list[NodeProto]:
        asked.append(entry)
        return takers(graph, entry)

    monkeypatch.setattr(Graph, "takers", counted)
    assert lint(model_of(written), "cpu") == ()
    assert len(asked) < 2000


NAMES = ("group", "pads", "strides", "dilations", "kernel_shape", "axis", "block_size", "auto_pad", "to", "epsilon")
NUMBERS = strategies.one_of(strategies.integers(-2, 5), strategies.sampled_from([2**31, 2**62, -(2**63), 10**12, 77]))
VALUES = strategies.one_of(
    NUMBERS,
    strategies.lists(NUMBERS, min_size=1, max_size=5),
    strategies.floats(width=32),
    strategies.sampled_from([b"\xff", b"SAME_UPPER", b"", b"constant"]),
)


def change_attribute(model: onnx.ModelProto, data: strategies.DataObject) -> None:
    entry = data.draw(strategies.sampled_from(list(model.graph.node)))
    name = data.draw(strategies.sampled_from(NAMES))
    kept = [other for other in entry.attribute if other.name != name]
    del entry.attribute[:]
    entry.attribute.extend([*kept, helper.make_attribute(name, data.draw(VALUES))])


def change_tensor(model: onnx.ModelProto, data: strategies.DataObject) -> None:
    place = data.draw(strategies.integers(0, len(model.graph.initializer) - 1))
    entry, array = model.graph.initializer[place], numpy_helper.to_array(whole().graph.initializer[place])
    field = data.draw(strategies.sampled_from(["data_type", "dims", "raw_data", "array", "type_too", "name"]))
    if field == "data_type":
        entry.data_type = data.draw(strategies.integers(-1, 40))
    elif field == "dims":
        entry.dims[:] = data.draw(strategies.lists(NUMBERS, max_size=5))
    elif field == "raw_data":
        entry.raw_data = data.draw(strategies.binary(max_size=40))
    elif field == "name":
        entry.name = data.draw(strategies.text(max_size=5))
    elif field == "array":
        numbers = np.resize(np.array(data.draw(strategies.lists(NUMBERS, min_size=1, max_size=3)), object), array.shape)
        with np.errstate(all="ignore"):
            entry.raw_data = numbers.astype(np.float64).astype(np.int64).astype(array.dtype).tobytes()
    else:
        kind = data.draw(strategies.sampled_from([np.uint8, np.int8, np.int32, np.float16, np.float64, np.bool_]))
        sizes = data.draw(strategies.sampled_from([array.shape, (0,), (1,), (4,), (4, 1), (2,)]))
        entry.CopyFrom(numpy_helper.from_array(np.zeros(sizes, kind), entry.name))


def change_graph(model: onnx.ModelProto, data: strategies.DataObject) -> None:
    entry = data.draw(strategies.sampled_from(list(model.graph.node)))
    names = [*(name for other in model.graph.node for name in other.output), "nowhere", "", "input", "y_scale"]
    kind = data.draw(strategies.sampled_from(["input", "output", "drop", "copy", "operator", "name", "opset", "type"]))
    if kind == "input":
        entry.input[data.draw(strategies.integers(0, 1)) :] = [data.draw(strategies.sampled_from(names))]
    elif kind == "output":
        entry.output[:] = [data.draw(strategies.sampled_from(names))]
    elif kind == "drop":
        dropped = data.draw(strategies.sampled_from([model.graph.node, entry.input, entry.output]))
        del dropped[-1:]
    elif kind == "copy":
        model.graph.node.append(entry)
    elif kind == "operator":
        entry.op_type = data.draw(strategies.sampled_from(["Conv", "MatMul", "Gemm", "Reshape", "Clip", "Sum", "Pad"]))
    elif kind == "name":
        entry.name = data.draw(strategies.sampled_from(["", "a\nb", "Conv_first", "\x1b[31m"]))
    elif kind == "opset":
        model.opset_import[0].version = data.draw(NUMBERS)
    else:
        model.graph.input[0].type.tensor_type.elem_type = data.draw(strategies.integers(-1, 40))


CHANGES = (change_attribute, change_tensor, change_graph)


@settings(max_examples=15)
@given(strategies.data())
def test_a_changed_graph_is_judged_or_refused_and_what_onnx_runtime_does_not_open_is_not_well_formed(
    tmp_path_factory: pytest.TempPathFactory, data: strategies.DataObject
) -> None:
    model = whole()
    for _ in range(data.draw(strategies.integers(1, 2))):
        data.draw(strategies.sampled_from(CHANGES))(model, data)
    content = model.SerializeToString()
    if data.draw(strategies.booleans()) and data.draw(strategies.booleans()):
        place = data.draw(strategies.integers(0, len(content) - 1))
        patch = data.draw(strategies.binary(max_size=8))
        content = content[:place] + patch + content[place + len(patch) :]
    path = tmp_path_factory.getbasetemp() / "changed.onnx"
    path.write_bytes(content)
    result = judged(path)
    assert ("well-formed for" in result.stdout) <= (result.exit_code == 0)
    if result.exit_code == 0:
        assert opens(path)
