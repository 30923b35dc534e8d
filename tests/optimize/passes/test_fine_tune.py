"""``fine-tune``: the same network, trained on; the control of what is trained with less than float."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from optimize.passes.fine_tune import FineTune
from optimize.passes.fuse import Fuse
from optimize.passes.prune_magnitude import PruneMagnitude
from optimize.pruning.settings import FineTuning
from optimize.store.artifact import Artifact
from tests.optimize.branch_nets import plain
from tests.optimize.branched import baseline, session_of
from tests.optimize.workbench import run

SHORT = FineTune(epochs=1, batch_size=16, learning_rate=0.1, augment="none")


def weights(artifact: Artifact) -> dict[str, torch.Tensor]:
    return dict(artifact.module().state_dict())


def test_it_goes_on_from_its_parents_weights_and_the_same_network_comes_out(tmp_path: Path) -> None:
    session = session_of("plain", tmp_path / "store")
    base = baseline(session, plain)
    slow = session.apply(base, SHORT.model_copy(update={"learning_rate": 1e-9}), "slow").artifact
    tuned = session.apply(base, SHORT, "tuned").artifact
    before, barely, after = weights(base), weights(slow), weights(tuned)
    learned = {name for name, tensor in before.items() if name.endswith("weight") and tensor.dim() > 1}
    assert learned
    for name in learned:
        torch.testing.assert_close(barely[name], before[name], rtol=0, atol=1e-6)
    kept = any(note.startswith("fine-tuned: ") and "as it was" in note for note in tuned.card.notes)
    assert kept == all(torch.equal(after[name], before[name]) for name in learned)
    batch = session.context.example(8)
    with torch.no_grad():
        torch.testing.assert_close(run(tuned, batch), tuned.module()(batch), rtol=1e-4, atol=1e-5)
    assert tuned.card.precision == "float32"
    fused = session.apply(tuned, Fuse(), "fused").artifact
    torch.testing.assert_close(run(fused, batch), run(tuned, batch), rtol=1e-3, atol=1e-4)
    assert session.apply(base, SHORT, "again").cached


def test_zeros_that_a_pruning_left_stay(tmp_path: Path) -> None:
    session = session_of("plain", tmp_path / "store")
    sparse = session.apply(baseline(session, plain), PruneMagnitude(sparsity=0.6, train=FineTuning(epochs=0))).artifact
    before, after = weights(sparse), weights(session.apply(sparse, SHORT).artifact)
    zero = {name: tensor == 0 for name, tensor in before.items() if tensor.dim() > 1}
    assert sum(int(mask.sum()) for mask in zero.values()) > 100
    for name, mask in zero.items():
        assert bool((after[name][mask] == 0).all()), name


def test_each_optimizer_has_a_rate_of_its_own() -> None:
    assert FineTune().learning_rate == pytest.approx(0.01)
    assert FineTune(optimizer="adamw").learning_rate == pytest.approx(1e-4)
