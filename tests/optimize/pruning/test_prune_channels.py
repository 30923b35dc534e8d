"""``prune-channels``: it leaves as much as was asked for, in a file that opens anywhere and can be gone on from."""

from __future__ import annotations

import copy
import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import optimize as opt
from examples.cifar_resnet import CifarResNet
from optimize.errors import NotApplicableError, PassError
from optimize.passes.fuse import Fuse
from optimize.passes.onnx import Onnx
from optimize.passes.prune_channels import PRUNE_CHANNELS, PruneChannels
from optimize.pruning.criteria import Criterion, first_order, scores
from optimize.pruning.groups import Group, group
from optimize.pruning.propagation import channels_of
from optimize.pruning.width_budget import Costs, Rounding, widths
from optimize.run.saved_artifacts import take
from optimize.run.session import Session
from optimize.store.artifact import Artifact
from optimize.store.layer_effects import read_effects
from optimize.store.objects import Store
from optimize.tracing.trace import trace
from serve.runtime.errors import UserError
from serve.runtime.images.image_preprocessing import normalise
from serve.torchserve.archive_builder import build_archive
from tests.narrow import layer
from tests.optimize.runs_fixtures import ROOT
from tests.optimize.workbench import CPU, noise_context, parent_of, png, run, with_running_statistics
from tests.serve.own_process import TOKEN, running

WITHOUT = {"epochs": 0}
HALF = {"round_to": 4, "min_width": 4, "train": WITHOUT}


