"""The training loop: that it learns, what it chooses the best epoch on, and that a seed fixes all of it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from optimize.context import Context
from optimize.data.augment import change
from optimize.data.loading import loader
from optimize.data.records import Split
from optimize.data.splits import hold_out
from optimize.data.targets import Labels
from optimize.errors import PassError
from optimize.listener import Silent
from optimize.training import loop as training
from optimize.training.config import TrainingConfig
from optimize.training.loop import score_of, train
from serve.runtime.errors import UserError
from serve.runtime.images.image_preprocessing import normalise
from tests.narrow import layer
from tests.optimize.tiny_net import Tiny
from tests.optimize.workbench import CPU, GREY16, noise, noise_context, noting


def numbered(labels: list[int]) -> Split:
    """Sources that are their own names, for tests that decode nothing."""
    return Split(tuple(str(index).encode() for index in range(len(labels))), Labels(torch.tensor(labels)))


def brightness(images: int = 96) -> Context:
    """Images whose brightness is their class, which a linear layer can learn."""
    parts = [noise(images // 4, seed, 20 + 60 * seed, 40 + 60 * seed) for seed in range(4)]
    sources = tuple(source for part in parts for source in part.sources)
    train_split = Split(sources, Labels(torch.arange(4).repeat_interleave(images // 4)))
    return noise_context(train=train_split)


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 49, 4))


FAST = TrainingConfig(epochs=2, batch_size=16, learning_rate=0.02, augment=False)


def test_a_network_that_is_frozen_is_refused_and_one_that_is_in_part_is_trained() -> None:
    frozen = network().requires_grad_(False)
    with pytest.raises(UserError, match=r"^Sequential cannot be trained: none of its 6 parameters has requires_grad; "):
        train(frozen, brightness(), FAST)
    head = layer(frozen, 4, nn.Linear).requires_grad_(True)
    before = [parameter.detach().clone() for parameter in frozen.parameters()]
    train(frozen, brightness(), FAST)
    *kept, weight, _ = frozen.parameters()
    assert all(map(torch.equal, before, kept))
    assert weight is head.weight
    assert not torch.equal(weight, before[-2])


# --- what is held out --------------------------------------------------------------------------------------------


def test_held_out_images_are_a_share_of_each_class_and_in_neither_part_twice():
    split = numbered([0] * 50 + [1] * 30 + [2] * 10)
    fit, held = hold_out(split, 0.2, 0)
    assert torch.bincount(held.labels).tolist() == [10, 6, 2]
    assert torch.bincount(fit.labels).tolist() == [40, 24, 8]
    assert not set(fit.sources) & set(held.sources)
    assert set(fit.sources) | set(held.sources) == set(split.sources)
    labels = dict(zip(split.sources, split.labels.tolist(), strict=True))
    for part in (fit, held):
        assert [labels[source] for source in part.sources] == part.labels.tolist()


def test_each_class_keeps_an_image_on_both_sides_as_long_as_it_has_two():
    fit, held = hold_out(numbered([0] * 20 + [1, 1] + [2]), 0.1, 0)
    assert torch.bincount(held.labels, minlength=3).tolist() == [2, 1, 0]
    assert torch.bincount(fit.labels).tolist() == [18, 1, 1]


def test_the_seed_decides_which_images_are_held_out():
    split = numbered([0] * 50 + [1] * 50)
    again = numbered([0] * 50 + [1] * 50)
    assert hold_out(split, 0.2, 0)[1].sources == hold_out(again, 0.2, 0)[1].sources
    assert hold_out(split, 0.2, 0)[1].sources != hold_out(split, 0.2, 1)[1].sources
    assert hold_out(split, 0.2, 0)[1] is hold_out(split, 0.2, 0)[1], "the same object, so that its pixels are shared"


# --- the loop ----------------------------------------------------------------------------------------------------


def test_a_tiny_network_learns_the_digits(digits, digits_context):
    torch.manual_seed(0)
    module = Tiny(10)
    batches = loader(digits.val, GREY16, batch_size=256, device=CPU)
    assert score_of(module.eval(), batches, digits_context) < 0.3
    result = train(module, digits_context, TrainingConfig(epochs=2, batch_size=32, learning_rate=0.1, augment=False))
    assert score_of(module, batches, digits_context) > 0.85
    assert result.epochs[1].loss < result.epochs[0].loss < 2.3
    assert result.held_out_images == pytest.approx(0.1 * len(digits.train), abs=10)
    assert not module.training


def test_validation_images_are_never_looked_at(monkeypatch):
    context = brightness()
    seen: list[Split] = []
    monkeypatch.setattr(training, "loader", noting(seen, loader, lambda split, *_, **__: split))
    train(network(), context, FAST)
    assert seen
    assert not any(set(split.sources) & set(context.data.val.sources) for split in seen)
    fit, held = seen
    assert not set(fit.sources) & set(held.sources)


def test_top1_is_the_share_of_right_answers():
    context = brightness(16)

    class AlwaysTwo(nn.Module):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return nn.functional.one_hot(torch.full((len(batch),), 2), 4).float()

    split = dataclasses.replace(context.data.train, targets=Labels(torch.tensor([2] * 5 + [1] * 11)))
    assert score_of(AlwaysTwo(), loader(split, GREY16, batch_size=6, device=CPU), context) == 5 / 16


@pytest.mark.parametrize(
    ("scores", "best"),
    [([0.5, 0.9, 0.7], 1), ([0.2, 0.4, 0.4], 2), ([0.8, 0.1, 0.1], 0)],
    ids=["middle", "tie", "first"],
)
def test_the_weights_of_the_best_epoch_are_kept(scores, best, monkeypatch):
    module, states, remaining = network(), [], iter(scores)

    def scripted(module, batches, context):
        states.append({name: tensor.clone() for name, tensor in module.state_dict().items()})
        return next(remaining)

    monkeypatch.setattr(training, "score_of", scripted)
    result = train(module, brightness(), FAST.model_copy(update={"epochs": 3}))
    assert result.best == best
    assert [epoch.held_out_score for epoch in result.epochs] == scores
    assert result.held_out_score == scores[best]
    kept = module.state_dict()
    for number, state in enumerate(states):
        assert all(torch.equal(kept[name], state[name]) for name in kept) == (number == best)


@pytest.mark.parametrize(
    ("scores", "best"),
    [([0.9, 0.2, 0.8], None), ([0.9, 0.9, 0.8], None), ([0.1, 0.2, 0.3], 1)],
    ids=["worse", "tie", "up"],
)
def test_what_was_trained_already_is_kept_where_no_epoch_is_better(scores, best, monkeypatch):
    module, remaining = network(), iter(scores)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    monkeypatch.setattr(training, "score_of", lambda *given: next(remaining))
    result = train(module, brightness(), FAST.model_copy(update={"epochs": 2}), from_start=True)
    assert result.best == best
    assert result.held_out_score == max(scores)
    assert [epoch.held_out_score for epoch in result.epochs] == scores[1:]
    kept = module.state_dict()
    assert all(torch.equal(kept[name], before[name]) for name in kept) == (best is None)
    assert ("no better after any of 2 epochs, kept as it was before training" in result.kept) == (best is None)


def test_the_same_seed_gives_the_same_weights_and_another_seed_does_not():
    states = []
    for seed in (0, 0, 1):
        module = network()  # always the same start
        train(module, dataclasses.replace(brightness(), seed=seed), FAST.model_copy(update={"augment": "data"}))
        states.append(module.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["4.weight"], states[2]["4.weight"])


@pytest.mark.parametrize(
    ("setting", "expected"),
    [("data", "shift"), (True, "shift"), ("none", "none"), (False, "none"), ("shift+flip", "shift+flip")],
)
def test_the_augmentation_is_a_setting_and_by_default_what_suits_the_data(setting, expected, monkeypatch):
    kinds: list[str] = []
    monkeypatch.setattr(training, "change", noting(kinds, change, lambda images, targets, kind, *_, **__: kind))
    context = brightness()
    assert context.data.augment == "shift"
    train(network(), context, TrainingConfig(epochs=1, batch_size=16, augment=setting))
    assert set(kinds) == {expected}
    assert TrainingConfig().augment == "data"


def test_a_truth_value_and_the_word_for_it_are_one_setting():
    assert TrainingConfig(augment=False) == TrainingConfig(augment="none")
    assert TrainingConfig(augment=True) == TrainingConfig()


def test_the_network_sees_the_served_pixels():
    context, seen = brightness(), []

    class Watching(nn.Sequential):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            seen.append(batch)
            return super().forward(batch)

    train(Watching(*network()), context, FAST.model_copy(update={"epochs": 1}))
    ((everything, _),) = loader(context.data.train, GREY16, batch_size=96, device=CPU)
    wanted = {image.numpy().tobytes() for image in normalise(everything, GREY16, CPU, torch.float32)}
    assert {image.numpy().tobytes() for batch in seen for image in batch} == wanted


def test_a_learning_rate_that_diverges_is_an_error_that_names_it():
    with pytest.raises(
        PassError, match=r"training diverged: the loss is (nan|inf) in epoch 1; lower learning_rate .*1e\+20"
    ):
        train(network(), brightness(), FAST.model_copy(update={"learning_rate": 1e20}))


def test_weights_decay_and_norms_and_biases_do_not(monkeypatch):
    captured = {}
    original = torch.optim.SGD

    def spy(groups, **options):
        captured["groups"] = groups
        return original(groups, **options)

    monkeypatch.setattr(torch.optim, "SGD", spy)
    module = network()
    module[4].bias.requires_grad_(False)
    train(module, brightness(), FAST.model_copy(update={"weight_decay": 0.25}))
    by_decay = {group["weight_decay"]: {id(p) for p in group["params"]} for group in captured["groups"]}
    assert by_decay == {
        0.25: {id(module[0].weight), id(module[4].weight)},
        0.0: {id(module[0].bias), id(module[1].weight), id(module[1].bias)},
    }


def test_the_rate_rises_to_its_peak_and_falls_to_almost_nothing(monkeypatch):
    rates = []
    original = torch.optim.SGD.step

    def spy(self, *arguments, **options):
        rates.append(self.param_groups[0]["lr"])
        return original(self, *arguments, **options)

    monkeypatch.setattr(torch.optim.SGD, "step", spy)
    train(network(), brightness(), FAST.model_copy(update={"epochs": 5, "warm_up": 0.3}))
    assert max(rates) == pytest.approx(0.02, rel=0.02)
    peak = rates.index(max(rates))
    assert 0.2 < peak / len(rates) < 0.4
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[0] < 0.1 * max(rates)
    assert rates[-1] < 0.02 * max(rates)


def test_a_warm_up_of_exactly_one_step_is_taken():
    # Four steps: a fifth of 4 + 1 is one step, a rise whose length torch's schedule takes for zero.
    config = FAST.model_copy(update={"epochs": 1, "batch_size": 22, "warm_up": 0.2})
    assert len(train(network(), brightness(), config).epochs) == 1


def test_one_image_a_class_is_too_few_to_hold_any_out():
    split = dataclasses.replace(noise(4), targets=Labels(torch.arange(4)))
    with pytest.raises(UserError, match="has one training image per class"):
        train(network(), noise_context(train=split), FAST)


def test_progress_runs_from_the_first_step_to_the_last():
    told = []

    class Told(Silent):
        def progressed(self, fraction: float, message: str) -> None:
            told.append((fraction, message))

    context = dataclasses.replace(brightness(), listener=Told())
    train(network(), context, FAST)
    fractions = [fraction for fraction, _ in told]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    assert told[0][1] == "epoch 1/2"
    assert told[-1][1] == "epoch 2/2"
