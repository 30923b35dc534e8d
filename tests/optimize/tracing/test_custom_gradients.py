"""Functions with a gradient of their own, as memory-saving activations have: traced as what their forward does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from optimize.passes.base import Pass
from optimize.passes.fine_tune import FINE_TUNE, FineTune
from optimize.passes.qat import QAT, Qat
from optimize.tracing.trace import trace
from serve.common.config import Config
from serve.runtime.device.cpu_integers import ANY_X86
from tests.optimize import foreign_layers
from tests.optimize.workbench import is_meant, noise_context, parent_of


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


class Noting(torch.autograd.Function):
    """Writes into what it is given, and says so; one of its answers has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        ctx.mark_dirty(x)
        signs = torch.sign(x)
        ctx.mark_non_differentiable(signs)
        ctx.set_materialize_grads(False)
        return x.mul_(torch.sigmoid(x)), signs


#: Known to a forward by a name of its own.
swish = Swish.apply
#: What a registry of activations has.
ACTIVATIONS = {"swish": Swish.apply}
IN_ORDER = [Swish.apply]


class Shared:
    """A class that is no layer, with an activation in it."""

    activation = Swish.apply


def enclosed() -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that knows an activation of the function that made it."""
    activation = Swish.apply
    return lambda x: 2 * activation(x)


def given(x: torch.Tensor, activation: Callable[..., torch.Tensor] = Swish.apply) -> torch.Tensor:
    """A function that has an activation unless it is told another."""
    return activation(x)


def asked(x: torch.Tensor, *, activation: Callable[..., torch.Tensor] = Swish.apply) -> torch.Tensor:
    """The same, by name."""
    return activation(x)


#: How the activation is called, by where it is kept.
WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "called": lambda x: Swish.apply(x, 2.0),
    "apart": lambda x: 2 * Apart.apply(x),
    "noting": lambda x: sum(Noting.apply(1 * x)),
    "named": lambda x: 2 * swish(x),
    "in another module": lambda x: 2 * foreign_layers.sharp(x),
    "in a table": lambda x: 2 * ACTIVATIONS["swish"](x),
    "in a list": lambda x: 2 * IN_ORDER[0](x),
    "in a class": lambda x: 2 * Shared.activation(x),
    "in a closure": enclosed(),
    "with an argument": functools.partial(Swish.apply, sharpness=2.0),
    "by default": given,
    "by default and name": asked,
}


class Activated(nn.Module):
    """Activations between two convolutions; a size that it asks for is one that the images settle."""

    of_class = Swish.apply

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, 4)
        self.way, self.held = way, Swish.apply
        self.sharpness = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = 3 * self.first(x)
        held = {"held": self.held, "of its class": self.of_class, "learned": lambda x: self.held(x, self.sharpness)}
        x = (WAYS | held)[self.way](x)
        if x.shape[-1] > 4:
            x = self.second(x)
        return self.head(x.mean((2, 3)))


ALL_WAYS = [*WAYS, "held", "of its class", "learned"]


@pytest.mark.parametrize("way", ALL_WAYS)
def test_a_function_with_a_gradient_of_its_own_is_traced_as_its_forward(way):
    torch.manual_seed(0)
    module, batch = Activated(way).eval(), torch.randn(3, 1, 16, 16)
    with torch.no_grad():
        assert torch.equal(trace(module, batch)(batch), module(batch))


@pytest.mark.parametrize("way", ALL_WAYS)
def test_after_tracing_its_gradient_is_its_own_again(way):
    kept = Swish.apply
    torch.manual_seed(0)
    module, batch = Activated(way), torch.randn(3, 1, 16, 16)
    trace(module, batch)
    assert Swish.apply == kept == module.held == swish == ACTIVATIONS["swish"] == IN_ORDER[0] == Shared.activation
    assert Activated.of_class == kept
    assert given.__defaults__ == (kept,)
    assert asked.__kwdefaults__ == {"activation": kept}
    assert foreign_layers.sharp == foreign_layers.Sharp.apply
    assert WAYS["with an argument"].func == kept  # type: ignore[attr-defined]
    assert "apply" not in vars(Swish)


def test_an_activation_with_a_gradient_of_its_own_is_meant_in_int8(tmp_path):
    torch.manual_seed(0)
    is_meant(Activated("called"), tmp_path, ANY_X86, above=25)


class Sign(torch.autograd.Function):
    """Straight through: the gradient of what it is given is that of what it gives, where the sign's own is 0."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.sign(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


class SavedSwish(Swish):
    """Its gradient of its own is that of what it computes."""

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        share = torch.sigmoid(x)
        return gradients[0] * share * (1 + x * (1 - share)), None


class Signed(nn.Module):
    """Two convolutions, and functions with a gradient of their own between them, or of the image."""

    def __init__(self, *functions: type[torch.autograd.Function], of_image: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, 4)
        self.applied, self.of_image = [function.apply for function in functions], of_image

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = Sign.apply(x) if self.of_image else x
        x = self.first(x)
        for apply in self.applied:
            x = apply(x)
        return self.head(self.second(x).mean((2, 3)))


@pytest.mark.parametrize(
    ("functions", "of_image", "lost"),
    [
        ([Sign], False, "Sign"),
        ([SavedSwish, Sign], False, "Sign, SavedSwish"),
        ([SavedSwish], False, None),
        ([], False, None),
        ([], True, None),
    ],
)
def test_who_trains_a_graph_is_told_which_gradients_are_not_in_it(functions, of_image, lost, tmp_path):
    torch.manual_seed(0)
    context = noise_context()
    parent = parent_of(Signed(*functions, of_image=of_image).eval(), context, tmp_path / "parent")
    told = {}
    ways: list[tuple[Pass[Any], type[Config]]] = [(QAT, Qat), (FINE_TUNE, FineTune)]
    for made_by, config in ways:
        settings = {"epochs": 1, "max_steps": 1, "batch_size": 8, "augment": False}
        gates = {"min_sqnr": 0.0, "min_agreement": 0.0} if config is Qat else {}
        folder = tmp_path / made_by.name
        folder.mkdir()
        notes = made_by.apply(parent, config(**settings, **gates), context, folder).notes
        told[made_by.name] = [note for note in notes if "gradient" in note]
    said = f"trained without the custom gradients of {lost}: the gradient of their forward computation is used"
    assert told == {"qat": [said] if lost else [], "fine-tune": []}