def macs(module: nn.Module, batch: torch.Tensor) -> float:
    """By torch's own counter, of one image."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(batch)
    return counter.get_total_flops() / 2 / len(batch)


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("criterion", ["l1", "l2", "bn", "group", "taylor"])
@pytest.mark.parametrize("spread", ["global", "uniform"])
def test_at_most_as_much_arithmetic_is_left_as_was_asked_for(
    criterion: str, spread: str, session: Session, trained: Artifact, tmp_path: Path
) -> None:
    config = PruneChannels(macs=0.5, criterion=criterion, spread=spread, images=32, **HALF)
    product = PRUNE_CHANNELS.apply(trained, config, session.context, tmp_path)
    assert PRUNE_CHANNELS.resize is not None
    batch = session.context.example(2)
    smaller = PRUNE_CHANNELS.resize(trained.module(), batch, product.structure)
    share = macs(smaller, batch) / macs(trained.module(), batch)
    assert 0.3 < share <= 0.5
    assert f"({share:.0%})" in product.notes[0]
    widths = [each.out_channels for each in smaller.modules() if isinstance(each, nn.Conv2d)]
    assert all(width % 4 == 0 for width in widths)
    assert "outputs stay of head: they are the network's outputs" in product.notes


def test_the_page_has_each_layers_channels_before_and_after(made) -> None:
    artifact: Artifact = made("prune-channels", macs=0.5, **HALF)
    effects = {(effect.layer, effect.figure): [effect.before, effect.after] for effect in read_effects(artifact.folder)}
    module = artifact.module()
    assert effects["residual.0", "output channels"] == [32, layer(module, "residual.0", nn.Conv2d).out_channels]
    assert effects["head", "input channels"] == [128, layer(module, "head", nn.Linear).in_features]
    assert ("head", "output channels") not in effects


def test_fine_tuning_brings_answers_back_and_a_share_is_taken_in_steps(made, trained: Artifact) -> None:
    training = {"epochs": 1, "augment": False, "learning_rate": 0.05, "batch_size": 32}
    artifact: Artifact = made("prune-channels", macs=0.4, steps=2, round_to=4, min_width=4, train=training)
    said = [note for note in artifact.card.notes if note.startswith("fine-tuned: best of 1 epochs")]
    assert len(said) == 2
    assert float(said[-1].split("top-1 ")[1].split()[0]) > 0.7
    batch = torch.randn(2, 1, 16, 16)
    assert macs(artifact.module(), batch) <= 0.4 * macs(trained.module(), batch)
    torch.testing.assert_close(run(artifact, batch), artifact.module()(batch), rtol=1e-4, atol=1e-4)


def test_what_is_kept_and_the_rounding_hold(made) -> None:
    artifact: Artifact = made("prune-channels", macs=0.8, round_to=16, keep=("stem", "depth*"), train=WITHOUT)
    module = artifact.module()
    # What is kept keeps what is tied to it; of 32 channels 16 stay.
    widths = [layer(module, f"{name}.0", nn.Conv2d).out_channels for name in ("stem", "depthwise", "residual")]
    assert widths == [16, 16, 16]
    assert "outputs stay of stem.0, depthwise.0: they must be kept" in artifact.card.notes


def test_what_cannot_be_is_told_in_a_line(session: Session, trained: Artifact, tmp_path: Path) -> None:
    with pytest.raises(
        PassError, match=r"at most 0.0\d+ M .* \(macs=0.01\), but round_to=.* allow no fewer than 0.1\d+ M"
    ):
        session.apply(trained, PruneChannels(macs=0.01, train=WITHOUT))
    with pytest.raises(UserError, match=r"keep: the model has no module whose name or class is 'stam'.*stem"):
        session.apply(trained, PruneChannels(keep=("stam",)))
    with pytest.raises(UserError, match=r"PruneChannels: train: epoch: unknown .did you mean epochs"):
        PruneChannels(train={"epoch": 1})
    with pytest.raises(UserError, match=r"train: epochs: input should be greater than or equal to 0 \(it is -1\)"):
        PruneChannels(train={"epochs": -1})
    context = noise_context()
    shallow = nn.Sequential(nn.Flatten(), nn.Linear(256, 4))
    with pytest.raises(NotApplicableError, match="no channels of this model can be removed: outputs stay of 1"):
        PRUNE_CHANNELS.apply(parent_of(shallow, context, tmp_path / "a"), PruneChannels(), context, tmp_path)


def test_settings_of_a_training_are_taken_for_those_of_a_fine_tuning() -> None:
    config = PruneChannels(train=opt.Training(epochs=7))
    assert (config.train.epochs, config.train.learning_rate) == (7, 0.01)


# --- what it leaves

OPEN = """
import sys, torch
from pathlib import Path
from serve.runtime.card.card import load_card
from serve.runtime.engines.base import open_engine, preferred
folder = Path(sys.argv[1])
card = load_card(folder)
engine = open_engine(folder, card, preferred(card, "cpu"))
torch.save(engine.run(torch.load(sys.argv[2]))[0], sys.argv[3])
assert not any(name.partition(".")[0] in ("optimize", "tests") for name in sys.modules)
"""


def test_it_opens_in_another_process_without_the_models_code(made, tmp_path: Path) -> None:
    artifact: Artifact = made("prune-channels", macs=0.5, **HALF)
    batch = torch.randn(3, 1, 16, 16)
    torch.save(batch, tmp_path / "batch.pt")
    words = (artifact.folder, tmp_path / "batch.pt", tmp_path / "logits.pt")
    subprocess.run([sys.executable, "-c", OPEN, *map(str, words)], check=True, cwd=ROOT, timeout=120)
    with torch.no_grad():
        torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), artifact.module()(batch), rtol=1e-4, atol=1e-4)


def test_in_a_store_without_its_ancestors_it_and_what_followed_it_are_rebuilt(
    made, session: Session, tmp_path: Path
) -> None:
    """Of ``fuse`` after a pruning after ``fuse`` there is nothing but the files of its own."""
    pruned: Artifact = made("prune-channels", macs=0.5, **HALF)
    fused = session.apply(pruned, Fuse()).artifact
    again = session.apply(fused, PruneChannels(macs=0.7, **HALF), "again").artifact
    batch = torch.randn(2, 1, 16, 16)
    elsewhere = dataclasses.replace(session, store=Store(tmp_path / "other"))
    for artifact in (pruned, fused, again):
        folder = tmp_path / artifact.name
        folder.mkdir()
        for name in (*artifact.card.files, "card.json"):
            shutil.copyfile(artifact.folder / name, folder / name)
        taken = take(elsewhere, folder).artifact
        assert taken.parent is None
        with torch.no_grad():
            assert torch.equal(taken.module()(batch), artifact.module()(batch))
    graph = elsewhere.apply(taken, Onnx()).artifact
    assert graph.path.stat().st_size < 0.8 * made("onnx").path.stat().st_size


@pytest.mark.slow
def test_a_pruned_network_is_trained_quantized_packed_and_served(
    made, session: Session, trained: Artifact, tmp_path: Path
) -> None:
    pruned: Artifact = made("prune-channels", macs=0.5, **HALF)
    qat = session.apply(
        pruned, opt.Qat(epochs=1, freeze_observers_at=1, images=64, augment=False), "pruned-qat"
    ).artifact
    graph = session.apply(qat, opt.OnnxInt8(), "pruned-int8").artifact
    whole: Artifact = made("qat", "onnx-int8")
    gone = parameters(trained.module()) - parameters(pruned.module())
    assert gone > 5000
    assert graph.path.stat().st_size < whole.path.stat().st_size - 0.8 * gone  # a byte each
    build_archive(graph.folder, tmp_path / "m.mar", model_name="m")
    (tmp_path / "tokens").write_text(TOKEN + "\n")
    (tmp_path / "tokens").chmod(0o600)
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16))
    expected = run(graph, torch.from_numpy(pixels)[None, None].byte()).float().softmax(1)[0].tolist()
    with running(tmp_path, str(tmp_path / "m.mar"), "--token-file", str(tmp_path / "tokens")) as server:
        answer = httpx.post(
            f"{server.url}/predictions/m", content=png(pixels), headers={"authorization": f"Bearer {TOKEN}"}, timeout=30
        )
    assert answer.status_code == 200, answer.text
    found = {entry["index"]: entry["probability"] for entry in answer.json()}
    assert len(found) == 5
    assert found == pytest.approx({index: expected[index] for index in found}, abs=1e-4)


# --- scores and widths, by hand


class Pair(nn.Module):
    """Two convolutions that are added, each with a norm, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(1, 4, 1, bias=False), nn.Conv2d(1, 4, 1, bias=False)
        self.first, self.second = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 4)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        found = torch.relu(self.first(self.one(batch)) + self.second(self.two(batch)))
        return self.head(found.mean((2, 3)))


