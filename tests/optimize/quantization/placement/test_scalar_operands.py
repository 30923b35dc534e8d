"""Sums and products with a number mean the same in torch's packed program, in its reference and in graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.ao.quantization.quantize_fx import convert_fx

from optimize.quantization.convert import prepare, trace_calls
from optimize.quantization.graph.explicit_quantizers import quantizing
from optimize.quantization.lowering.qdq import reference_form
from optimize.quantization.observers import settle_weights
from optimize.quantization.targets import x86_target
from serve.runtime.device.cpu_integers import ANY_X86, TENSORRT
from serve.runtime.engines.torchscript import use_int8_kernels
from tests.optimize import workbench
from tests.optimize.workbench import is_meant


class Between(nn.Module):
    """Two convolutions, and something in torch's words between them."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.between = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3), between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.second(self.between(torch.relu(self.first(x))))
        return answer


def in_place(y: torch.Tensor) -> torch.Tensor:
    y *= 0.37
    y += 0.021
    return y


WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "operators": lambda y: 0.021 + y * 0.37,
    "in place": in_place,
    "functions": lambda y: torch.relu(torch.add(torch.mul(y, -0.37), 0.1)),
    "arguments by name": lambda y: torch.add(torch.mul(input=y, other=0.37), other=0.021),
    "alpha": lambda y: torch.add(y, y.roll(1, 2), alpha=3),
    "size": lambda y: y * (y.size(1) / 5) + 0.021,
}


@pytest.mark.parametrize("way", WAYS)
def test_torchs_kernels_compute_a_sum_with_a_number_as_the_integers_mean_it(way: str) -> None:
    module, target = Between(WAYS[way]).eval(), x86_target()
    images = torch.rand(8, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    traced = trace_calls(module, images)
    prepared = prepare(traced, target.post_training("minmax"), images, target)
    prepared(images)
    settle_weights(prepared, images)
    use_int8_kernels()
    form = reference_form(prepared, images, target.backend_config())
    with torch.no_grad():
        expected, meant = module(images), form(images)
        found = convert_fx(prepared, backend_config=target.backend_config())(images)
    # A rounding tie may fall to either side.
    assert (meant != found).double().mean() < 0.005
    assert (meant - expected).abs().max() < 0.05 * expected.abs().max()
    # The image, what each layer gives, and what the second reads.
    assert sum(quantizing(node) == "quantize_per_tensor" for node in form.graph.nodes) == 4


@pytest.mark.parametrize(
    "way",
    [
        lambda y: torch.add((y[:, :1] > 0.3).long(), y, alpha=0.5),
        lambda y: torch.add(torch.arange(10), y, alpha=3),
        lambda y: torch.add(2, y, alpha=3),
        lambda y: torch.add(input=y.size(1), other=y, alpha=3),
        lambda y: torch.add(y, 2, alpha=3),
        lambda y: torch.sub(torch.arange(10), y, alpha=3),
        lambda y: torch.rsub(y, 2, alpha=3),
    ],
)
def test_what_is_multiplied_in_a_sum_stays_the_second_operand(way: Callable[[torch.Tensor], torch.Tensor]) -> None:
    module, images = Between(way).eval(), torch.rand(2, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    traced = trace_calls(module, images)
    with torch.no_grad():
        torch.testing.assert_close(traced(images), module(images))


def test_to_be_traced_a_network_is_run_once_and_the_images_stay_as_they_were() -> None:
    class Centred(Between):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x -= 0.5
            return super().forward(x).mean((2, 3))

    module, images = Centred(WAYS["operators"]).eval(), torch.rand(2, 1, 5, 5)
    runs: list[nn.Module] = []
    module.first.register_forward_hook(lambda layer, given, answer: runs.append(layer))
    before = images.clone()
    traced = trace_calls(module, images)
    assert len(runs) == 1
    assert torch.equal(images, before)
    assert [node.target for node in traced.graph.nodes if node.target in (torch.flatten, "mean")] == [torch.flatten]


class Crossed(nn.Module):
    """A column and a row of a map make a map (coordinate attention)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        return self.head(self.second(x.mean(3, keepdim=True) + x.mean(2, keepdim=True)).mean((2, 3)))


def test_the_sum_of_a_column_and_a_row_is_what_it_means(tmp_path):
    """In torch's integers it warns, which fails here."""
    torch.manual_seed(0)
    is_meant(Crossed(), tmp_path, ANY_X86, above=25)


@pytest.mark.parametrize("target", [ANY_X86, TENSORRT])
def test_a_small_tensor_may_stand_in_front_of_a_large_one(target, tmp_path):
    torch.manual_seed(0)
    is_meant(
        workbench.Between(lambda y: y.amax(1, keepdim=True) * (y.amax((2, 3), keepdim=True) + y)),
        tmp_path,
        target,
        above=25,
    )
