"""Sums and means of integers are in OpenVINO what the graph means, over whichever axes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from optimize.quantization.lowering.openvino.reductions import keep_reductions
from tests.optimize.explicit_nets import Int8Linear, kept, meant_and_found, rounded

STEP = 0.0137


class Reducing(nn.Module):
    """A layer over the last axis, quantized, reduced, and quantized again or not."""

    def __init__(self, reduce: Callable[[torch.Tensor], torch.Tensor], zero: int, after: float | None) -> None:
        super().__init__()
        self.layer, self.reduce, self.after = Int8Linear(6, 6, STEP, zero), reduce, after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.reduce(self.layer(x))
        return found if self.after is None else rounded(found, self.after, self.layer.zero)


REDUCTIONS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[int, ...]]] = {
    "sum over tokens": (lambda x: x.sum(1), (16, 6)),
    "sum over tokens, kept": (lambda x: x.sum(dim=1, keepdim=True), (16, 6)),
    "mean over tokens": (lambda x: x.mean(1), (16, 6)),
    "mean over some tokens": (lambda x: x[:, 1:].mean(dim=1), (16, 6)),
    "sum of rectified": (lambda x: functional.relu(x).sum(1), (16, 6)),
    "sum over the last": (lambda x: x.sum(-1), (16, 6)),
    "sum over a map": (lambda x: x.sum((2, 3)), (4, 5, 6)),
    "mean over a map": (lambda x: x.mean((2, 3)), (4, 5, 6)),
    "mean over channels": (lambda x: x.mean(1), (4, 5, 6)),
    "mean over all but the batch, of three axes": (lambda x: x.mean((-2, -1)), (4, 6)),
    "mean over the last two of five axes": (lambda x: x.reshape(-1, 2, 2, 5, 6).mean((-2, -1)), (4, 5, 6)),
    "mean over the third and fourth of five": (lambda x: x.reshape(-1, 2, 2, 5, 6).mean((2, 3)), (4, 5, 6)),
    "einsum over a map": (lambda x: torch.einsum("bchw->bc", x), (4, 5, 6)),
    "einsum over some of one operand": (lambda x: torch.einsum("bchw, cd -> bd", x, torch.eye(4)), (4, 5, 6)),
    "norm that adds much": (lambda x: functional.layer_norm(x, (6,), eps=0.3), (16, 6)),
    "group norm that adds much": (lambda x: functional.group_norm(x.transpose(1, 2), 2, eps=0.3), (16, 6)),
    "sum over splits": (lambda x: x.reshape(-1, 2, 2, 5, 6).sum(1), (4, 5, 6)),
}


@pytest.mark.parametrize("again", [False, True], ids=["float", "again"])
@pytest.mark.parametrize("zero", [0, 118])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_in_openvino_a_sum_or_mean_is_what_the_integers_mean(name: str, zero: int, again: bool, tmp_path: Path) -> None:
    reduce, shape = REDUCTIONS[name]
    after = 0.1 if "sum" in name else 0.021
    x = torch.randn(5, *shape, generator=torch.Generator().manual_seed(5))
    meant, found = meant_and_found(Reducing(reduce, zero, after if again else None), x, tmp_path)
    assert meant.std() > 2 * after  # not all at an end of the range
    # Values of the layer in the middle of two integers may become either.
    difference = (found - meant).abs().max()
    assert difference <= (1.01 * after if again else 3 * STEP)


def test_of_an_einsum_that_is_kept_which_has_an_axis_of_its_own() -> None:
    class Network(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            products = torch.einsum("bct,btd->bcd", x, y) + torch.einsum("bct,bct->bc", x, x).sum()
            return products + torch.einsum("...ct->...c", x)[..., None] + torch.einsum("bct,bvd->bcd", x, y)

    x, y = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in [(2, 3, 4), (2, 4, 5)])
    # The sum, the third, and both of what the last multiplies.
    assert kept(Network(), keep_reductions, x, y) == (3, 4)


def test_only_sums_and_means_over_anything_but_a_map_are_kept() -> None:
    class Network(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gates = x.mean((2, 3), keepdim=True) + x.mean((-1, -2), keepdim=True)
            lines = x.flatten(2).mean((1, 2)) + x.flatten(2).mean((-2, -1)) + x.unsqueeze(4).mean((2, 3)).sum()
            return (x * gates).sum(1).mean(-1) + x.amax((1, 2)) + x.sum() + x.mean() + lines.mean()

    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    assert kept(Network(), keep_reductions, x) == (9, 9)


def test_what_is_counted_stays_whole_numbers() -> None:
    class Network(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.index_select(2, (x > 0).sum(1)[0, 0].clamp(max=3)) + x.sum(1, keepdim=True)

    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    assert kept(Network(), keep_reductions, x) == (1, 1)


@pytest.mark.parametrize(("epsilon", "count"), [(1e-3, 3), (1e-6, 0)])
def test_norms_of_integers_are_kept_where_what_they_add_counts_beside_a_step(epsilon: float, count: int) -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.of_floats = Int8Linear(6, 6, STEP, 118), nn.LayerNorm(6, eps=0.3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x, y = self.layer(x), self.of_floats(x.sin())
            normed = functional.layer_norm(x, (6,), eps=epsilon) + functional.group_norm(x, 2, eps=epsilon)
            return normed + functional.instance_norm(x, eps=epsilon) + y

    x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0))
    assert kept(Network(), keep_reductions, x) == (count, count)
