"""Activation checkpointing: the same gradients and the same state to the last bit, in less memory."""

from __future__ import annotations

import copy
import random
from contextlib import nullcontext

import pytest
import torch
from torch import fx, nn

from optimize.quantization.convert import prepare, trace_calls
from optimize.quantization.targets import x86_target
from optimize.training.blocks import block_names, segmented
from optimize.training.loop import train
from optimize.training.recompute import checkpointed
from serve.runtime.errors import UserError
from tests.optimize.training.test_training_loop import FAST, brightness, network
from tests.optimize.workbench import CPU, noise_context


class Block(nn.Module):
    """A residual block with a norm, a random layer, and a second random number from Python's generator."""

    def __init__(self, channels: int, *, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.silu(x, inplace=self.in_place)
        return x + self.drop(self.second(nn.functional.relu(self.norm(self.first(x)))))


class Python(nn.Module):
    """Scales by a number that neither torch nor the image knows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * random.random()


class Net(nn.Module):
    def __init__(self, *, in_place: bool = False, python: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3)
        self.blocks = nn.ModuleList([Block(8, in_place=in_place) for _ in range(6)])
        if python:
            for block in self.blocks:
                block.drop = nn.Sequential(nn.Dropout(0.3), Python())
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def eager() -> nn.Module:
    return Net(python=True)


def traced(*, in_place: bool = False) -> fx.GraphModule:
    return trace_calls(Net(in_place=in_place).eval(), noise_context().example())


def for_int8() -> nn.Module:
    example, target = noise_context().example(), x86_target()
    return prepare(traced().train(), target.quantization_aware(100), example, target)


def two_steps(module: nn.Module, *, lighter: bool) -> dict[str, torch.Tensor]:
    """Gradients, buffers and random state after two batches, each computed in two halves."""
    context = noise_context()
    batch, labels = context.example(16), torch.arange(16) % 4
    module.train()
    torch.manual_seed(5)
    random.seed(5)
    with checkpointed(module, context.example, 64, CPU) if lighter else nullcontext():
        for _ in range(2):
            for images, wanted in zip(batch.chunk(2), labels.chunk(2), strict=True):
                nn.functional.cross_entropy(module(images), wanted).backward()
    drawn = {"torch": torch.get_rng_state(), "python": torch.tensor(random.random())}
    return (
        {name: gradient for name, each in module.named_parameters() if (gradient := each.grad) is not None}
        | dict(module.named_buffers())
        | drawn
    )


@pytest.mark.parametrize("made", [eager, traced, for_int8, lambda: traced(in_place=True)])
def test_gradients_norms_ranges_and_random_numbers_are_those_without(made):
    torch.manual_seed(0)
    plain = made()
    lighter, calls = copy.deepcopy(plain), []
    lighter.get_submodule("blocks.3.first").register_forward_hook(lambda *_: calls.append(1))
    expected, found = two_steps(plain, lighter=False), two_steps(lighter, lighter=True)
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    computed = len(calls) - 2  # to find the blocks
    assert computed in {6, 7, 8}, "of four forwards, some or all are computed again"
    assert "forward" not in vars(lighter)
    assert lighter.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("made", [eager, traced])
def test_less_is_kept_between_forward_and_backward(made):
    module, kept = made().train(), []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    def bytes_kept() -> int:
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            module(noise_context().example(64))
        return sum({each.data_ptr(): each.untyped_storage().nbytes() for each in kept}.values())

    whole = bytes_kept()
    with checkpointed(module, noise_context().example, 64, CPU):
        assert bytes_kept() < 0.35 * whole
    assert bytes_kept() == whole


def test_a_training_ends_with_the_same_weights():
    config = FAST.model_copy(update={"precision": "bfloat16", "accumulate": 2, "clip_norm": 1.0})
    states = []
    for lighter in (False, True):
        torch.manual_seed(1)
        module = Net()
        train(module, brightness(), config.model_copy(update={"activation_checkpointing": lighter}))
        states.append(module.state_dict())
        assert not any("forward" in vars(layer) for layer in module.modules())
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_the_blocks_are_those_of_the_network():
    example = noise_context().example()
    assert block_names(Net().train(), example, 64).names == tuple(f"blocks.{number}" for number in range(6))
    found = segmented(traced().train(), example, 64)
    convolutions = [
        len([each for each in part.modules() if isinstance(each, nn.Conv2d)]) for part in found.module.children()
    ]
    assert sum(convolutions) == 13
    assert max(convolutions) <= 6
    assert found.left < 0.6


def test_what_writes_to_its_input_is_no_block_to_compute_again():
    with pytest.raises(UserError, match="this network has no blocks whose recomputation saves enough memory"):
        two_steps(Net(in_place=True), lighter=True)


def test_a_network_without_blocks_is_refused_in_one_line():
    config = FAST.model_copy(update={"activation_checkpointing": True})
    with pytest.raises(UserError, match=r"^activation_checkpointing: .* would leave 100% of it: train without$"):
        train(network(), brightness(), config)
