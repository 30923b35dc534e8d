"""What a live network depends on: another function or module in any place of it is another network."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from optimize.models.live_objects import module_digest

Function = Callable[[torch.Tensor], torch.Tensor]


class Block(nn.Module):
    def __init__(self, act: Function) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(x)


def of_functions(*acts: Function) -> nn.Module:
    return nn.Sequential(*map(Block, acts))


def of_modules(*places: int) -> nn.Module:
    shared = (nn.ReLU(), nn.GELU())
    return nn.Sequential(*(shared[place] for place in places))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (
            of_functions(functional.relu, functional.gelu, functional.relu),
            of_functions(functional.relu, *[functional.gelu] * 2),
        ),
        (of_modules(0, 1, 0), of_modules(0, 1, 1)),
    ],
    ids=["functions", "modules"],
)
def test_what_stands_in_a_place_counts_though_it_was_met_before(first: nn.Module, second: nn.Module) -> None:
    x = torch.linspace(-1, 1, 5)
    assert not torch.equal(first(x), second(x))
    assert module_digest(first) != module_digest(second)


@pytest.mark.parametrize(
    "make", [lambda: of_functions(functional.relu, functional.gelu, functional.relu), lambda: of_modules(0, 1, 0)]
)
def test_the_same_network_made_again_is_the_same(make: Callable[[], nn.Module]) -> None:
    assert module_digest(make()) == module_digest(make())
