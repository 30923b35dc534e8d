"""Networks with explicit quantizers, as front ends leave them, and what OpenVINO gives of their graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.ao.quantization.fx._decomposed  # registers torch.ops.quantized_decomposed
from torch import fx, nn
from torch.nn import functional

from optimize.quantization.lowering.qdq import explicit_form, lower, reference_program
from optimize.quantization.targets import target_named
from serve.runtime.engines.openvino import compile_bytes

OPS = torch.ops.quantized_decomposed


def rounded(x: torch.Tensor, scale: float, zero: int) -> torch.Tensor:
    """Quantized and dequantized."""
    integers = OPS.quantize_per_tensor(x, scale, zero, 0, 255, torch.uint8)
    return OPS.dequantize_per_tensor(integers, scale, zero, 0, 255, torch.uint8)


class Int8Linear(nn.Module):
    """A layer without a bias, of the last axis, whose weight, input and answer are integers."""

    def __init__(self, inputs: int, outputs: int, scale: float, zero: int) -> None:
        super().__init__()
        self.scale, self.zero = scale, zero
        self.weight = nn.Parameter(torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(3)))
        self.register_buffer("scales", torch.full((outputs,), 0.02))
        self.register_buffer("zeros", torch.zeros(outputs, dtype=torch.int64))

    def quantized(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight with a scale for each output."""
        integers = OPS.quantize_per_channel(weight, self.scales, self.zeros, 0, -127, 127, torch.int8)
        return OPS.dequantize_per_channel(integers, self.scales, self.zeros, 0, -127, 127, torch.int8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer = functional.linear(rounded(x, self.scale, self.zero), self.quantized(self.weight))
        return rounded(answer, self.scale, self.zero)


def kept(network: nn.Module, keep: Callable[[fx.GraphModule], int], *given: torch.Tensor) -> tuple[int, int]:
    """In front of how many operators of a network's program something is kept, and how many maxima that takes.

    It gives the same bits.
    """
    module = torch.export.export(network, given).module()
    assert isinstance(module, fx.GraphModule)
    expected = module(*given)
    found = keep(module)
    assert torch.equal(module(*given), expected)
    return found, [node.target for node in module.graph.nodes].count(torch.ops.aten.maximum.default)


def meant_and_found(module: nn.Module, x: torch.Tensor, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """What a network with explicit quantizers means, and what OpenVINO gives of its graph for CPUs."""
    program = reference_program(explicit_form(module, x), x)
    with torch.no_grad():
        meant = program.module()(x)
    path = folder / "model.onnx"
    lower(program, x, path, target_named("x86-vnni"))
    (found,) = compile_bytes(path.read_bytes(), 1)(x.numpy()).values()
    return meant, torch.from_numpy(found)
