"""What a network calls its tensors and layers is its own affair: they may have the names of tensors' methods."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import nn

from optimize.export.onnx_graph.write import run_onnx
from optimize.quantization.convert import trace_calls
from optimize.quantization.graph.editing import fold_constants
from optimize.quantization.placement.global_pools import free_last_pool
from optimize.quantization.placement.known_ranges import free_known
from optimize.quantization.targets import TargetName
from tests.optimize.workbench import lowered, noise_context

METHODS = (
    *("add", "bmm", "chunk", "clamp", "contiguous", "detach", "expand", "flatten", "matmul", "max", "mean", "mul"),
    *("permute", "relu", "relu_", "reshape", "roll", "sigmoid", "sigmoid_", "size", "softmax", "split", "squeeze"),
    *("sub", "sum", "tanh", "tanh_", "transpose", "unbind", "unsqueeze", "view"),
)
NEUTRAL = tuple(f"its_{name}" for name in METHODS)


class OfTensors(nn.Module):
    """Multiplies by tensors of its own of these names, and subtracts them, in turns."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names = names
        for number, name in enumerate(names):
            self.register_buffer(name, torch.full((1, 8, 1, 1), 1 + number / 100))
        self.first, self.second, self.head = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for number, name in enumerate(self.names):
            x = x - getattr(self, name) if number % 2 else x * getattr(self, name)
        return cast("torch.Tensor", self.head(self.second(x).mean((2, 3))))


class OfLayers(nn.Module):
    """Goes through layers of these names, with something behind each."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names = names
        self.first, self.head = nn.Conv2d(1, 8, 3), nn.Linear(8, 4)
        for number, name in enumerate(names):
            kinds = (nn.Conv2d(8, 8, 1), nn.Hardswish(), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, padding=1, groups=8))
            setattr(self, name, kinds[number % len(kinds)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for number, name in enumerate(self.names):
            x = getattr(self, name)(x)
            x = x.relu() if number % 3 else x
        return cast("torch.Tensor", self.head(x.mean((2, 3))))


@pytest.mark.parametrize("target", ["auto", "tensorrt"])
@pytest.mark.parametrize("kind", [OfTensors, OfLayers])
def test_names_of_methods_are_names_like_others(
    kind: type[OfTensors | OfLayers], target: TargetName, tmp_path: Path
) -> None:
    batch = noise_context().example(8)
    answers = []
    for names in (METHODS, NEUTRAL):
        torch.manual_seed(0)
        folder = tmp_path / names[0]
        folder.mkdir()
        _, path = lowered(kind(names).eval(), folder, target)
        answers.append(run_onnx(path, batch, literal=target == "tensorrt"))
    torch.testing.assert_close(*answers, rtol=0, atol=0)


class Alike(nn.Module):
    """Something between two convolutions, the second of which has a name that a module for it would have."""

    def __init__(self, name: str, between: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.name, self.between = name, between
        self.first = nn.Conv2d(1, 8, 3)
        self.add_module(name, nn.Conv2d(8, 8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.first.bias is not None
        return cast("torch.Tensor", self.get_submodule(self.name)(self.between(self.first(x), self.first.bias)))


@pytest.mark.parametrize(
    ("name", "between"),
    [
        ("conv_transpose2d_in_float", lambda x, bias: nn.functional.conv_transpose2d(x, torch.ones(8, 8, 1, 1))),
        ("tanh_in_float", lambda x, bias: torch.cat([x, torch.tanh(x)], 1)[:, 4:12]),
        ("mean_in_float", lambda x, bias: x.mean((2, 3), keepdim=True)),
        ("new_ones_once", lambda x, bias: x + x.new_ones(x.shape[1:])),
        ("first_bias_beside", lambda x, bias: x + bias.view(8, 1, 1)),
        ("constant_mul", lambda x, bias: x + bias.view(8, 1, 1) * 2),
    ],
)
def test_a_network_keeps_a_layer_that_is_called_as_one_that_is_put_in(
    name: str, between: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    torch.manual_seed(0)
    module, images = Alike(name, between).eval(), torch.randn(2, 1, 8, 8)
    traced = trace_calls(module, images)
    free_known(traced)
    free_last_pool(traced, images)
    fold_constants(traced)
    torch.testing.assert_close(traced(images), module(images))
