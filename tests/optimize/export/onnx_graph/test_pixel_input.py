"""Graphs that take pixels: the same answers as graphs of floats, whatever the first layer pads with."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, numpy_helper
from torch import nn
from torch.nn import functional

from optimize.context import Context
from optimize.data.records import Split
from optimize.data.targets import Labels
from optimize.errors import PassError
from optimize.export.onnx_graph.image_quantizer import keep_rounding
from optimize.export.onnx_graph.pixel_input import GraphInput
from optimize.export.onnx_graph.write import check_against, run_onnx
from optimize.passes.base import Pass
from optimize.passes.onnx import ONNX, Onnx
from optimize.passes.onnx_half import ONNX_HALF, OnnxHalf
from optimize.passes.onnx_int8 import ONNX_INT8, OnnxInt8
from optimize.passes.ptq import PTQ, Ptq
from optimize.store.artifact import REFERENCE_FILE, Artifact
from serve.common.config import Config
from serve.runtime.card.card import Preprocessing
from serve.runtime.card.execution import Execution
from serve.runtime.engines.base import executions_for, open_engine, unavailable
from serve.runtime.engines.openvino import compile_bytes
from serve.runtime.errors import UserError
from serve.runtime.model_files.program_file import load_program
from serve.runtime.service.predictor import Predictor, infer
from tests.optimize.workbench import applied, noise, noise_context, parent_of, png
from tests.processor import NEEDS_VNNI

#: Mean and standard deviation far from 0 and 1, another for each channel: normalised black is far from zero.
COLOUR = Preprocessing(16, (16, 16), mean=(0.9, 0.485, 0.2), std=(0.1, 0.229, 0.3))


def padded() -> nn.Sequential:
    """Its first convolution pads two pixels with zeros, and what lies at the border reaches the logits unweakened."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(128, 4)
    ).eval()


@pytest.fixture(scope="module")
def context() -> Context:
    extremes = [np.zeros((16, 16)), np.full((16, 16), 255), np.tri(16) * 255, np.indices((16, 16)).sum(0) % 2 * 255]
    sources = (*noise(28, 1).sources, *(png(image) for image in extremes))
    train = Split(sources, Labels(torch.arange(32) % 4))
    return dataclasses.replace(noise_context(train=train), preprocessing=COLOUR)


