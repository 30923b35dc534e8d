"""A norm whose answer has several readers gives all of them the same integers, in torch's kernels and in the graph."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from optimize.export.onnx_graph.write import run_onnx
from optimize.quantization.gate import sqnr
from tests.optimize.export.onnx_graph.test_engine_rewrites import int8_graph


class Called(nn.Module):
    """A layer norm as timm's are: a function of its own weights."""

    def __init__(self, channels: int, *, by_name: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(channels)
        self.weight = nn.Parameter(0.5 + torch.rand(channels, generator=generator))
        self.bias = nn.Parameter(torch.randn(channels, generator=generator))
        self.by_name = by_name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = self.weight.shape
        if self.by_name:
            return functional.layer_norm(x, shape, weight=self.weight, bias=self.bias, eps=1e-6)
        return functional.layer_norm(x, shape, self.weight, self.bias, 1e-6)


class Block(nn.Module):
    """MambaOut's beginning: a norm that another norm and a sum read."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.stem, self.first, self.second = nn.Conv2d(3, 8, 3, stride=2), first, second
        self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.first(self.stem(images).permute(0, 2, 3, 1))
        x = x + self.inner(self.second(x))
        return self.head(x.mean((1, 2)))


NORMS = {
    "modules": lambda: nn.LayerNorm(8),
    "functions": lambda: Called(8, by_name=False),
    "functions, by name": lambda: Called(8, by_name=True),
}


@pytest.mark.parametrize("kind", NORMS)
def test_a_norm_that_a_norm_and_a_sum_read_runs_in_integers_and_means_what_the_float_network_does(
    kind: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    module = Block(NORMS[kind](), NORMS[kind]()).eval()
    path, context = int8_graph(module, tmp_path)
    packed = torch.jit.load(tmp_path / "ptq" / "model.pt")
    with torch.no_grad():
        expected = module(context.example(8))
        assert sqnr(expected, packed(context.example(8))) > 25
    assert sqnr(expected, run_onnx(path, context.pixels(8), literal=True)) > 25


class Gathered(nn.Module):
    """What keeps its numbers' scale in integers lies behind a layer, and beside another's answer, as in a Res2Net."""

    def __init__(self, keep: nn.Module) -> None:
        super().__init__()
        self.stem, self.layer, self.keep = nn.Conv2d(3, 8, 3, stride=2), nn.Conv2d(8, 8, 3, padding=1), keep
        self.mix, self.head = nn.Conv2d(16, 8, 1), nn.Linear(8, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = 8 * self.stem(images)
        return self.head(self.mix(torch.cat([x, self.keep(self.layer(x))], 1)).mean((2, 3)))


@pytest.mark.parametrize(
    "keep",
    [
        nn.ReLU6(),
        nn.Hardtanh(-1, 1),
        nn.AvgPool2d(3, 1, 1),
        nn.MaxPool2d(3, 1, 1),
        nn.Sequential(nn.Dropout(), nn.ReLU6()),
    ],
    ids=["ReLU6", "Hardtanh", "AvgPool2d", "MaxPool2d", "behind a dropout"],
)
def test_what_keeps_a_scale_has_that_of_what_it_is_put_together_with(keep: nn.Module, tmp_path: Path) -> None:
    """Else torch's kernels warn, which fails here, and put integers of different scales together."""
    torch.manual_seed(0)
    module = Gathered(keep).eval()
    path, context = int8_graph(module, tmp_path)
    with torch.no_grad():
        expected = module(context.example(8))
        packed = torch.jit.load(tmp_path / "ptq" / "model.pt")(context.example(8))
    meant = run_onnx(path, context.pixels(8), literal=True)
    assert sqnr(expected, meant) > 20
    assert sqnr(meant, packed) > 25
