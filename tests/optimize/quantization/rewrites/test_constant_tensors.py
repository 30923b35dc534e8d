"""Tensors that a forward makes of no image's numbers are constants in integers, too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx, nn

from optimize.quantization.rewrites.constant_tensors import make_once
from optimize.tracing.trace import note_shapes, trace
from serve.runtime.device.cpu_integers import ANY_X86, TENSORRT
from tests.optimize.workbench import Between, is_meant, noise_context


def coordinates(x: torch.Tensor) -> torch.Tensor:
    """As CoordConv's: where each place is, for each image."""
    rows, columns = (torch.linspace(-1, 1, x.size(axis), device=x.device, dtype=x.dtype) for axis in (2, 3))
    places = torch.stack(torch.meshgrid(rows, columns, indexing="ij"))
    return torch.cat([x[:, :6], places[None].expand(x.size(0), -1, -1, -1)], 1)


MADE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "ones": lambda x: x + 0.3 * x.new_ones(8, 1, 1),
    "numbers": lambda x: x * x.new_full((8, 1, 1), 1.5) + x.new_tensor([0.3]),
    "places": lambda x: x + torch.arange(x.shape[-1], device=x.device, dtype=x.dtype) / x.shape[-1],
    "coordinates": coordinates,
}


@pytest.mark.parametrize("way", MADE)
@pytest.mark.parametrize("target", [ANY_X86, TENSORRT])
def test_what_a_forward_makes_is_meant_in_int8(way, target, tmp_path):
    torch.manual_seed(0)
    is_meant(Between(MADE[way]), tmp_path, target, above=25)


def made(between: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Between, fx.GraphModule, int]:
    """A network, what its trace becomes, and how many buffers were made."""
    torch.manual_seed(0)
    module, example = Between(between).eval(), noise_context().example(4)
    traced = trace(module, example)
    note_shapes(traced, example)
    return module, traced, make_once(traced, example)


LEFT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "of as many images as there are": lambda x: x + torch.arange(x.size(0), device=x.device).view(-1, 1, 1, 1),
    "written into": lambda x: x + x.new_zeros(8, 1, 1).add_(x.amax((0, 2, 3))[:, None, None]),
    "of an image": lambda x: x + torch.full_like(x, 0.5),
}


@pytest.mark.parametrize("way", MADE | LEFT)
def test_what_is_made_once_is_the_same_for_any_images(way):
    module, traced, count = made((MADE | LEFT)[way])
    assert bool(count) == (way in MADE)
    for images in noise_context(seed=1).example(8).split([1, 2, 5]):
        with torch.no_grad():
            torch.testing.assert_close(traced(images), module(images))


def test_what_is_drawn_is_drawn_for_each_image():
    _, traced, count = made(lambda x: x + torch.full((8, 1, 1), 0.5, device=x.device).bernoulli())
    images = noise_context().example(2)
    assert count == 1  # what it is drawn by
    assert not torch.equal(traced(images), traced(images))


class Named(nn.Module):
    """Its input, a layer and a tensor are called as what a tensor is asked for."""

    shape: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.size, self.numel = nn.Conv2d(1, 8, 3), nn.Linear(8, 4)
        self.register_buffer("shape", torch.ones(8, 1, 1))

    def forward(self, dim: torch.Tensor) -> torch.Tensor:
        found = self.size(dim) * self.shape
        return self.numel((found + torch.linspace(0, 1, found.shape[-1])).mean((2, 3)))


def test_a_layer_may_be_called_as_what_a_tensor_is_asked_for():
    torch.manual_seed(0)
    module, example = Named().eval(), noise_context().example(4)
    traced = trace(module, example)
    note_shapes(traced, example)
    assert make_once(traced, example) == 1
    with torch.no_grad():
        torch.testing.assert_close(traced(example), module(example))
