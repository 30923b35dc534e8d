"""The peers that the CPU benchmark compares with: their artifacts are int8, and run in the engines that we measure."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from optimize.passes import base
from optimize.passes.onnx import Onnx
from serve.runtime.engines.base import executions_for, open_engine
from serve.runtime.errors import UserError
from serve.runtime.model_files.program_file import load_program
from tests.benchmarked import benchmark

pytestmark = pytest.mark.peers
pytest.importorskip("nncf")


@pytest.fixture(scope="module", autouse=True)
def peers() -> Iterator[None]:
    """The peers' passes, until these tests are over: the project itself does not have them."""
    with benchmark("benchmarks.peers"):
        yield


@pytest.mark.slow
@pytest.mark.parametrize(("name", "engines"), [("nncf", ["openvino"]), ("ort-static", ["openvino", "onnxruntime"])])
def test_what_a_peer_makes_is_smaller_and_answers_as_the_float_graph(name, engines, session, trained, digits_context):
    pixels = session.apply(trained, Onnx(), "onnx").artifact
    with pytest.raises(UserError, match="onnx takes uint8; the peers take a graph of floats"):
        session.apply(pixels, base.find_pass(name).config(images=64), name)
    graph = session.apply(trained, Onnx(input="float"), "onnx-floats").artifact
    artifact = session.apply(graph, base.find_pass(name).config(images=64), name).artifact
    weights = artifact.path.with_name(f"{artifact.path.name}.bin") if name == "nncf" else artifact.path
    assert weights.stat().st_size < 0.6 * graph.path.stat().st_size
    executions = executions_for(artifact.card)
    assert [execution.engine for execution in executions] == engines
    batch = digits_context.example(32)
    with torch.no_grad():
        wanted = trained.module()(batch)
        for execution in executions:
            (found,) = open_engine(artifact.folder, artifact.card, execution).run(batch)
            assert (found.argmax(1) == wanted.argmax(1)).float().mean() >= 0.9, execution.engine


@pytest.mark.slow
def test_the_program_of_torchaos_pt2e_holds_each_weight_once_as_integers(session, trained):
    """Its size stands in a table beside ours."""
    artifact = session.apply(trained, base.find_pass("pt2e").config(images=32), "pt2e").artifact
    weights = [tensor for tensor in load_program(artifact.path).state_dict.values() if tensor.dim() > 1]
    assert [tensor.dtype for tensor in weights] == 5 * [torch.int8]
