"""INT8 for TensorRT: what the graph holds, that the linter agrees, and that its numbers are torch's."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, numpy_helper
from torch import nn
from torchvision.models.resnet import BasicBlock, ResNet

from optimize.lint.base import lint
from optimize.passes.onnx import ONNX, Onnx
from optimize.passes.onnx_int8 import ONNX_INT8, OnnxInt8
from optimize.passes.ptq import PTQ, Ptq
from optimize.store.artifact import REFERENCE_FILE, Artifact
from serve.runtime.card.card import Preprocessing
from serve.runtime.engines.base import engines_for, executions_for
from serve.runtime.model_files.program_file import load_program
from tests.narrow import layer
from tests.optimize.workbench import (
    decibels,
    noise_context,
    parent_of,
    quantizers,
    run,
    through_int8,
    with_running_statistics,
)

Chain = Callable[..., tuple[Artifact, Artifact]]


@pytest.fixture(scope="module")
def chain(session, made) -> Chain:
    """``chain("ptq")``: the quantized artifact for TensorRT and its graph of floats."""

    def make(name: str, **config: object) -> tuple[Artifact, Artifact]:
        quantized = made(name, target="tensorrt", **config)
        return quantized, session.apply(quantized, OnnxInt8(input="float"), f"{name}-tensorrt").artifact

    return make


def literal(path: Path, batch: torch.Tensor) -> torch.Tensor:
    """ONNX Runtime's CPU provider, which leaves every node as the graph has it."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    opened = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    (logits,) = opened.run(None, {opened.get_inputs()[0].name: batch.numpy()})
    return torch.from_numpy(logits)


def makers(graph: onnx.GraphProto) -> dict[str, onnx.NodeProto]:
    return {output: node for node in graph.node for output in node.output}


@pytest.mark.parametrize("name", ["ptq", "qat"])
def test_torch_computes_what_the_integers_mean_and_the_card_says_so(name: str, chain: Chain, digits_context) -> None:
    quantized, _ = chain(name)
    assert (quantized.card.target, quantized.card.file, quantized.card.device) == ("tensorrt", REFERENCE_FILE, "cpu")
    assert quantized.card.precision == "int8 in float arithmetic"
    assert "torch has no kernels for them" in quantized.card.notes[0]
    assert [execution.engine for execution in executions_for(quantized.card)] == ["exported"]
    found = quantizers(quantized.folder)
    assert len(found) > 5
    assert {entry[1:] for entry in found} == {(0, -128, 127)}
    batch = digits_context.example(8)
    with torch.no_grad():
        expected = load_program(quantized.folder / REFERENCE_FILE).module()(batch)
    assert torch.equal(run(quantized, batch), expected)


@pytest.mark.parametrize("name", ["ptq", "qat"])
def test_the_graph_keeps_to_every_rule_that_is_known(name: str, chain: Chain) -> None:
    quantized, artifact = chain(name)
    model = onnx.load(artifact.path)
    assert lint(model, "tensorrt") == ()
    kinds = [node.op_type for node in model.graph.node]
    assert "BatchNormalization" not in kinds
    assert kinds.count("QuantizeLinear") == len(quantizers(quantized.folder))
    assert [entry.version for entry in model.opset_import if entry.domain == ""] == [20]
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    by = makers(model.graph)
    for node in model.graph.node:
        if node.op_type in ("Conv", "Gemm"):
            assert by[node.input[0]].op_type == "DequantizeLinear"
            weight = by[node.input[1]]
            integers, scales = values[weight.input[0]], values[weight.input[1]]
            assert integers.dtype == np.int8
            assert scales.shape == integers.shape[:1]
            assert integers.min() >= -127
            assert values[node.input[2]].dtype == np.float32, "the bias"


@pytest.mark.parametrize("name", ["ptq", "qat"])
def test_a_sum_takes_its_shortcut_quantized_and_its_convolution_as_it_is(name: str, chain: Chain) -> None:
    model = onnx.load(chain(name)[1].path)
    by = makers(model.graph)
    ((one, other),) = [
        sorted(by[addend].op_type for addend in node.input) for node in model.graph.node if node.op_type == "Add"
    ]
    assert (one, other) == ("Conv", "DequantizeLinear")
    assert by[model.graph.output[0].name].op_type == "Gemm", "the answer is not rounded"


def test_the_artifact_is_made_for_a_gpu_and_measured_on_none_that_is_not_there(chain: Chain) -> None:
    card = chain("ptq")[1].card
    assert (card.target, card.device, card.precision) == ("tensorrt", "cuda", "int8")
    assert [entry.name for entry in engines_for(card)] == ["onnxruntime-tensorrt"]
    assert executions_for(card, "cpu") == []
    assert any("its own answers and speed are not measured" in note for note in card.notes)


def test_the_batches_that_it_is_compiled_for_lie_beside_it(chain: Chain) -> None:
    artifact = chain("ptq")[1]
    profile = json.loads((artifact.folder / "model.onnx.profile.json").read_text())
    assert profile["trtexec"] == [
        "--minShapes=input:1x1x16x16",
        "--optShapes=input:64x1x16x16",
        "--maxShapes=input:64x1x16x16",
    ]
    assert profile["onnxruntime"]["trt_profile_opt_shapes"] == "input:64x1x16x16"
    assert "model.onnx.profile.json" in artifact.card.files


