"""Clamps between integers end at integers: every engine cuts off what the integers mean."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from optimize.export.onnx_graph.write import run_onnx
from optimize.quantization.lowering.clamps import round_clamps
from serve.runtime.device.cpu_integers import ANY_X86
from tests.optimize.export.onnx_graph.test_engine_rewrites import in_openvino
from tests.optimize.workbench import Between, lowered, noise_context, of_seven_bits

DECOMPOSED = torch.ops.quantized_decomposed
INTEGERS = (0.3, 5, 0, 127, torch.uint8)


@pytest.mark.parametrize(
    "clamp",
    [
        lambda x: x.clamp(-1, 1),
        lambda x: x.clamp(min=0.1),
        lambda x: torch.clamp(x, max=0.7),
        functional.hardtanh,
        nn.Hardtanh(-0.3, 0.9),
    ],
    ids=["both", "lower", "upper", "hardtanh", "module"],
)
def test_openvino_gives_what_the_integers_mean_behind_a_clamp(clamp, tmp_path):
    torch.manual_seed(0)
    with of_seven_bits():
        _, path = lowered(Between(clamp).eval(), tmp_path, ANY_X86)
    batch = noise_context().example(32)
    assert torch.equal(in_openvino(path, batch), run_onnx(path, batch, literal=True))


class Clamped(nn.Module):
    """Integers, a clamp of them, and integers of a scale."""

    def __init__(self, clamp: Callable[[torch.Tensor], torch.Tensor], scale: float) -> None:
        super().__init__()
        self.clamp, self.scale = clamp, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = DECOMPOSED.quantize_per_tensor(x, *INTEGERS)
        x = self.clamp(DECOMPOSED.dequantize_per_tensor(x, *INTEGERS))
        return DECOMPOSED.quantize_per_tensor(x, self.scale, *INTEGERS[1:])


@pytest.mark.parametrize("low", [-0.75, -0.45, -0.44, 0.0, 0.1])
def test_the_integers_are_the_same_wherever_an_end_lies_between_them(low):
    every = torch.arange(128).sub(INTEGERS[1]).mul(INTEGERS[0]).unsqueeze(0)
    module = torch.export.export(Clamped(lambda x: x.clamp(low, 2.5), INTEGERS[0]), (every,)).module()
    expected = module(every)
    assert round_clamps(module) == 1
    assert torch.equal(module(every), expected)
    (clamp,) = (node for node in module.graph.nodes if node.target is torch.ops.aten.clamp.default)
    ends = torch.tensor(clamp.args[1:]) / INTEGERS[0]
    torch.testing.assert_close(ends, ends.round())


def test_between_two_scales_an_end_stays_where_it_is():
    every = torch.rand(1, 8)
    module = torch.export.export(Clamped(lambda x: x.clamp(-0.75, 2.5), 0.1), (every,)).module()
    assert round_clamps(module) == 0
