"""Biases of int8 layers: whole numbers of the products' scale, and the same ones in every engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn
from torch.nn import functional

from optimize.passes.base import Pass
from optimize.passes.onnx_int8 import ONNX_INT8, OnnxInt8
from optimize.passes.ptq import PTQ, Ptq
from optimize.passes.qat import QAT, Qat
from optimize.quantization.lowering.integer_biases import whole
from optimize.quantization.targets import TargetName
from optimize.store.artifact import REFERENCE_FILE
from serve.common.config import Config
from serve.runtime.card.execution import Execution
from serve.runtime.engines.base import execution_id
from serve.runtime.model_files.program_file import load_program
from tests.optimize.certify.test_certify_layers import GRAPHS, ORT, TORCH, Made, Net, quantized
from tests.optimize.workbench import applied, noise_context, packed_biases, parent_of, with_running_statistics


class Normed(nn.Module):
    """Norms that quantization-aware training keeps, and conversion folds into biases."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))
        self.head = nn.Linear(8 * 49, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.flatten(torch.relu(self.second(self.first(x))), 1))


class Called(nn.Module):
    """Layers that are functions, and one bias for two of them, whose products have other scales."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(6, 1, 3, 3), torch.randn(6, 6, 3, 3)])
        self.bias, self.head = nn.Parameter(torch.randn(6)), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(functional.conv2d(x, self.weights[0], self.bias, (2, 2), (0, 0), (1, 1), 1))
        x = functional.relu(functional.conv2d(x, self.weights[1], self.bias, (1, 1), (1, 1), (1, 1), 1))
        return self.head(functional.adaptive_avg_pool2d(x, 1).flatten(1))


def made(module: nn.Module, folder: Path, name: str, target: TargetName = "auto") -> Path:
    """``module`` after ptq or qat, and onnx-int8, in folders of their names."""
    context = noise_context()
    parent = parent_of(module.eval(), context, folder / "parent")
    passes: dict[str, tuple[Pass[Any], Config]] = {
        "ptq": (PTQ, Ptq(observer="minmax", images=32, target=target, min_agreement=0.0)),
        "qat": (QAT, Qat(epochs=1, images=32, batch_size=16, target=target, min_agreement=0.0)),
    }
    packed = applied(*passes[name], parent, context, folder / name)
    applied(ONNX_INT8, OnnxInt8(max_size_ratio=1.0, min_agreement=0.0), packed, context, folder / "onnx-int8")
    return folder


def meant(folder: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """Each layer's bias in the reference program, and its products' scale, in order."""
    program = load_program(folder / REFERENCE_FILE).module()
    found = []
    for node in program.graph.nodes:
        if node.op == "call_function" and str(node.target).startswith(("aten.conv2d", "aten.linear")):
            given, weight, bias = node.args[:3]
            scales, value = _value(program, weight.args[1].target), _value(program, bias.target)
            found.append((value.detach().numpy(), np.float64(np.float32(given.args[1])) * scales.double().numpy()))
    return found


def _value(module: nn.Module, path: str) -> torch.Tensor:
    owner, _, name = path.rpartition(".")
    found: torch.Tensor = getattr(module.get_submodule(owner), name)
    return found


MODULES: list[tuple[Callable[[], nn.Module], str, int]] = [
    (Net, "ptq", 5),
    (Net, "qat", 5),
    (lambda: with_running_statistics(Normed(), seed=1), "qat", 3),
    (Called, "ptq", 3),
]


@pytest.fixture(scope="module", params=MODULES, ids=["ptq", "qat", "norms", "functions"])
def layers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, int]:
    factory, name, count = request.param
    torch.manual_seed(0)
    return made(factory(), tmp_path_factory.mktemp(name), name), name, count


def test_every_bias_is_a_whole_number_of_its_products_scale(layers: tuple[Path, str, int]) -> None:
    folder, name, count = layers
    found = meant(folder / name)
    assert len(found) == count
    integers = [bias / step for bias, step in found]
    assert all(np.abs(each - each.round()).max() < 1e-6 * max(1, np.abs(each).max()) for each in integers)
    assert any(np.abs(each).max() > 10 for each in integers)


def test_torchs_packed_program_adds_the_very_same(layers: tuple[Path, str, int]) -> None:
    folder, name, count = layers
    packed = packed_biases(folder / name / "model.pt")
    assert len(packed) == count
    for found, (expected, _) in zip(packed, meant(folder / name), strict=True):
        np.testing.assert_array_equal(found.detach().numpy(), expected)


def test_so_does_the_graph(layers: tuple[Path, str, int]) -> None:
    folder, name, _ = layers
    model = onnx.load(folder / "onnx-int8" / "model.onnx")
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    weighted = [node for node in model.graph.node if node.op_type in ("Conv", "Gemm")]
    expected = meant(folder / name)
    assert len(weighted) == len(expected)
    for node, (bias, _) in zip(weighted, expected, strict=True):
        np.testing.assert_array_equal(tensors[node.input[2]], bias)


def test_onnxruntimes_own_rounding_of_biases_changes_no_layer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    found = quantized(Net(), tmp_path).checked(ORT)
    weighted = [layer for layer in found.layers if "conv" in layer.name or "linear" in layer.name]
    assert len(weighted) == 5
    assert [layer for layer in weighted if not layer.holds] == []


def test_a_bias_moves_by_half_a_products_scale_at_most() -> None:
    weight, bias = torch.tensor([[3], [-5], [7]], dtype=torch.int8), torch.tensor([1.26, -1.24, 0.0])
    found = whole(weight, torch.ones(3), bias, 0.5)
    assert found.bias.tolist() == [1.5, -1.0, 0.0]
    assert not found.widened
    assert torch.equal(found.weight, weight)
    assert found.scales.tolist() == [1.0, 1.0, 1.0]


def test_weights_that_are_tiny_beside_their_bias_get_a_scale_that_makes_it_an_integer_of_32_bits() -> None:
    scales, bias = torch.tensor([1e-6, 1e-6, 1e-6]), torch.tensor([8.0, -4000.0, 1e6])
    weight = torch.tensor([[100], [100], [-100]], dtype=torch.int8)
    found = whole(weight, scales, bias, 0.5)  # of 2^24, -2^33, 2^41 times the products' scale, about
    assert found.widened
    integers = bias.double() / (0.5 * found.scales.double())
    assert integers.abs().max() <= 2**30 * (1 + 1e-6)
    assert found.scales[0] == scales[0]
    np.testing.assert_allclose(found.bias.numpy(), bias.numpy(), rtol=1e-6)
    held = found.weight.double().flatten() * found.scales
    assert ((held - weight.double().flatten() * scales).abs() <= found.scales / 2 * (1 + 1e-6)).all()


class Emptied(nn.Module):
    """Channels that a norm or pruning emptied: one of zeros, one of tiny weights; their biases are what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.depth, self.head = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3, groups=8), nn.Linear(8 * 144, 4)
        with torch.no_grad():
            for layer, biases in ((self.conv, (8.0, 5.0)), (self.depth, (30.0, 15.0))):
                layer.weight[0] = 0.0
                layer.weight[1] *= 1e-9
                assert layer.bias is not None
                layer.bias[:2] = torch.tensor(biases)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.flatten(torch.relu(self.depth(torch.relu(self.conv(x)))), 1))


@pytest.mark.parametrize("execution", [TORCH, *GRAPHS], ids=execution_id)
def test_a_channel_that_is_its_bias_keeps_it_in_every_engine(emptied: Made, execution: Execution) -> None:
    found = emptied.checked(execution)
    weighted = [layer for layer in found.layers if "conv" in layer.name or "linear" in layer.name]
    assert len(weighted) == 3
    assert [layer for layer in weighted if not layer.holds] == []


@pytest.fixture(scope="module")
def emptied(tmp_path_factory: pytest.TempPathFactory) -> Made:
    torch.manual_seed(0)
    return quantized(Emptied(), tmp_path_factory.mktemp("emptied"))
