"""``merge``: parallel branches become one convolution, and the answers stay."""

from __future__ import annotations

import copy
import operator
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from optimize.errors import NotApplicableError
from optimize.passes.merge import MERGE, Merge, merge_module, peaked
from optimize.passes.onnx_int8 import OnnxInt8
from optimize.passes.ptq import Ptq
from optimize.run.saved_artifacts import take
from optimize.store.layer_effects import read_effects
from optimize.tracing.branches import merge_blocks
from optimize.tracing.folding import fuse_module
from optimize.tracing.trace import trace
from tests.optimize.branch_nets import AsymmetricBlock, RepBlock, acnet, normed, plain, repvgg
from tests.optimize.branched import baseline, layers, same_answers, session_of
from tests.optimize.workbench import noise_context, parent_of, run, with_running_statistics


@pytest.mark.parametrize(("net", "count"), [(repvgg, 5), (acnet, 3)])
def test_every_block_of_a_network_becomes_one_convolution_with_the_same_answers(
    net: Callable[[], nn.Module], count: int
) -> None:
    torch.manual_seed(0)
    module = with_running_statistics(net())
    merged = merge_module(module, torch.randn(2, 1, 16, 16))
    assert [type(layer) for layer in layers(merged)] == [nn.Conv2d] * count
    assert same_answers(merged, module, 5, 1, 20, 24)
    again = merge_module(merged, torch.randn(2, 1, 16, 16))
    assert len(layers(again)) == count


def kernel_by_impulses(block: nn.Module, channels: int) -> torch.Tensor:
    """Of a block that is linear but for what it adds: its answers to an image with one 1, read as a 3x3 kernel."""
    with torch.no_grad():
        nothing = block(torch.zeros(1, channels, 5, 5))
        found = []
        for channel in range(channels):
            impulse = torch.zeros(1, channels, 5, 5)
            impulse[0, channel, 2, 2] = 1
            found.append((block(impulse) - nothing)[0, :, 1:4, 1:4].flip(1, 2))
    return torch.stack(found, 1)


@pytest.mark.parametrize(
    "block", [RepBlock(4, 4), RepBlock(4, 6), AsymmetricBlock(4, 4)], ids=["identity", "wider", "asymmetric"]
)
def test_the_kernel_is_what_the_branches_together_answer_to_a_single_point(block: nn.Module) -> None:
    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = [layer(x) for layer in self.block.children()]
            return parts[0] + parts[1] + parts[2] if len(parts) > 2 else parts[0] + parts[1]

    module = with_running_statistics(Linear())
    (whole,) = (
        layer for layer in merge_module(module, torch.randn(2, 4, 8, 8)).modules() if isinstance(layer, nn.Conv2d)
    )
    torch.testing.assert_close(whole.weight.detach(), kernel_by_impulses(module, 4), rtol=1e-4, atol=1e-5)


def test_branches_whose_norms_were_folded_before_are_merged_all_the_same() -> None:
    torch.manual_seed(0)
    module = with_running_statistics(repvgg())
    example = torch.randn(2, 1, 16, 16)
    merged = merge_module(fuse_module(module, example), example)
    assert [type(layer) for layer in layers(merged)] == [nn.Conv2d] * 5
    assert same_answers(merged, module, 3, 1, 16, 16)


class Summed(nn.Module):
    """Two branches of a tensor, joined in whatever way."""

    def __init__(self, join: Callable[..., torch.Tensor], *branches: nn.Module) -> None:
        super().__init__()
        self.join, self.branches = join, nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.join(x, *(branch(x) for branch in self.branches))


def two(**second: int) -> tuple[nn.Module, nn.Module]:
    return normed(4, 4, (3, 3)), normed(4, 4, (1, 1), **second)


JOINS: dict[str, Callable[..., torch.Tensor]] = {
    "a function": lambda x, a, b: torch.add(a, b),
    "a method": lambda x, a, b: a.add(b),
    "in place": lambda x, a, b: operator.iadd(a, b),
    "a method in place": lambda x, a, b: a.add_(b),
    "builtin sum": lambda x, a, b: cast("torch.Tensor", sum([a, b])),
    "beside others": lambda x, a, b: (a + torch.sigmoid(x)) + b,
    "with a residual": lambda x, a, b: x + (a + b),
}


