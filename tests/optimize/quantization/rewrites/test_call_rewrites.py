"""Calls that torch.ao gets wrong: in int8 graphs they are what they are in the network."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from serve.runtime.device.cpu_integers import TENSORRT
from tests.optimize.workbench import Between, is_meant

BETWEEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "typed as another": lambda x: x + torch.linspace(0, 1, 8, dtype=torch.float64)[:, None, None].type_as(x),
    "made like another": lambda x: x + torch.linspace(0, 1, 8, dtype=torch.float64)[:, None, None].to(x),
    "a mask, typed as another": lambda x: x * (x > 0).type_as(x),
    "clamped to tensors": lambda x: torch.clamp(x, -torch.ones(8, 1, 1), torch.linspace(0.5, 2, 8)[:, None, None]),
    "clamped to what depends on the image": lambda x: x.clamp(-torch.ones(1), x.amax((2, 3), keepdim=True) * 0.5),
    "divided and rounded down": lambda x: x // 0.25 * 0.25 + x,
    "in double precision": lambda x: (x.double() - x.double().mean(1, keepdim=True)).float(),
    "clamped from below": lambda x: torch.clip(x, min=x.mean((2, 3), keepdim=True)),
}


@pytest.mark.parametrize("target", ["auto", TENSORRT])
@pytest.mark.parametrize("way", BETWEEN)
def test_int8_graphs_answer_as_networks_that_ask_for_types_and_clamp_to_tensors(way, target, tmp_path):
    torch.manual_seed(0)
    is_meant(Between(BETWEEN[way]), tmp_path, target, above=25)


class Masking(nn.Module):
    """Where the first convolution says so, the second's answer counts twice: what is asked has another shape."""

    def __init__(self, mask: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.mask = mask
        self.first, self.second, self.head = nn.Conv2d(1, 8, 3), nn.Conv2d(1, 8, 3), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bright = self.mask(self.first(x).relu() - 0.25)
        return self.head((self.second(x) * (1 + bright)).mean((2, 3)))


MASKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "flattened and back": lambda x: (x > 0).flatten(1).reshape(x.shape).float(),
    "viewed": lambda x: (x > 0).flatten(2).view(-1, *x.shape[1:]).to(x.dtype),
    "of one channel": lambda x: (x.mean(1) > 0).unsqueeze(1).float(),
    "chosen by": lambda x: torch.where((x.mean(1) > 0).unsqueeze(1), 1.0, 0.5),
    "turned": lambda x: (x > 0).roll(1, 2).permute(0, 1, 3, 2).float(),
    "not": lambda x: (~(x > 0)).transpose(2, 3).float(),
    "repeated": lambda x: (x.mean(1, keepdim=True) > 0).repeat(1, 8, 1, 1),
    "as numbers": lambda x: functional.one_hot(x.argmax(1), 8).permute(0, 3, 1, 2).float(),
    "in the order of numbers": lambda x: torch.gather(x, 1, x.argsort(1, descending=True).transpose(2, 3).contiguous()),
}


@pytest.mark.parametrize("target", ["auto", TENSORRT])
@pytest.mark.parametrize("way", MASKS)
def test_masks_and_whole_numbers_change_their_shape_in_int8_graphs(way, target, tmp_path):
    torch.manual_seed(0)
    is_meant(Masking(MASKS[way]), tmp_path, target, above=20)


class Spare(nn.Module):
    """As vit-pytorch's ViT: it has as many tokens of its own as it is told to, and that may be none."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.stem, self.layer, self.head = nn.Conv2d(1, 8, 4, 4), nn.Linear(8, 8), nn.Linear(8, 4)
        self.tokens = nn.Parameter(torch.randn(count, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.tokens.expand(x.shape[0], -1, -1)
        return self.head(self.layer(torch.cat((tokens, self.stem(x).flatten(2).mT), dim=1)).mean(1))


@pytest.mark.parametrize("count", [0, 2])
def test_nothing_that_is_put_in_front_is_left_out(count, tmp_path):
    torch.manual_seed(0)
    is_meant(Spare(count), tmp_path, "auto", above=20)