@pytest.fixture(scope="module")
def pixels() -> torch.Tensor:
    """Noise, black, white, and frames that are white at the border only."""
    drawn = torch.randint(0, 256, (5, 3, 16, 16), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
    drawn[1], drawn[2], drawn[3] = 0, 255, 0
    drawn[3, :, 0, :] = drawn[3, :, :, -1] = 255
    return drawn


def normalised(pixels: torch.Tensor) -> np.ndarray:
    """The runtime's formula in float32, x * (1 / (255 std)) - mean / std, each step rounded, by numpy alone."""
    std, mean = (np.array(side, dtype=np.float32).reshape(1, 3, 1, 1) for side in (COLOUR.std, COLOUR.mean))
    product = pixels.numpy().astype(np.float32) * (np.float32(1) / (np.float32(255) * std))
    difference: np.ndarray = product - mean / std
    assert difference.dtype == np.float32
    return difference


@pytest.fixture(scope="module")
def graphs(context, tmp_path_factory) -> dict[str, Artifact]:
    """Each of the three passes with both inputs: ``onnx-uint8``, ``onnx-float`` …"""
    root = tmp_path_factory.mktemp("graphs")
    baseline = parent_of(padded(), context, root / "parent")
    quantized = applied(PTQ, Ptq(observer="minmax"), baseline, context, root / "ptq")
    found = {}
    inputs: tuple[GraphInput, ...] = ("uint8", "float")
    for given in inputs:
        ways: list[tuple[Pass[Any], Config, Artifact]] = [
            (ONNX, Onnx(input=given), baseline),
            (ONNX_HALF, OnnxHalf(input=given), baseline),
            (ONNX_INT8, OnnxInt8(input=given), quantized),
        ]
        for entry, config, parent in ways:
            name = f"{entry.name}-{given}"
            found[name] = applied(entry, config, parent, context, root / name)
    return found


def in_onnxruntime(path: Path, batch: np.ndarray) -> torch.Tensor:
    """ONNX Runtime as it comes, with nothing of the project."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"input": batch})
    return torch.from_numpy(logits)


PASSES = ("onnx", "onnx-half", "onnx-int8")


@pytest.mark.parametrize("name", PASSES)
def test_pixels_give_the_bits_of_what_numpy_normalised(name, graphs, pixels):
    taken = in_onnxruntime(graphs[f"{name}-uint8"].path, pixels.numpy())
    given = in_onnxruntime(graphs[f"{name}-float"].path, normalised(pixels))
    assert torch.equal(taken, given)
    assert taken.unique().numel() > 8


@pytest.mark.parametrize(("name", "bound"), [("onnx", 1e-5), ("onnx-half", 0.01), ("onnx-int8", 0.1)])
def test_padding_is_zero_after_the_normalisation(name, bound, graphs, pixels):
    """Against the network in float64, which pads what is normalised; padded before it, black would not be zero."""
    module, exact = padded().double(), torch.from_numpy(normalised(pixels)).double()
    black = torch.tensor([-mean / std for mean, std in zip(COLOUR.mean, COLOUR.std, strict=True)]).double()
    framed = torch.stack([functional.pad(exact[:, c], (2, 2, 2, 2), value=float(black[c])) for c in range(3)], dim=1)
    first = module[0]
    assert isinstance(first, nn.Conv2d)
    with torch.no_grad():
        wanted = module(exact)
        wrong = module[1:](functional.conv2d(framed, first.weight, first.bias))
    scale = wanted.abs().max()
    found = in_onnxruntime(graphs[f"{name}-uint8"].path, pixels.numpy())
    assert (wrong - wanted).abs().max() > 3 * bound * scale, "this network would not notice"
    assert (found - wanted).abs().max() <= bound * scale


@pytest.mark.parametrize("name", PASSES)
def test_the_runtime_answers_alike_from_either_graph_in_every_engine(name, graphs, pixels):
    taken, given = graphs[f"{name}-uint8"], graphs[f"{name}-float"]
    assert (taken.card.input_dtype, given.card.input_dtype) == ("uint8", "float32")
    tried = [entry for entry in executions_for(taken.card) if unavailable(entry.engine, "cpu") is None]
    assert {entry.engine for entry in tried} >= {"onnxruntime"}
    for execution in tried:
        (one,), (other,) = (
            infer(open_engine(a.folder, a.card, execution), pixels, COLOUR, getattr(torch, a.card.input_dtype))
            for a in (taken, given)
        )
        # OpenVINO multiplies the first weights by the factor, which rounds otherwise.
        atol = 0.0 if execution.engine == "onnxruntime" else 1e-4 * float(other.abs().max())
        torch.testing.assert_close(one, other, rtol=0, atol=atol)
        assert one.dtype == torch.float32


def test_the_normalisation_stands_alone_at_the_entry(graphs):
    for name in PASSES:
        model = onnx.load(graphs[f"{name}-uint8"].path)
        (given,) = model.graph.input
        assert given.type.tensor_type.elem_type == TensorProto.UINT8
        first = [node for node in model.graph.node if node.op_type != "Constant"][:3]
        assert [node.op_type for node in first] == ["Cast", "Mul", "Sub"]
        assert [first[0].input[0], first[1].input[0], first[2].input[0]] == [
            "input",
            first[0].output[0],
            first[1].output[0],
        ]
        values = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
        factor, shift = (values[node.input[1]].reshape(3) for node in first[1:])
        std, mean = np.array(COLOUR.std, dtype=np.float32), np.array(COLOUR.mean, dtype=np.float32)
        np.testing.assert_array_equal(factor, np.float32(1) / (np.float32(255) * std))
        np.testing.assert_array_equal(shift, mean / std)


@pytest.fixture(scope="module")
def alike(context, tmp_path_factory) -> Artifact:
    """An int8 graph of pixels that are normalised alike in all channels, and whose quantizer nearly gives them back."""
    root = tmp_path_factory.mktemp("alike")
    same = dataclasses.replace(COLOUR, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    own = dataclasses.replace(context, preprocessing=same)
    baseline = parent_of(padded(), own, root / "parent")
    quantized = applied(PTQ, Ptq(), baseline, own, root / "ptq")
    return applied(ONNX_INT8, OnnxInt8(), quantized, own, root / "onnx-int8")


def test_openvino_rounds_the_image_as_the_graph_says(alike, pixels):
    exact = run_onnx(alike.path, pixels, literal=True)
    (found,) = open_engine(alike.folder, alike.card, Execution("openvino")).run(pixels)
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-6)


@NEEDS_VNNI
def test_openvino_left_to_itself_takes_the_pixels_for_the_quantizers_integers(alike, pixels):
    """They are half a step off; of 7 bits there are half as many integers as pixels."""
    model = onnx.load(alike.path)
    first, second = (node for node in model.graph.node if node.op_type == "Cast")
    second.input[0] = "input"
    model.graph.node.remove(first)
    left = next(iter(compile_bytes(model.SerializeToString(), 1)(pixels.numpy()).values()))
    assert not torch.equal(torch.from_numpy(left), run_onnx(alike.path, pixels, literal=True))


def test_no_number_of_the_graph_changes_by_it(alike, pixels, graphs):
    assert not keep_rounding(
        onnx.load(graphs["onnx-int8-uint8"].path)
    )  # its channels are normalised each in its own way: OpenVINO rounds
    model = onnx.load(alike.path)
    kinds = [node.op_type for node in model.graph.node if node.op_type != "Constant"][:5]
    assert kinds == ["Cast", "Cast", "Mul", "Sub", "QuantizeLinear"]
    program = load_program(alike.parent.folder / REFERENCE_FILE).module()
    meant = program((pixels.float() / 255 - 0.5) / 0.5)
    torch.testing.assert_close(in_onnxruntime(alike.path, pixels.numpy()), meant, rtol=0, atol=1e-5)


def test_a_served_graph_of_pixels_says_so(graphs, pixels):
    predictor = Predictor(graphs["onnx-uint8"].folder)
    assert predictor.describe()["input"] == {"shape": [3, 16, 16], "dtype": "uint8"}
    expected = padded()(torch.from_numpy(normalised(pixels))).softmax(1)
    torch.testing.assert_close(predictor.logits(pixels).softmax(1), expected, rtol=1e-4, atol=1e-5)


def test_a_graph_of_another_normalisation_is_noticed(context, tmp_path):
    other = dataclasses.replace(context, preprocessing=dataclasses.replace(COLOUR, mean=(0.5, 0.5, 0.5)))
    parent = parent_of(padded(), context, tmp_path / "parent")
    ONNX.apply(parent, Onnx(), other, tmp_path)
    with pytest.raises(PassError, match="differ from the parent's"):
        check_against(tmp_path / "model.onnx", context.pixels(8), padded()(context.example(8)).detach(), 1e-3)


def test_half_takes_pixels_or_half_floats_and_not_both():
    assert OnnxHalf().input == "uint8"
    assert OnnxHalf(io="float16").input == "float"
    with pytest.raises(UserError, match=r"io=float16 needs input=float; with input=uint8 the graph reads pixels"):
        OnnxHalf(io="float16", input="uint8")