@pytest.mark.parametrize("join", JOINS)
def test_branches_are_found_however_they_are_added(join: str) -> None:
    module = with_running_statistics(Summed(JOINS[join], *two()))
    merged = merge_module(module, torch.randn(2, 4, 8, 8))
    assert len(layers(merged)) == 1
    assert same_answers(merged, module, 3, 4, 9, 9)


@pytest.mark.parametrize(
    "branches",
    [
        (nn.Conv2d(4, 6, 3, padding=1), nn.Conv2d(4, 6, 1)),
        (nn.Conv2d(4, 4, 3, padding="same"), nn.BatchNorm2d(4)),
        (
            nn.Conv2d(4, 4, 5, padding=2, dilation=1),
            nn.Conv2d(4, 4, (1, 5), padding=(0, 2)),
            nn.Conv2d(4, 4, 3, padding=1),
        ),
        (nn.Conv2d(4, 4, 3, 2, padding=2, dilation=2), nn.Conv2d(4, 4, 1, 2)),
        (nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1, bias=False)),
        (nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, (3, 1), padding=(0, -1 + 1)), nn.Conv2d(4, 4, 3))[::2],
    ],
    ids=["biases", "same", "5x5", "dilated", "points", "no border"],
)
def test_other_kernels_borders_strides_and_dilations(branches: tuple[nn.Module, ...]) -> None:
    module = with_running_statistics(Summed(lambda x, *parts: cast("torch.Tensor", sum(parts)), *branches))
    merged = merge_module(module, torch.randn(2, 4, 10, 10))
    assert len(layers(merged)) == 1
    assert same_answers(merged, module, 3, 4, 11, 13)


