"""Functions with a gradient of their own, as memory-saving activations have: traced as what their forward does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from optimize.export.trace import trace
from serve.runtime.integers import ANY_X86
from tests.optimize.workbench import is_meant


class Swish(torch.autograd.Function):
    """Keeps what it was given, and not what it computed, for the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sharpness: float = 1.0) -> torch.Tensor:
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(x)
        ctx.sharpness = sharpness
        return x * torch.sigmoid(sharpness * x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise NotImplementedError


class Apart(torch.autograd.Function):
    """What it keeps is said in a method of its own."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)


#: Known to a forward by a name of its own.
swish = Swish.apply


class Activated(nn.Module):
    """Activations between two convolutions; a size that it asks for is one that the images settle."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, 4)
        self.way, self.held = way, Swish.apply

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = 3 * self.first(x)
        if self.way == "called":
            x = Swish.apply(x, 2.0)
        elif self.way == "apart":
            x = Apart.apply(x)
        else:
            x = self.held(x) if self.way == "held" else swish(x)
        if x.shape[-1] > 4:
            x = self.second(x)
        return self.head(x.mean((2, 3)))


WAYS = ["called", "apart", "held", "named"]


@pytest.mark.parametrize("way", WAYS)
def test_a_function_with_a_gradient_of_its_own_is_traced_as_its_forward(way):
    torch.manual_seed(0)
    module, batch = Activated(way).eval(), torch.randn(3, 1, 16, 16)
    with torch.no_grad():
        assert torch.equal(trace(module, batch)(batch), module(batch))


@pytest.mark.parametrize("way", WAYS)
def test_after_tracing_its_gradient_is_its_own_again(way):
    kept = Swish.apply
    torch.manual_seed(0)
    module, batch = Activated(way), torch.randn(3, 1, 16, 16)
    trace(module, batch)
    assert Swish.apply == kept == module.held == swish
    assert "apply" not in vars(Swish)


def test_an_activation_with_a_gradient_of_its_own_is_meant_in_int8(tmp_path):
    torch.manual_seed(0)
    is_meant(Activated("called"), tmp_path, ANY_X86, above=25)
