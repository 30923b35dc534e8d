"""Grouped 1 × 1 convolutions of widths that AMX does not take are in OpenVINO what their integers mean."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import fx, nn
from torch.nn import functional

from optimize.export.onnx_graph.write import run_onnx
from optimize.lint.base import lint
from optimize.quantization.lowering.amx.group_widths import border_groups
from optimize.quantization.targets import TargetName
from serve.runtime.engines.openvino import compile_bytes
from tests.optimize.explicit_nets import OPS, rounded
from tests.optimize.workbench import decibels, lowered, noise_context, of_seven_bits, with_running_statistics

ATEN = torch.ops.aten
STEP = 0.0137


class Grouped(nn.Module):
    """A residual block of two groups, as IGCV3 has them, and one more behind the sum."""

    def __init__(self, width: int, activation: nn.Module) -> None:
        super().__init__()
        self.stem, self.activation = nn.Conv2d(1, 2 * width, 3, 2), activation
        self.narrow, self.norm = nn.Conv2d(2 * width, 48, 1, groups=2, bias=False), nn.BatchNorm2d(48)
        self.widen = nn.Conv2d(48, 2 * width, 1, groups=2)
        self.last, self.head = nn.Conv2d(2 * width, 8, 1, groups=2), nn.Linear(8 * 49, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.activation(self.stem(x))
        x = x + self.widen(self.activation(self.norm(self.narrow(x))))
        found: torch.Tensor = self.head(self.last(x).flatten(1))
        return found


def grouped(width: int, activation: nn.Module) -> Grouped:
    torch.manual_seed(0)
    return with_running_statistics(Grouped(width, activation), 1, 16, 16)


@pytest.mark.parametrize(
    ("width", "activation", "target"),
    [
        (72, nn.ReLU(), "auto"),
        (96, nn.ReLU6(), "auto"),
        (120, nn.Hardswish(), "auto"),
        (200, nn.Identity(), "auto"),
        (96, nn.ReLU(), "x86"),
    ],
)
def test_in_openvino_groups_of_a_width_are_what_the_integers_mean(
    width: int, activation: nn.Module, target: TargetName, tmp_path: Path
) -> None:
    with of_seven_bits():  # where the target has ranges with clamps
        _, path = lowered(grouped(width, activation), tmp_path, target)
    batch = noise_context().example(16)
    (found,) = compile_bytes(path.read_bytes(), 1)(batch.numpy()).values()
    assert (
        decibels(run_onnx(path, batch, literal=True), torch.from_numpy(found)) > 20
    )  # it does not round before the sum
    assert not [finding for finding in lint(onnx.load(path), "cpu") if finding.rule == "group-width"]


def test_onnx_runtime_computes_them_in_integers_still(tmp_path: Path) -> None:
    _, path = lowered(grouped(72, nn.ReLU()), tmp_path)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    kinds = Counter(node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node)
    assert (kinds["QLinearConv"], kinds["Conv"], kinds["Slice"]) == (4, 0, 2)


class Int8Conv(nn.Module):
    """A convolution without a bias, whose weight and input are integers, and what reads it."""

    def __init__(self, layer: nn.Conv1d | nn.Conv2d, behind: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.behind = layer, behind
        self.register_buffer("scales", torch.full((layer.out_channels,), 0.02))
        self.register_buffer("zeros", torch.zeros(layer.out_channels, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        settings = (self.scales, self.zeros, 0, -127, 127, torch.int8)
        weight = OPS.dequantize_per_channel(OPS.quantize_per_channel(self.layer.weight, *settings), *settings)
        return self.behind(self.layer._conv_forward(rounded(x, STEP, 118), weight, self.layer.bias))


def clamped(x: torch.Tensor) -> torch.Tensor:
    """Rounded to a range that is narrower than its type, as the lowering writes it."""
    integers = OPS.quantize_per_tensor(x.relu(), 4 * STEP, 0, 0, 255, torch.uint8).clamp(0, 127)
    return OPS.dequantize_per_tensor(integers, 4 * STEP, 0, 0, 255, torch.uint8)


def bordered(layer: nn.Conv1d | nn.Conv2d, behind: Callable[[torch.Tensor], torch.Tensor]) -> fx.GraphModule:
    """The program of such a layer; it gives the same numbers as before, by another of torch's kernels perhaps."""
    sides = (5, 6)[: layer.weight.dim() - 2]
    x = torch.randn(2, layer.in_channels, *sides, generator=torch.Generator().manual_seed(0))
    module = torch.export.export(Int8Conv(layer, behind).eval(), (x,)).module()
    assert isinstance(module, fx.GraphModule)
    expected = module(x)
    found = border_groups(module)
    torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=1e-5)
    assert found == [node.target for node in module.graph.nodes].count(ATEN.slice.Tensor)
    return module


def cut(module: fx.GraphModule) -> list[Any]:
    """What a layer's border is cut off of."""
    return [node.args[0].target for node in module.graph.nodes if node.target is ATEN.slice.Tensor]


@pytest.mark.parametrize(
    ("behind", "of"),
    [
        (lambda x: rounded(x, STEP, 118), OPS.quantize_per_tensor.default),
        (lambda x: rounded(functional.hardswish(x), STEP, 118), OPS.quantize_per_tensor.default),
        (clamped, ATEN.clamp.default),
        (lambda x: x.sum(1), ATEN.conv2d.default),
        (lambda x: rounded(x + x.relu(), STEP, 118), ATEN.conv2d.default),
    ],
    ids=["quantizer", "activation", "clamp", "float", "sum"],
)
def test_a_border_is_cut_off_behind_the_quantizer_of_the_layer(
    behind: Callable[[torch.Tensor], torch.Tensor], of: Any
) -> None:
    assert cut(bordered(nn.Conv2d(144, 8, 1, groups=2), behind)) == [of]


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv1d(144, 8, 1, groups=2),
        nn.Conv2d(144, 8, 1, groups=2, padding="same"),
        nn.Conv2d(288, 8, 1, groups=4, bias=False),
        nn.Conv2d(136, 8, 1, groups=2),
    ],
    ids=str,
)
def test_each_such_layer_gets_one(layer: nn.Conv1d | nn.Conv2d) -> None:
    assert len(cut(bordered(layer, torch.relu))) == 1


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(72, 8, 1),
        nn.Conv2d(128, 8, 1, groups=2),
        nn.Conv2d(256, 8, 1, groups=2),
        nn.Conv2d(140, 8, 1, groups=2),
        nn.Conv2d(144, 8, 1, stride=2, groups=2),
        nn.Conv2d(144, 8, 1, padding=1, groups=2),
        nn.Conv2d(144, 8, 3, groups=2),
    ],
    ids=str,
)
def test_other_layers_stay_as_they_are(layer: nn.Conv2d) -> None:
    assert not cut(bordered(layer, torch.relu))


def test_a_layer_in_floats_stays_as_it_is() -> None:
    x = torch.randn(2, 144, 5, 5, generator=torch.Generator().manual_seed(0))
    module = torch.export.export(nn.Conv2d(144, 8, 1, groups=2), (x,)).module()
    assert isinstance(module, fx.GraphModule)
    assert border_groups(module) == 0