class Twice(nn.Module):
    """Branches with something in them called twice, or seen by another."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.dense, self.point = (nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1))
        self.one, self.other = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        if how == "tied":
            self.again = nn.Conv2d(4, 4, 1)
            self.again.weight = self.point.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dense = self.dense(x)
        point = self.point(self.dense(x) if self.how == "convolution" else x)
        a, b = self.one(dense), self.one(point) if self.how == "norm" else self.other(point)
        if self.how == "seen":
            return (a + b) * a
        if self.how == "seen inside":
            return a + b + point.sigmoid()
        return a + b + self.again(x.sigmoid()) if self.how == "tied" else a + b


ALONE: dict[str, nn.Module] = {
    "a residual connection": Summed(lambda x, a: x + a, normed(4, 4, (3, 3))),
    "a factor": Summed(lambda x, a, b: torch.add(a, b, alpha=2), *two()),
    "a difference": Summed(lambda x, a, b: a - b, *two()),
    "an activation inside": Summed(lambda x, a, b: torch.relu(a) + torch.relu(b), *two()),
    "other groups": Summed(lambda x, a, b: a + b, *two(groups=2)),
    "another dilation": Summed(
        lambda x, a, b: a + b, nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=2, dilation=2)
    ),
    "a border that mirrors": Summed(
        lambda x, a, b: a + b, nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), nn.Conv2d(4, 4, 1)
    ),
    "neither covers the other": Summed(
        lambda x, a, b: a + b, nn.Conv2d(4, 4, (1, 3), padding=(0, 1)), nn.Conv2d(4, 4, (3, 1), padding=(1, 0))
    ),
    "statistics of the batch": Summed(
        lambda x, a, b: a + b, nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4, track_running_stats=False)
    ),
    "norms alone": Summed(lambda x, a, b: a + b, nn.BatchNorm2d(4), nn.BatchNorm2d(4)),
    "an answer that is seen twice": Twice("seen"),
    "an answer that is seen within": Twice("seen inside"),
    "a shared norm": Twice("norm"),
    "a shared convolution": Twice("convolution"),
    "a tied weight": Twice("tied"),
    "a computed weight": Summed(
        lambda x, a, b: a + b,
        nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3, padding=1)),
        nn.Conv2d(4, 4, 1),
    ),
    "another tensor": Summed(
        lambda x, a, b: a + b, nn.Sequential(nn.Sigmoid(), nn.Conv2d(4, 4, 3, padding=1)), nn.Conv2d(4, 4, 1)
    ),
}


@pytest.mark.parametrize("case", ALONE)
def test_what_merely_resembles_a_block_is_left_alone(case: str) -> None:
    module = with_running_statistics(copy.deepcopy(ALONE[case]))
    traced = trace(module)
    before = layers(traced)
    assert merge_blocks(traced) == []
    assert layers(traced) == before
    assert same_answers(traced, module, 2, 4, 8, 8)


def test_without_a_block_merge_says_what_it_looks_for(tmp_path: Path) -> None:
    context = noise_context()
    with pytest.raises(NotApplicableError, match="merge found no parallel convolutions"):
        MERGE.apply(parent_of(plain(), context, tmp_path / "parent"), Merge(), context, tmp_path)


def test_a_merged_network_is_taken_back_without_its_ancestors_and_passes_go_on_to_int8(tmp_path: Path) -> None:
    session = session_of("repvgg", tmp_path / "store")
    base = baseline(session, repvgg)
    merged = session.apply(base, Merge()).artifact
    batch = session.context.example(8)
    expected = run(base, batch)
    torch.testing.assert_close(run(merged, batch), expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    assert "13 branches became 5 convolutions" in merged.card.notes[0]
    folder = tmp_path / "out"
    folder.mkdir()
    for name in (*merged.card.files, "card.json"):
        shutil.copyfile(merged.folder / name, folder / name)
    elsewhere = session_of("repvgg", tmp_path / "other")
    again = take(elsewhere, folder).artifact
    assert again.parent is None
    with torch.no_grad():
        assert torch.equal(again.module()(batch), merged.module()(batch))
    packed = session.apply(merged, Ptq(images=16, min_sqnr=0, min_agreement=0)).artifact
    graph = session.apply(packed, OnnxInt8(min_sqnr=0, min_agreement=0)).artifact
    assert graph.card.precision == "int8"
    found = run(graph, session.context.pixels(8))
    assert float((found - expected).norm() / expected.norm()) < 0.5


def test_of_each_merged_layer_it_is_written_how_far_its_weights_reach(tmp_path: Path) -> None:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.point = nn.Conv2d(1, 2, 3, padding=1, bias=False), nn.Conv2d(1, 2, 1, bias=False)
            with torch.no_grad():
                self.dense.weight.copy_(torch.tensor([1.0, 3.0]).view(2, 1, 1, 1).expand(2, 1, 3, 3))
                self.point.weight.fill_(5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.dense(x) + self.point(x)).mean((2, 3)).repeat(1, 2)

    context = noise_context()
    MERGE.apply(parent_of(One(), context, tmp_path / "parent"), Merge(), context, tmp_path)
    across, within = read_effects(tmp_path)
    # The median of two is the smaller one.
    assert across.layer == "dense"
    assert across.before == pytest.approx(3)
    assert across.after == pytest.approx(8 / 6)
    # The channel of eight 1 and a 6 has the root mean square sqrt((8 + 36) / 9).
    assert within.before == pytest.approx(1)
    assert within.after == pytest.approx(6 / (44 / 9) ** 0.5)


def test_a_channel_without_weights_has_no_part_in_how_peaked_a_layer_is() -> None:
    layer = nn.Conv2d(1, 2, 3)
    with torch.no_grad():
        layer.weight[0] = 0
        layer.weight[1] = 2
    assert peaked(layer) == pytest.approx(1.0)


def test_a_child_finds_the_weights_of_a_merged_network(tmp_path: Path) -> None:
    context, module = noise_context(), with_running_statistics(acnet())
    MERGE.apply(parent_of(module, context, tmp_path / "parent"), Merge(), context, tmp_path)
    again = merge_module(with_running_statistics(acnet(), seed=5), context.example())
    again.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    assert same_answers(again, module, 3, 1, 16, 16)