@pytest.mark.parametrize("name", ["ptq", "qat"])
def test_the_graphs_numbers_are_torchs_but_for_ties(name: str, chain: Chain, digits_context) -> None:
    quantized, artifact = chain(name)
    batch = digits_context.example(256)
    expected, found = run(quantized, batch), literal(artifact.path, batch)
    assert (expected.argmax(1) == found.argmax(1)).float().mean() >= 0.99
    signal, noise = expected.double().pow(2).sum(), (found - expected).double().pow(2).sum()
    assert 10 * torch.log10(signal / noise) > 40


def pooled() -> nn.Module:
    convolutions = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, groups=8)
    return nn.Sequential(convolutions[0], nn.Hardswish(), nn.MaxPool2d(2), convolutions[1], nn.Flatten())


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU6(), nn.Conv2d(8, 4, 1), nn.Flatten()
    )


@pytest.mark.parametrize("build", [pooled, normed])
def test_on_equal_integers_the_graph_gives_what_torch_does(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    quantized, path = lowered(with_running_statistics(build()), tmp_path)
    assert lint(onnx.load(path), "tensorrt") == ()
    scale = quantizers(quantized)[0][0]
    batch = torch.randint(-128, 128, (4, 1, 16, 16), generator=torch.Generator().manual_seed(1)) * scale
    with torch.no_grad():
        expected = load_program(quantized / REFERENCE_FILE).module()(batch)
    found = literal(path, batch)
    assert ((found - expected).abs() <= 1e-5 * expected.abs().max()).float().mean() > 0.999
    assert expected.unique().numel() > 100


def test_a_relu6_is_none_the_less_one_where_floats_are_read_from_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU6(), nn.BatchNorm2d(4), nn.Flatten()).eval()
    layer(module, 0, nn.Conv2d).weight.data.mul_(20)
    quantized, path = lowered(module, tmp_path)
    batch = noise_context().example(8)
    with torch.no_grad():
        expected = module(batch)
        meant = load_program(quantized / REFERENCE_FILE).module()(batch)
    assert expected.max() > 5.9
    for found in (meant, literal(path, batch)):
        assert (found - expected).abs().max() < 0.5


def lowered(module: nn.Module, folder: Path, **config: Any) -> tuple[Path, Path]:
    """``ptq`` for TensorRT and ``onnx-int8``; the folder of the first and the file of the second."""
    settings = Ptq(target="tensorrt", images=16, **config)
    return through_int8(module, folder, settings, OnnxInt8(input="float"), noise_context())


def test_the_stem_may_stay_in_float(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten()).eval()
    model = onnx.load(lowered(module, tmp_path, keep_float=("0",))[1])
    by, values = makers(model.graph), {tensor.name: tensor for tensor in model.graph.initializer}
    stem, other = (node for node in model.graph.node if node.op_type == "Conv")
    assert (stem.input[0], values[stem.input[1]].data_type) == (model.graph.input[0].name, TensorProto.FLOAT)
    assert [by[name].op_type for name in other.input[:2]] == ["DequantizeLinear"] * 2
    assert lint(model, "tensorrt") == ()


class Pooled(nn.Module):
    """Wide ranges in front of a mean: what is left of them there is a small part."""

    def __init__(self, pool: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.pool, self.head = (
            nn.Conv2d(1, 16, 3),
            nn.Conv2d(16, 16, 3),
            pool,
            nn.Linear(16, 4),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.pool(self.second(torch.relu(self.first(x))).relu()))


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3))


@pytest.mark.parametrize("pool", [nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), Mean()], ids=["pool", "mean"])
def test_means_have_a_range_of_their_own(pool: nn.Module, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Pooled(pool).eval()
    folder, path = lowered(module, tmp_path)
    scales = [scale for scale, *_ in quantizers(folder)]
    assert 0 < scales[-1] < scales[2] / 2, "of the means, and of what they are means of"
    assert lint(onnx.load(path), "tensorrt") == ()
    batch = noise_context().example(32)
    with torch.no_grad():
        expected = module(batch)
    # What tells the images apart. With one scale for both it is 11 dB.
    apart = [answers - answers.mean(0) for answers in (expected, literal(path, batch))]
    assert decibels(*apart) > 15


@pytest.mark.slow
def test_a_resnet_is_at_most_a_quarter_and_quantizes_all_shortcuts(tmp_path: Path) -> None:
    """Of ResNet-18's first stage, whose second reads a sum, and one block of each other, which have convolutions."""
    torch.manual_seed(0)
    module = ResNet(BasicBlock, [2, 1, 1, 1], num_classes=4).eval()
    context = dataclasses.replace(noise_context(), preprocessing=Preprocessing(32, (32, 32)))
    parent = parent_of(module, context, tmp_path / "parent")
    for name in ("ptq", "onnx-int8", "onnx"):
        (tmp_path / name).mkdir()
    product = PTQ.apply(parent, Ptq(images=8, target="tensorrt"), context, tmp_path / "ptq")
    card = dataclasses.replace(parent.card, target=product.target)
    artifact = Artifact("ptq", "quantized", "1" * 64, tmp_path / "ptq", card, parent)
    ONNX_INT8.apply(artifact, OnnxInt8(), context, tmp_path / "onnx-int8")
    ONNX.apply(parent, Onnx(), context, tmp_path / "onnx")
    size, floats = ((tmp_path / name / "model.onnx").stat().st_size for name in ("onnx-int8", "onnx"))
    assert size <= 0.27 * floats
    model = onnx.load(tmp_path / "onnx-int8" / "model.onnx")
    assert lint(model, "tensorrt") == ()
    by = makers(model.graph)
    sums = [node for node in model.graph.node if node.op_type == "Add"]
    assert [sorted(by[name].op_type for name in node.input) for node in sums] == [["Conv", "DequantizeLinear"]] * 5
