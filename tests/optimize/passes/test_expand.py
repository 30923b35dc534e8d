"""``expand``: branches beside plain convolutions: no answer changes until they are trained; merged, they are gone."""

from __future__ import annotations

import copy
import operator
from pathlib import Path

import pytest
import torch
from torch import nn

from optimize.errors import NotApplicableError
from optimize.passes.expand import EXPAND, Expand, expand_module
from optimize.passes.fuse import Fuse
from optimize.passes.merge import Merge, merge_module
from optimize.training.config import TrainingConfig
from optimize.training.loop import train
from tests.optimize.branch_nets import plain, repvgg
from tests.optimize.branched import baseline, layers, same_answers, session_of
from tests.optimize.tiny_net import Tiny
from tests.optimize.workbench import noise_context, parent_of, run, with_running_statistics

SHORT = TrainingConfig(epochs=3, batch_size=16, learning_rate=0.1, augment=False)


@pytest.mark.parametrize(("branches", "new"), [("repvgg", 1 + 3 * 2), ("acnet", 4 * 2)])
def test_expanding_adds_branches_that_change_no_answer_and_merging_takes_them_away_again(branches, new: int) -> None:
    torch.manual_seed(0)
    module = with_running_statistics(plain())
    expanded, count = expand_module(copy.deepcopy(module), branches)
    # The stem has a stride and another width: there is no identity.
    assert count == 4
    added = [layer for layer in layers(expanded) if isinstance(layer, nn.BatchNorm2d)]
    assert len(added) == 2 + new
    assert same_answers(expanded, module, 3, 1, 16, 16)
    merged = merge_module(expanded, torch.randn(2, 1, 16, 16))
    assert same_answers(merged, module, 3, 1, 16, 16)
    assert sum(isinstance(layer, nn.Conv2d) for layer in merged.modules()) == 5


@pytest.mark.parametrize("branches", ["repvgg", "acnet"])
def test_expanded_trained_and_merged_a_network_answers_as_it_was_trained(branches) -> None:
    torch.manual_seed(0)
    context = noise_context()
    expanded, _ = expand_module(with_running_statistics(plain()), branches)
    before = {name: tensor.clone() for name, tensor in expanded.state_dict().items()}
    train(expanded, context, SHORT)
    moved = {name for name, tensor in expanded.state_dict().items() if not torch.equal(before[name], tensor)}
    beside = {name for name, _ in expanded.named_parameters() if "_1x" in name or "_3x1" in name or "_identity" in name}
    assert beside
    assert beside <= moved
    merged = merge_module(expanded, context.example())
    assert [type(layer) for layer in layers(merged)] == [nn.Conv2d] * 5
    assert same_answers(merged, expanded, 8, 1, 16, 16)


def test_an_expanded_network_is_rebuilt_from_its_weights_and_later_passes_follow_it(tmp_path: Path) -> None:
    session = session_of("plain", tmp_path / "store")
    base = baseline(session, plain)
    batch = session.context.example(8)
    for branches in ("repvgg", "acnet"):
        expanded = session.apply(base, Expand(branches=branches), f"expand-{branches}").artifact
        merged = session.apply(expanded, Merge(), f"merge-{branches}").artifact
        fused = session.apply(merged, Fuse(), f"fuse-{branches}").artifact
        for artifact in (expanded, merged, fused):
            torch.testing.assert_close(run(artifact, batch), run(base, batch), rtol=1e-4, atol=1e-4)
            with torch.no_grad():
                torch.testing.assert_close(artifact.module()(batch), run(base, batch), rtol=1e-4, atol=1e-4)


def test_without_a_plain_convolution_there_is_nothing_to_expand(tmp_path: Path) -> None:
    context = noise_context()
    module = nn.Sequential(nn.Conv2d(1, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(NotApplicableError, match="no plain 3x3 convolution"):
        EXPAND.apply(parent_of(module, context, tmp_path / "parent"), Expand(), context, tmp_path)


def test_what_has_branches_already_gets_no_more() -> None:
    torch.manual_seed(0)
    assert expand_module(with_running_statistics(repvgg()), "repvgg")[1] == 0
    once, count = expand_module(with_running_statistics(plain()), "acnet")
    assert count == 4
    assert expand_module(once, "acnet")[1] == 0


@pytest.mark.parametrize(("branches", "own"), [("repvgg", "1x1"), ("repvgg", "1x1_norm"), ("acnet", "3x1")])
def test_layers_of_the_networks_own_may_have_the_names_of_branches(branches, own: str) -> None:
    class Alike(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 3, padding=1)
            self.add_module(f"conv_{own}", nn.Conv2d(2, 2, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.get_submodule(f"conv_{own}")(torch.relu(self.conv(x)))

    torch.manual_seed(0)
    module = Alike().eval()
    expanded, count = expand_module(copy.deepcopy(module), branches)
    assert count == 1
    assert same_answers(expanded, module, 3, 2, 8, 8)
    again, _ = expand_module(copy.deepcopy(module), branches)
    again.load_state_dict(expanded.state_dict())  # the names are the same each time
    assert same_answers(merge_module(expanded, torch.randn(2, 2, 8, 8)), module, 3, 2, 8, 8)


def test_a_residual_network_is_expanded_and_merged_and_its_shortcuts_stay() -> None:
    module = with_running_statistics(Tiny(4))
    expanded, count = expand_module(copy.deepcopy(module), "repvgg")
    assert count == 4
    merged = merge_module(expanded, torch.randn(2, 1, 16, 16))
    assert len(layers(merged)) == 4
    assert sum(node.target is operator.add for node in merged.graph.nodes) == 1
    assert same_answers(merged, module, 3, 1, 16, 16)


def test_the_pass_trains_what_it_expanded_and_says_which_epoch_it_kept(tmp_path: Path) -> None:
    context, folder = noise_context(), tmp_path / "made"
    folder.mkdir()
    parent = parent_of(with_running_statistics(plain()), context, tmp_path / "parent")
    product = EXPAND.apply(parent, Expand(train=SHORT), context, folder)
    said, kept = product.notes
    assert said == "4 3x3 convolutions have branches beside them (repvgg), trained"
    assert "3 epochs" in kept
    assert product.structure == {"branches": "repvgg"}
