"""``prune-magnitude`` and ``prune-nm``: which weights are zero, that training leaves them so, and what is said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from optimize.errors import NotApplicableError, PassError
from optimize.passes.prune_magnitude import PRUNE_MAGNITUDE, PruneMagnitude
from optimize.passes.prune_nm import PRUNE_NM, PruneNm
from optimize.pruning.masks import ZEROS, held, n_of_m, smallest
from optimize.pruning.simulated import SIMULATED
from optimize.store.artifact import Artifact
from optimize.store.effects import read_effects
from serve.runtime.errors import UserError

from .workbench import noise_context, parent_of, run

TRAINING = {"epochs": 1, "augment": False, "batch_size": 32, "weight_decay": 0.01}
BATCH = torch.linspace(-1, 1, 2 * 256).reshape(2, 1, 16, 16)


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: layer.weight.detach()
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Conv2d | nn.Linear)
    }


def zero(tensors: list[torch.Tensor]) -> float:
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    return float((flat == 0).double().mean())


def test_the_smallest_weights_of_all_layers_are_zero_and_stay_so_in_training(made, trained: Artifact) -> None:
    artifact: Artifact = made("prune-magnitude", sparsity=0.6, train=TRAINING)
    before, after = weights(trained.module()), weights(artifact.module())
    assert zero(list(after.values())) == pytest.approx(0.6, abs=1e-4)
    border = torch.cat([weight.abs().flatten() for weight in before.values()]).quantile(0.6)
    for name, weight in after.items():
        assert torch.equal(weight == 0, before[name].abs() < border), name
    moved = [not torch.equal(weight[weight != 0], before[name][weight != 0]) for name, weight in after.items()]
    assert all(moved)  # the others were trained
    torch.testing.assert_close(run(artifact, BATCH), artifact.module()(BATCH), rtol=1e-4, atol=1e-4)
    assert any(note.startswith("60.0% of the weights of 5 layers are zero; simulated:") for note in artifact.card.notes)
    effects = {effect.layer: effect for effect in read_effects(artifact.folder) if effect.figure == ZEROS}
    assert {name: effect.after for name, effect in effects.items()} == {
        name: pytest.approx(100 * zero([weight])) for name, weight in after.items()
    }


def test_each_layer_loses_its_share_and_what_is_kept_none(made) -> None:
    artifact: Artifact = made(
        "prune-magnitude", sparsity=0.5, scope="layer", keep=("head", "stem"), train={"epochs": 0}
    )
    shares = {name: zero([weight]) for name, weight in weights(artifact.module()).items()}
    assert shares == {"stem.0": 0, "depthwise.0": 0.5, "expand.0": 0.5, "residual.0": 0.5, "head": 0}


def test_two_of_four_neighbouring_inputs_are_zero_and_stay_so_in_training(made, trained: Artifact) -> None:
    artifact: Artifact = made("prune-nm", train=TRAINING)
    before, after = weights(trained.module()), weights(artifact.module())
    for name in ("expand.0", "residual.0", "head"):
        weight, was = after[name], before[name]
        parts = weight.movedim(1, -1).reshape(-1, 4)
        assert torch.equal((parts == 0).sum(1), torch.full((len(parts),), 2))
        gone, left = (was.movedim(1, -1).reshape(-1, 4).abs()[which].view(-1, 2) for which in (parts == 0, parts != 0))
        assert bool((gone.amax(1) <= left.amin(1)).all())
    for name in ("stem.0", "depthwise.0"):  # of one input channel in a group
        assert zero([after[name]]) == 0
    assert "whole, because they read no multiple of 4 channels in a group: stem.0, depthwise.0" in artifact.card.notes
    assert any(note.startswith("50.0% of the weights of 3 layers are zero; simulated:") for note in artifact.card.notes)


def test_masks_are_worked_out_by_hand() -> None:
    weight = torch.tensor([[3.0, -1.0, 2.0, 0.5], [-4.0, 0.1, 0.2, 5.0]])
    kept = torch.tensor([[True, False, True, False], [True, False, False, True]])
    assert torch.equal(n_of_m({"a": weight}, 2, 4)["a"], kept)
    assert torch.equal(smallest({"a": weight}, 0.5, "global")["a"], kept)
    both = {"a": weight, "b": 10 * weight}
    # The eight smallest of both are six of a's, 1 and 2.
    left = torch.tensor([[False] * 4, [True, False, False, True]])
    assert torch.equal(smallest(both, 0.5, "global")["a"], left)
    assert [int(mask.sum()) for mask in smallest(both, 0.5, "layer").values()] == [4, 4]


def test_a_weight_that_something_else_moves_is_noticed() -> None:
    layer = nn.Linear(4, 2)
    network = nn.Sequential(layer)
    masks = {"0": torch.zeros(2, 4, dtype=torch.bool)}
    with pytest.raises(PassError, match="weights of 0 that were pruned have been trained"), held(network, masks):
        layer.weight.data += 1


def test_both_say_that_nothing_is_faster() -> None:
    assert "1.0 times the speed" in SIMULATED
    for entry in (PRUNE_MAGNITUDE, PRUNE_NM):
        assert "simulated" in entry.summary


def test_what_cannot_be_is_told_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="n=4 of m=4 removes nothing; n must be smaller than m, such as 2 of 4"):
        PruneNm(n=4)
    with pytest.raises(UserError, match="sparsity: input should be less than 1"):
        PruneMagnitude(sparsity=1.0)
    context = noise_context()
    parent = parent_of(
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()), context, tmp_path / "a"
    )
    with pytest.raises(NotApplicableError, match="no layer of this model has a multiple of 4 input channels"):
        PRUNE_NM.apply(parent, PruneNm(), context, tmp_path)
