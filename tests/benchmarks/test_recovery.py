"""The bench of recovery: what its second network is trained on by."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torchvision.models import mobilenet_v2, resnet18

from tests.benchmarked import benchmark


@pytest.fixture(scope="module")
def pulling() -> Iterator[Any]:
    """The bench's own pass, which the project does not have when these tests are over."""
    with benchmark("benchmarks.pulled") as module:
        yield module


def test_the_norms_before_depthwise_convolutions_are_found_by_structure(pulling: Any) -> None:
    with torch.device("meta"):
        found = list(pulling.expansions(mobilenet_v2()))
        assert found == [f"features.{block}.conv.0.1" for block in range(2, 18)]  # the first block expands nothing
        assert not list(pulling.expansions(resnet18()))


def test_scales_and_offsets_are_pulled_against_their_sign_and_nothing_else_is(pulling: Any) -> None:
    net: Any = torch.nn.Sequential(torch.nn.Conv2d(1, 3, 1), torch.nn.BatchNorm2d(3), torch.nn.BatchNorm2d(3))
    with torch.no_grad():
        net[1].weight.copy_(torch.tensor([2.0, -0.5, 0.0]))
        net[1].bias.copy_(torch.tensor([-1.0, 0.0, 1e-3]))
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    pulling.NormL1(("1",), 0.25).add(net)
    told = {name: parameter.grad.flatten().tolist() for name, parameter in net.named_parameters()}
    assert told.pop("1.weight") == [7.25, 6.75, 7.0]
    assert told.pop("1.bias") == [6.75, 7.0, 7.25]
    assert {value for values in told.values() for value in values} == {7.0}