def test_criteria_are_those_of_their_papers() -> None:
    torch.manual_seed(0)
    network = with_running_statistics(Pair())
    one, two = torch.tensor([1.0, -2.0, 3.0, 4.0]), torch.tensor([2.0, 2.0, -2.0, 4.0])
    with torch.no_grad():
        network.one.weight.copy_(one.view(4, 1, 1, 1))
        network.two.weight.copy_(two.view(4, 1, 1, 1))
    context = noise_context()
    traced = torch.fx.symbolic_trace(network)
    grouping = group(channels_of(traced, context.example(2)), {})

    def found(criterion: Criterion) -> torch.Tensor:
        gradients = first_order(traced, grouping, context, 32) if criterion == "taylor" else None
        (score,) = scores(traced, grouping, criterion, gradients)
        (each,) = grouping.groups
        return score[torch.tensor(each.units).argsort()]

    relative = (one.abs() / 2.5 + two.abs() / 2.5) / 2
    torch.testing.assert_close(found("l1"), relative)
    torch.testing.assert_close(found("l2"), relative)  # filters of one weight
    gammas = network.first.weight.abs(), network.second.weight.abs()
    torch.testing.assert_close(found("bn"), (gammas[0] + gammas[1]).detach() / 2)
    squares = one**2 + two**2 + gammas[0] ** 2 + gammas[1] ** 2 + network.head.weight.square().sum(0)
    torch.testing.assert_close(found("group"), (squares.sqrt() / squares.sqrt().mean()).detach())
    batches = list(context.calibration(32))
    assert len(batches) == 1
    pixels, labels = batches[0]
    inputs = normalise(pixels, context.preprocessing, CPU, torch.float32)
    weights = [network.one.weight, network.two.weight]
    slopes = torch.autograd.grad(nn.functional.cross_entropy(network(inputs), labels), weights)
    wanted = sum((slope * weight).flatten().square() for slope, weight in zip(slopes, weights, strict=True))
    assert isinstance(wanted, torch.Tensor)
    torch.testing.assert_close(found("taylor"), wanted.detach())


