"""What networks do between their layers in ways that a quantized graph does not follow by itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from optimize.errors import PassError
from optimize.quantization.graph.in_place_writes import name_written
from optimize.tracing.trace import trace
from serve.runtime.device.cpu_integers import ANY_X86, TENSORRT
from tests.optimize.workbench import Between, is_meant


def rectified(x: torch.Tensor) -> torch.Tensor:
    functional.relu(x, inplace=True)
    return x


def clamped(x: torch.Tensor) -> torch.Tensor:
    x.clamp_(0, 1)
    return x


def rectified_by_a_view(x: torch.Tensor) -> torch.Tensor:
    x.flatten(2).relu_()
    return x


def rectified_beside(x: torch.Tensor) -> torch.Tensor:
    return functional.relu_(x).sigmoid() + x


def partly(x: torch.Tensor) -> torch.Tensor:
    x[:, :4].zero_()
    return x


@pytest.mark.parametrize("between", [rectified, clamped, rectified_beside])
def test_what_is_written_in_place_is_read_by_its_old_name(between, tmp_path):
    torch.manual_seed(0)
    is_meant(Between(between), tmp_path, ANY_X86, above=20)


@pytest.mark.parametrize(
    ("between", "named"),
    [(rectified, 1), (clamped, 1), (rectified_beside, 1), (torch.relu_, 0), (lambda x: x.relu(), 0)],
)
def test_the_reader_of_the_old_name_reads_the_writer(between, named):
    torch.manual_seed(0)
    module, batch = Between(between).eval(), torch.randn(2, 1, 16, 16)
    traced = trace(module, batch)
    assert name_written(traced, batch) == named
    assert torch.equal(traced(batch), module(batch))


@pytest.mark.parametrize("between", [partly, rectified_by_a_view])
def test_a_part_that_is_written_into_is_refused_where_the_whole_is_read(between):
    batch = torch.randn(2, 1, 16, 16)
    with pytest.raises(PassError, match="which is read afterwards"):
        name_written(trace(Between(between).eval(), batch), batch)


def masked(x: torch.Tensor) -> torch.Tensor:
    return x * (x > 0)


def bordered_without_end(x: torch.Tensor) -> torch.Tensor:
    return functional.max_pool2d(functional.pad(x, [0, 1, 0, 1], value=float("-inf")), 3, 2)


def dropped(x: torch.Tensor) -> torch.Tensor:
    return x * functional.dropout(torch.sigmoid(x).mean((2, 3), keepdim=True), 0.5, False)


@pytest.mark.parametrize("between", [masked, bordered_without_end, dropped])
def test_what_has_no_range_is_given_none(between, tmp_path):
    torch.manual_seed(0)
    is_meant(Between(between), tmp_path, ANY_X86, above=20)


class Again(nn.Module):
    """One layer that is called twice on one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate, self.second = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        kept, other = x * torch.sigmoid(self.gate(x)), self.second(x) * (1 - torch.sigmoid(self.gate(x)))
        return self.head((kept + other).mean((2, 3)))


@pytest.mark.parametrize("target", [ANY_X86, TENSORRT])
def test_a_layer_that_is_called_twice_on_one_tensor_is_lowered(target, tmp_path):
    torch.manual_seed(0)
    is_meant(Again(), tmp_path, target, above=15)
