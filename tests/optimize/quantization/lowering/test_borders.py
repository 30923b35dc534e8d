"""Borders of a constant around integers are in OpenVINO what the graph means, along however many axes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from optimize.export.onnx_graph.write import run_onnx
from optimize.quantization.lowering.openvino.borders import keep_borders
from serve.runtime.engines.openvino import compile_bytes
from tests.optimize.explicit_nets import Int8Linear, kept, meant_and_found
from tests.optimize.workbench import decibels, lowered, noise_context

STEP = 0.0137


class Bordered(nn.Module):
    """A layer over the last axis between integers, and a border, and such a layer behind it."""

    def __init__(self, border: Callable[[torch.Tensor], torch.Tensor], into: int, zero: int) -> None:
        super().__init__()
        self.first, self.border, self.last = Int8Linear(6, 6, STEP, zero), border, Int8Linear(into, 4, STEP, zero)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.border(self.first(x)))
        return found


BORDERS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[int, ...], int]] = {
    "tokens before and behind": (lambda x: functional.pad(x, (0, 0, 1, 2)), (5, 6), 6),
    "a token before": (lambda x: functional.pad(x, (0, 0, 1, 0)), (5, 6), 6),
    "channels of tokens": (lambda x: functional.pad(x, (0, 4)), (5, 6), 10),
    "both": (lambda x: functional.pad(x, (1, 1, 1, 1)), (5, 6), 8),
    "of some": (lambda x: functional.pad(x[:, 1:], (0, 0, 1, 1)), (5, 6), 6),
    "by a number": (lambda x: functional.pad(x, (0, 0, 2, 0), value=0.3), (5, 6), 6),
    "of a map": (lambda x: functional.pad(x, (0, 0, 0, 0, 2, 2)), (3, 4, 6), 6),
}


@pytest.mark.parametrize("zero", [0, 118])
@pytest.mark.parametrize("name", BORDERS)
def test_in_openvino_a_border_is_what_the_integers_mean(name: str, zero: int, tmp_path: Path) -> None:
    border, shape, into = BORDERS[name]
    x = torch.randn(5, *shape, generator=torch.Generator().manual_seed(5))
    meant, found = meant_and_found(Bordered(border, into, zero), x, tmp_path)
    assert meant.std() > 3 * STEP  # not all at an end of the range
    assert (found - meant).abs().max() <= 4 * STEP  # in the middle of two integers a value may become either


class Shortcut(nn.Module):
    """A residual block of more channels than it is given, as a ResNet for CIFAR has it, of what may be negative."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.main = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, 2, 1)
        self.last, self.head = nn.Conv2d(16, 8, 3), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = torch.relu(self.main(x) + functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 4, 4)))
        found: torch.Tensor = self.head(self.last(x).mean((2, 3)))
        return found


def test_in_openvino_channels_that_a_shortcut_lacks_are_0(tmp_path: Path) -> None:
    torch.manual_seed(1)
    batch = noise_context().example(16)
    _, path = lowered(Shortcut().eval(), tmp_path)
    (found,) = compile_bytes(path.read_bytes(), 1)(batch.numpy()).values()
    assert decibels(run_onnx(path, batch, literal=True), torch.from_numpy(found)) > 30


def test_only_constants_along_one_axis_of_what_may_have_a_zero_point_are_kept() -> None:
    class Network(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            one = functional.pad(x, (0, 1)) + functional.pad(x, (1, 0), value=2.0)
            return one + functional.pad(x, (0, 1, 0, 0), mode="replicate") + functional.pad(x, (0, 1, 1, 0))[:, :, 1:]

    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    assert kept(Network(), keep_borders, x) == (2, 2)
