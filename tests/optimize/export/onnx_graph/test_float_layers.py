"""A layer that is kept in float is computed in float by every engine, whatever the engine would rather do."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch

from optimize.export.onnx_graph.float_layers import keep_in_float
from optimize.lint.base import lint
from optimize.lint.untrusted_files import read_graph
from optimize.passes.onnx_int8 import OnnxInt8
from optimize.passes.ptq import Ptq
from optimize.store.artifact import REFERENCE_FILE
from serve.runtime.engines.base import executions_for, open_engine
from serve.runtime.model_files.program_file import load_program

#: One behind quantized layers and before others, with weights that do not suit one scale; and the last.
KEPT = ("expand.0", "head")


def operators(path: Path, optimized: Path) -> Counter[str]:
    """What ONNX Runtime makes of a graph before it runs it."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(optimized)
    options.log_severity_level = 3
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return Counter(node.op_type for node in onnx.load(str(optimized)).graph.node)


@pytest.fixture(scope="module", params=[(), ("head",), KEPT], ids=["fp32", "head-fp16", "fp16"])
def graph(request, made, session):
    parent = session.apply(made("fuse"), Ptq(images=64, keep_float=KEPT)).artifact
    return session.apply(parent, OnnxInt8(max_size_ratio=1.0, half=request.param)).artifact


def test_onnx_runtime_has_as_many_int8_convolutions_as_were_asked_for(graph, tmp_path: Path) -> None:
    found = operators(graph.path, tmp_path / "optimized.onnx")
    assert found["QLinearConv"] == 3
    assert sum(count for name, count in found.items() if name in ("Conv", "FusedConv")) == 1
    assert found["Gemm"] == 1
    assert not any("Gemm" in name and "Q" in name for name in found)


def test_every_engine_gives_what_the_integers_and_the_float_weights_mean(graph, session) -> None:
    batch = session.context.pixels(32)
    meant = load_program(graph.parent.folder / REFERENCE_FILE).module()
    with torch.no_grad():
        expected = meant(session.context.example(32))
        executions = executions_for(graph.card, "cpu")
        assert {execution.engine for execution in executions} >= {"onnxruntime", "openvino"}
        for execution in executions:
            (found,) = open_engine(graph.folder, graph.card, execution).run(batch)
            noise = float((found - expected).square().mean() / expected.square().mean())
            # Ties that spread; a weight with one scale for the whole tensor would leave more than a thousandth.
            assert noise < 5e-4, execution


def test_the_linter_has_no_complaint(graph) -> None:
    assert not [finding for finding in lint(read_graph(graph.path), "cpu") if finding.severity == "error"]


def test_a_graph_without_float_layers_is_left_as_it_is(made) -> None:
    model = onnx.load(str(made("fuse", "ptq", "onnx-int8").path))
    before = model.SerializeToString()
    assert keep_in_float(model) == 0
    assert model.SerializeToString() == before
