"""Maxima and minima over axes are in OpenVINO what the graph means, whatever quantizes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from torch import fx, nn
from torch.nn import functional

from optimize.export.onnx_graph.write import run_onnx
from optimize.lint.base import lint
from optimize.quantization.lowering.openvino.extremes import keep_extremes
from serve.runtime.engines.openvino import compile_bytes
from tests.optimize.workbench import decibels, lowered, noise_context


class Between(nn.Module):
    """A layer and an activation, something over axes of theirs, and a layer behind it."""

    def __init__(self, over: Callable[[torch.Tensor], torch.Tensor], channels: int, activation: nn.Module) -> None:
        super().__init__()
        self.first, self.activation, self.over = nn.Conv2d(1, 16, 3, 2), activation, over
        self.second, self.head = nn.Conv2d(channels, 6, 1), nn.LazyLinear(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.second(self.over(self.activation(3 * self.first(x)))).flatten(1))
        return found


OVER: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    "of a map": (lambda x: x.amax((2, 3), keepdim=True), 16),
    "of a map, small": (lambda x: x.amin((2, 3), keepdim=True), 16),
    "of channels": (lambda x: x.amax(1, keepdim=True), 1),
    "of channels, with places": (lambda x: x.max(1, keepdim=True)[0], 1),
    "cbam": (lambda x: torch.cat([x.amax(1, keepdim=True), x.mean(1, keepdim=True)], 1), 2),
    "of columns": (lambda x: x.amax(3, keepdim=True), 16),
    "of columns, both": (lambda x: torch.cat([*torch.aminmax(x, dim=3, keepdim=True)], 1), 32),
    "of magnitudes": (lambda x: torch.linalg.vector_norm(x, float("inf"), (2, 3), keepdim=True), 16),
    "gates": (lambda x: x.amax((2, 3), keepdim=True).sigmoid(), 16),
    "of patches that overlap": (lambda x: functional.adaptive_max_pool2d(x, (3, 2)), 16),
    "of means": (lambda x: x.mean(3, keepdim=True).amax(2, keepdim=True), 16),
}


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.GELU()], ids=str)
@pytest.mark.parametrize("name", OVER)
def test_in_openvino_an_extreme_is_what_the_integers_mean(name: str, activation: nn.Module, tmp_path: Path) -> None:
    torch.manual_seed(0)
    network, batch = Between(*OVER[name], activation).eval(), noise_context().example(16)
    network(batch)
    _, path = lowered(network, tmp_path)
    batch = batch * torch.linspace(0.2, 1, 16).reshape(-1, 1, 1, 1)  # whose extremes differ
    (found,) = compile_bytes(path.read_bytes(), 1)(batch.numpy()).values()
    assert decibels(run_onnx(path, batch, literal=True), torch.from_numpy(found)) > 35
    assert not [finding for finding in lint(onnx.load(path), "cpu") if finding.rule == "integer-extreme"]


def test_only_extremes_of_floats_are_kept_and_not_their_places() -> None:
    class Network(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            largest, place = x.max(1, keepdim=True)
            least, most = torch.aminmax(x, dim=2, keepdim=True)
            norms = torch.linalg.vector_norm(x, dim=1, keepdim=True) + torch.linalg.vector_norm(x, 1, 1, keepdim=True)
            places = (x > 0).long().amax(1, keepdim=True) + place
            pooled = functional.max_pool2d(x, 2).mean((2, 3), keepdim=True)
            return (largest - x) + (most - least) + norms + places * pooled, x.amin(1)

    # What reads the first, and what reads the two of the second; the last is an answer.
    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    module = torch.export.export(Network(), (x,)).module()
    assert isinstance(module, fx.GraphModule)
    expected = module(x)
    found = keep_extremes(module)
    assert all(map(torch.equal, module(x), expected))
    assert found == 2
    assert [node.target for node in module.graph.nodes].count(torch.ops.aten.maximum.default) == 3