def test_taylors_score_of_what_is_frozen_is_as_of_what_is_trained_and_of_what_nothing_reads_zero() -> None:
    class Aside(Pair):
        """With a layer whose answer changes no logit."""

        def __init__(self) -> None:
            super().__init__()
            self.aside = nn.Conv2d(1, 4, 1)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return super().forward(batch) + 0 * self.aside(batch).detach().sum()

    torch.manual_seed(0)
    context, found = noise_context(), []
    network = with_running_statistics(Aside())
    for frozen in (False, True):
        network.one.weight.requires_grad_(not frozen)
        traced = torch.fx.symbolic_trace(copy.deepcopy(network))
        grouping = group(channels_of(traced, context.example(2)), {})
        found.append(first_order(traced, grouping, context, 32))
        assert layer(traced, "one", nn.Conv2d).weight.requires_grad is not frozen, "it is as it was"
    trained, frozen_too = found
    assert float(trained["out one"].max()) > 0
    torch.testing.assert_close(frozen_too, trained)
    assert trained["out aside"].tolist() == [0.0] * 4


def test_numbers_of_channels_are_multiples_and_never_too_few() -> None:
    thirty = Group(tuple(range(30)), {"a": 1})
    assert [Rounding(8, 8).nearest(wanted, thirty) for wanted in (0, 11, 12, 13, 26, 28, 30)] == [
        8,
        8,
        16,
        16,
        24,
        30,
        30,
    ]
    assert Rounding(8, 20).nearest(0, thirty) == 24
    assert Rounding(8, 8).nearest(0, Group((1, 2, 3), {"a": 1})) == 3  # of 3 channels none can go
    # A unit of 4 channels of one layer and 2 of another: 2 and 4 of them make eights.
    assert Rounding(8, 8).nearest(5, Group(tuple(range(9)), {"a": 4, "b": 2})) == 4


def test_what_one_group_leaves_over_others_keep() -> None:
    """The stream of a residual network goes from 16 channels to 8 at once, and takes half of all layers with it."""
    module, batch = trace(CifarResNet(1).eval()), torch.zeros(2, 3, 32, 32)
    grouping = group(channels_of(module, batch), {})
    costs, rounding = Costs(grouping), Rounding(8, 8)
    others = macs(module, batch) - costs.full  # the head's, whose outputs stay
    stream = max(grouping.groups, key=lambda each: len(each.layers))
    # Whatever threshold the others come to before, the stream's channels lie beside each other.
    scores = [
        torch.linspace(1.25, 1.26, 16) if each is stream else torch.linspace(1, 2, len(each.units))
        for each in grouping.groups
    ]
    budget = 0.7 * macs(module, batch)

    def fits(kept: list[int]) -> bool:
        return others + costs.macs(kept) <= budget

    once, filled = (widths(grouping, scores, rounding, "global", fits, fill=fill) for fill in (False, True))
    assert once is not None
    assert filled is not None
    assert others + costs.macs(once) < 0.8 * budget
    assert others + costs.macs(filled) > 0.9 * budget
    assert all(more >= fewer for more, fewer in zip(filled, once, strict=True))
    for place, (each, kept) in enumerate(zip(grouping.groups, filled, strict=True)):
        if kept < len(each.units):
            assert not fits([*filled[:place], kept + 8, *filled[place + 1 :]]), "none could keep more"
