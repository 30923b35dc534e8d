"""MACs by shapes: against totals that the literature has, and sums by hand."""

from __future__ import annotations

import copy

import pytest
import torch
import torchvision
from torch import nn

from optimize.export.macs import layer_macs, program_work, total_macs
from optimize.tracing.trace import trace
from tests.optimize.tiny_net import Tiny

IMAGE = torch.zeros(1, 3, 224, 224)


@pytest.mark.parametrize(
    "name", ["resnet18", "resnet50", "mobilenet_v2", "shufflenet_v2_x1_0", "convnext_tiny", "vit_b_16"]
)
def test_known_networks_have_the_macs_that_torchvision_says_of_them(name: str) -> None:
    known = torchvision.models.get_model_weights(name).DEFAULT.meta["_ops"]
    with torch.device("meta"):  # not even its weights have content
        module = torchvision.models.get_model(name).eval()
    assert total_macs(module, IMAGE.to("meta")) / 1e9 == pytest.approx(known, abs=6e-4, rel=1e-3)


def test_resnet18_and_mobilenet_v2_have_the_macs_of_their_papers() -> None:
    found = {}
    for name in ("resnet18", "mobilenet_v2"):
        with torch.device("meta"):
            found[name] = total_macs(torchvision.models.get_model(name).eval(), IMAGE.to("meta")) / 1e9
    assert found == {"resnet18": pytest.approx(1.814, abs=1e-3), "mobilenet_v2": pytest.approx(0.3, abs=2e-3)}


def tiny_by_hand(side: int = 16) -> dict[str, int]:
    half = side // 2
    return {
        "stem.0": side * side * 16 * 1 * 9,
        "depthwise.0": side * side * 16 * 9,
        "expand.0": half * half * 32 * 16 * 9,
        "residual.0": half * half * 32 * 32 * 9,
        "head": 128 * 10,
    }


def test_each_layer_of_a_module_is_counted_by_its_name_for_one_image() -> None:
    module = Tiny(10).eval()
    expected = tiny_by_hand()
    assert layer_macs(module, torch.zeros(3, 1, 16, 16)) == expected
    assert list(layer_macs(module, torch.zeros(1, 1, 16, 16))) == list(expected)
    assert layer_macs(trace(copy.deepcopy(module)), torch.zeros(2, 1, 16, 16)) == expected


def test_counting_changes_neither_the_module_nor_its_statistics() -> None:
    module = Tiny(10).train()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    assert layer_macs(module, torch.zeros(2, 1, 16, 16)) == tiny_by_hand()
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in module.modules())


class Odd(nn.Module):
    """A layer called twice, a transposed convolution, products of attention, a linear layer on (N, L, C)."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Conv2d(4, 4, 3, padding=1, groups=2)
        self.up = nn.ConvTranspose2d(4, 6, 2, stride=2)
        self.mix = nn.Linear(6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(self.twice(self.twice(x)))  # (N, 6, 10, 10)
        tokens = self.mix(x.flatten(2).transpose(1, 2))  # (N, 100, 8)
        return nn.functional.scaled_dot_product_attention(tokens, tokens, tokens).mean(1)


ODD = {"twice": 2 * 25 * 4 * 2 * 9, "up": 25 * 4 * 6 * 4, "mix": 100 * 6 * 8, "": 2 * 100 * 100 * 8}


def test_what_is_called_twice_transposed_or_multiplied_by_itself_counts_as_often_as_it_is_done() -> None:
    assert layer_macs(Odd().eval(), torch.zeros(2, 4, 5, 5)) == ODD


def test_an_exported_program_has_the_same_macs_and_the_bytes_of_its_tensors() -> None:
    dynamic = ({0: torch.export.Dim.DYNAMIC},)
    program = torch.export.export(Odd().eval(), (torch.zeros(2, 4, 5, 5),), dynamic_shapes=dynamic)
    module = program.module()
    assert isinstance(module, torch.fx.GraphModule)
    found = program_work(module, torch.zeros(3, 4, 5, 5))
    assert sum(work.macs for work in found.values()) == 3 * sum(ODD.values())
    (first, second), (up,) = (
        [work for name, work in found.items() if name.startswith(kind)] for kind in ("conv2d", "conv_transpose2d")
    )
    assert first == second
    assert (first.macs, first.weights) == (3 * ODD["twice"] // 2, 4 * (4 * 2 * 9 + 4))
    assert first.read == first.written == 4 * 3 * 4 * 25
    assert (up.macs, up.read, up.written) == (3 * ODD["up"], 4 * 3 * 4 * 25, 4 * 3 * 6 * 100)
