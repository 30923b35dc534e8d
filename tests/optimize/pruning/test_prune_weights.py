"""``prune-magnitude`` and ``prune-nm``: which weights are zero, that training leaves them so, and what is said."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from optimize.errors import NotApplicableError, PassError
from optimize.passes.expand import Expand
from optimize.passes.onnx_int8 import OnnxInt8
from optimize.passes.prune_magnitude import PRUNE_MAGNITUDE, PruneMagnitude
from optimize.passes.prune_nm import PRUNE_NM, PruneNm
from optimize.passes.qat import Qat
from optimize.passes.qat_lowbit import QatLowbit
from optimize.pruning.masks import ZEROS, n_of_m, smallest
from optimize.pruning.simulated_zeros import SIMULATED
from optimize.store.artifact import Artifact
from optimize.store.layer_effects import read_effects
from optimize.training.config import TrainingConfig
from optimize.training.kept_zeros import Zeros
from optimize.training.loop import train
from serve.runtime.errors import UserError
from tests.optimize.workbench import noise_context, packed_in_torchscript, parent_of, run

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


def test_taken_in_steps_each_is_followed_by_a_training(made, trained: Artifact) -> None:
    # So many that the first step breaks the network: where training makes it no better, it is left as it was.
    artifact: Artifact = made("prune-magnitude", sparsity=0.96, steps=2, train=TRAINING)
    after = weights(artifact.module())
    assert zero(list(after.values())) == pytest.approx(0.96, abs=1e-4)
    assert len([note for note in artifact.card.notes if note.startswith("fine-tuned: best of")]) == 2
    # The first step took the four fifths that were smallest then; the training between has moved which are small.
    before = weights(trained.module())
    border = torch.cat([weight.abs().flatten() for weight in before.values()]).quantile(0.8)
    assert all(not weight[before[name].abs() < border].any() for name, weight in after.items())
    once = weights(made("prune-magnitude", sparsity=0.96, train={"epochs": 0}).module())
    assert any(not torch.equal(weight == 0, once[name] == 0) for name, weight in after.items())


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
    nn.init.zeros_(layer.weight)
    kept = Zeros(nn.Sequential(layer))
    kept.check()
    layer.weight.data[1, 2] = 1
    with pytest.raises(PassError, match="weights of 0 that were pruned have been trained"):
        kept.check()


# --- what follows a pruning


LEARNING = {"epochs": 1, "augment": False, "batch_size": 32, "learning_rate": 0.05}


@pytest.fixture(scope="module")
def sparse(made) -> Artifact:
    """So few weights, and no training: whatever trains it makes it better."""
    artifact: Artifact = made("prune-magnitude", sparsity=0.9, train={"epochs": 0})
    return artifact


def counted(tensors: list[torch.Tensor], file: str) -> str:
    """The sentence of the notes, from weights that were read in another way."""
    count = sum(tensor.numel() for tensor in tensors)
    return f"{zero(tensors):.1%} of the {count} weights of {len(tensors)} layers in {file} are zero, counted there"


def packed(artifact: Artifact) -> list[torch.Tensor]:
    return [integers for integers, _ in packed_in_torchscript(artifact.path)]


def initializers(path: Path) -> list[torch.Tensor]:
    """The int8 weights of a graph, by their type."""
    tensors = (numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer)
    return [torch.from_numpy(tensor.copy()) for tensor in tensors if tensor.dtype == "int8" and tensor.ndim > 1]


def test_training_for_int8_keeps_the_zeros_and_each_file_says_how_many_it_has(sparse: Artifact, session) -> None:
    floats = list(weights(sparse.module()).values())
    assert counted(floats, "model.pt2") in sparse.card.notes
    trained = session.apply(sparse, Qat(**{**LEARNING, "freeze_observers_at": 1, "images": 64}), "sparse-qat").artifact
    assert any(note.startswith("best of 1 epochs: 1") for note in trained.card.notes)  # and not as it was calibrated
    integers = packed(trained)
    assert [tensor.shape for tensor in integers] == [tensor.shape for tensor in floats]
    for integer, weight in zip(integers, floats, strict=True):
        assert not integer[weight == 0].any()  # and 8 bits round others to zero, too
    assert counted(integers, "model.pt") in trained.card.notes
    graph = session.apply(trained, OnnxInt8(), "sparse-int8").artifact
    stored = initializers(graph.path)
    assert sum(int((tensor == 0).sum()) for tensor in stored) == sum(int((tensor == 0).sum()) for tensor in integers)
    assert counted(stored, graph.card.file) in graph.card.notes


def test_what_no_pruning_made_may_train_its_zeros_and_says_nothing_of_them(made, session, trained: Artifact) -> None:
    assert not any("are zero" in note for note in (*trained.card.notes, *made("qat").card.notes))
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    nn.init.zeros_(cast("nn.Conv2d", network[0]).weight)
    fast = TrainingConfig(epochs=1, max_steps=2, batch_size=16, augment=False)
    train(network, noise_context(), fast)
    assert bool(cast("nn.Conv2d", network[0]).weight.any())


def test_other_passes_of_training_keep_zeros_too(sparse: Artifact, session) -> None:
    before = weights(sparse.module())
    fewer = session.apply(
        sparse, QatLowbit(weight_bits=4, activation_bits=8, images=32, **LEARNING), "sparse-4"
    ).artifact
    wider = session.apply(sparse, Expand(branches="acnet", train=TrainingConfig(**LEARNING)), "sparse-wider").artifact
    for artifact in (fewer, wider):
        after = weights(artifact.module())
        for name, weight in before.items():
            assert not after[name][weight == 0].any(), (artifact.name, name)
            assert not torch.equal(after[name], weight), (artifact.name, name)


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
