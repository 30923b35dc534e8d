"""Sums and means of integers are in OpenVINO what the graph means, over whichever axes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # registers torch.ops.quantized_decomposed
from torch import fx, nn
from torch.nn import functional

from optimize.quantization.qdq import explicit_form, lower, reference_program
from optimize.quantization.reductions import keep_reductions
from optimize.quantization.targets import target_named
from serve.runtime.engines.openvino import compile_bytes

from .test_floors import OPS, rounded

STEP = 0.0137


class Reducing(nn.Module):
    """A layer over the last axis, quantized, reduced, and quantized again or not."""

    def __init__(self, reduce: Callable[[torch.Tensor], torch.Tensor], zero: int, after: float | None) -> None:
        super().__init__()
        self.reduce, self.zero, self.after = reduce, zero, after
        self.weight = nn.Parameter(torch.randn(6, 6, generator=torch.Generator().manual_seed(3)))
        self.register_buffer("scales", torch.full((6,), 0.02))
        self.register_buffer("zeros", torch.zeros(6, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        integers = OPS.quantize_per_channel(self.weight, self.scales, self.zeros, 0, -127, 127, torch.int8)
        weight = OPS.dequantize_per_channel(integers, self.scales, self.zeros, 0, -127, 127, torch.int8)
        found = self.reduce(rounded(functional.linear(rounded(x, STEP, self.zero), weight), STEP, self.zero))
        return found if self.after is None else rounded(found, self.after, self.zero)


REDUCTIONS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[int, ...]]] = {
    "sum over tokens": (lambda x: x.sum(1), (16, 6)),
    "sum over tokens, kept": (lambda x: x.sum(dim=1, keepdim=True), (16, 6)),
    "mean over tokens": (lambda x: x.mean(1), (16, 6)),
    "mean over some tokens": (lambda x: x[:, 1:].mean(dim=1), (16, 6)),
    "sum of rectified": (lambda x: functional.relu(x).sum(1), (16, 6)),
    "sum over the last": (lambda x: x.sum(-1), (16, 6)),
    "sum over a map": (lambda x: x.sum((2, 3)), (4, 5, 6)),
    "mean over a map": (lambda x: x.mean((2, 3)), (4, 5, 6)),
    "mean over channels": (lambda x: x.mean(1), (4, 5, 6)),
    "sum over splits": (lambda x: x.reshape(-1, 2, 2, 5, 6).sum(1), (4, 5, 6)),
}


@pytest.mark.parametrize("again", [False, True], ids=["float", "again"])
@pytest.mark.parametrize("zero", [0, 118])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_in_openvino_a_sum_or_mean_is_what_the_integers_mean(name: str, zero: int, again: bool, tmp_path: Path) -> None:
    reduce, shape = REDUCTIONS[name]
    after = 0.1 if name.startswith("sum") else 0.021
    x = torch.randn(5, *shape, generator=torch.Generator().manual_seed(5))
    program = reference_program(explicit_form(Reducing(reduce, zero, after if again else None), x), x)
    with torch.no_grad():
        meant = program.module()(x)
    assert meant.std() > 2 * after  # not all at an end of the range
    path = tmp_path / "model.onnx"
    lower(program, x, path, target_named("x86-vnni"))
    (found,) = compile_bytes(path.read_bytes(), 1)(x.numpy()).values()
    # Values of the layer in the middle of two integers may become either.
    difference = (torch.from_numpy(found) - meant).abs().max()
    assert difference <= (1.01 * after if again else 3 * STEP)


def test_only_sums_and_means_over_anything_but_a_map_are_kept() -> None:
    class Network(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gates = x.mean((2, 3), keepdim=True) + x.mean((-1, -2), keepdim=True)
            return (x * gates).sum(1).mean(-1) + x.amax((1, 2)) + x.sum() + x.mean()

    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    module = torch.export.export(Network(), (x,)).module()
    assert isinstance(module, fx.GraphModule)
    expected = module(x)
    assert keep_reductions(module) == 4
    assert torch.equal(module(x), expected)
    assert sum(node.target is torch.ops.aten.maximum.default for node in module.graph.nodes) == 4
