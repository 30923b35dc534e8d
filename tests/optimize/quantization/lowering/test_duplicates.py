"""What a network computes twice is computed once: where that changes nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from optimize.quantization.lowering.duplicates import merge_alike
from serve.runtime.device.cpu_integers import ANY_X86, TENSORRT
from tests.optimize.workbench import Between, is_meant


class Both(nn.Module):
    """The sum of two halves that are made of one image."""

    def __init__(self, halves: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self.halves = halves

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.halves(x)
        return left + 3 * right


def pooled(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.max_pool2d(x, 2)


def in_place(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    left, right = pooled(x), pooled(x)
    return left.add_(1), right


def in_place_by_a_view(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    left, right = pooled(x), pooled(x)
    left.view(2, -1).add_(1)
    return left, right


def changed_between(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x * 2
    part = y[:, :1]
    left = part.sigmoid()
    y.mul_(3)
    return left, part.sigmoid()


def copied_between(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x * 2
    left = y.repeat(1, 2, 1, 1)
    y.mul_(3)
    return left, y.repeat(1, 2, 1, 1)


def changed_before(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x * 2
    y[:, :1].mul_(3)
    return y.sigmoid(), y.sigmoid()


def of_integers(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.int() * 2 / 4, x.int() * 2.0 / 4


@pytest.mark.parametrize(
    ("halves", "operator", "left"),
    [
        (lambda x: (pooled(x), pooled(x)), torch.ops.aten.max_pool2d.default, 1),
        (lambda x: (pooled(x.double()), pooled(x.double())), torch.ops.aten.max_pool2d.default, 1),
        (lambda x: (x.double().add_(1), x.double()), torch.ops.aten.to.dtype, 2),
        (lambda x: (pooled(x).view(2, -1), pooled(x).view(2, -1)), torch.ops.aten.view.default, 1),
        (
            lambda x: (pooled(x.unflatten(1, (1, -1))[:, 0]), pooled(x.unflatten(1, (1, -1))[:, 0])),
            torch.ops.aten.max_pool2d.default,
            1,
        ),
        (
            lambda x: (pooled(x), nn.functional.max_pool2d(x, 2, 2, 1)[:, :, :2, :2]),
            torch.ops.aten.max_pool2d.default,
            2,
        ),
        (in_place, torch.ops.aten.max_pool2d.default, 2),
        (in_place_by_a_view, torch.ops.aten.max_pool2d.default, 2),
        (changed_between, torch.ops.aten.sigmoid.default, 2),
        (copied_between, torch.ops.aten.repeat.default, 2),
        (changed_before, torch.ops.aten.sigmoid.default, 1),
        (lambda x: (torch.rand_like(x), torch.rand_like(x)), torch.ops.aten.rand_like.default, 2),
        (of_integers, torch.ops.aten.mul.Tensor, 3),
        (lambda x: (pooled(x.chunk(2, 3)[1]), pooled(x.split(2, -1)[1])), torch.ops.aten.max_pool2d.default, 1),
        (
            lambda x: (pooled(x.split([1, 3], 3)[1]), pooled(x.split([3, 1], 3)[0])),
            torch.ops.aten.max_pool2d.default,
            2,
        ),
        (
            lambda x: (pooled(x.chunk(2, 2)[0]), pooled(x.chunk(2, 3)[0]).mT),
            torch.ops.aten.max_pool2d.default,
            2,
        ),
    ],
    ids=[
        "pools",
        "of numbers of another type",
        "numbers of another type, written into",
        "what follows them",
        "behind more dimensions",
        "another border",
        "written into",
        "by a view",
        "of what is changed between them",
        "copies of what is changed between them",
        "of what was changed before",
        "drawn",
        "of another type",
        "equal pieces",
        "other pieces",
        "pieces along another axis",
    ],
)
def test_what_is_computed_alike_is_computed_once(halves, operator, left):
    example = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    module = torch.export.export(Both(halves), (example,)).module()
    torch.manual_seed(1)
    expected = module(example.clone())
    merge_alike(module)
    torch.manual_seed(1)
    assert torch.equal(module(example.clone()), expected)
    assert sum(node.target is operator for node in module.graph.nodes) == left


def summed(pieces: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """As Python sums up, which begins with a 0."""
    found = sum(pieces)
    assert not isinstance(found, int)
    return found


PIECES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "asked for alike": lambda x: torch.cat(
        [x.chunk(2, 1)[0] * x.chunk(2, 1)[1], x.chunk(2, 1)[0] + x.chunk(2, 1)[1]], 1
    ),
    "asked for in two ways": lambda x: torch.cat(x.chunk(2, 1)[::-1], 1) + torch.cat(x.split(4, 1), 1),
    "summed up": lambda x: torch.cat([x.chunk(2, 1)[0] * x.chunk(2, 1)[1], summed(x.chunk(2, 1))], 1),
}


@pytest.mark.parametrize("way", PIECES)
@pytest.mark.parametrize("target", [ANY_X86, TENSORRT])
def test_equal_pieces_of_a_tensor_are_meant_in_int8(way, target, tmp_path):
    torch.manual_seed(0)
    is_meant(Between(PIECES[way]), tmp_path, target, above=25)
