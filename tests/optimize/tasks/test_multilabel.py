"""The task of several labels for an image: losses, evidence, figures and words against plain definitions of them."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, f1_score
from torch import nn
from torch.nn import functional

from optimize.context import Context
from optimize.data.random_draws import Draws
from optimize.data.records import ImageData, Split
from optimize.data.targets import Vectors
from optimize.errors import PassError
from optimize.models.source import ModelSource
from optimize.quantization.gate import Gate, check_answers
from optimize.tasks.base import GROUPS, find_task, rows_of
from optimize.tasks.multilabel import MULTILABEL
from optimize.training.baseline import make_baseline
from optimize.training.config import TrainingConfig
from optimize.training.loop import train
from optimize.training.mixup import mixed
from serve.runtime.card.card import Preprocessing
from serve.runtime.errors import UserError
from tests.optimize.workbench import CPU, png

SIDE = 16
GREY = Preprocessing(SIDE, (SIDE, SIDE), mean=(0.5,), std=(0.25,))


def made(images: int = 40, classes: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and labels that go together a little."""
    generator = torch.Generator().manual_seed(seed)
    targets = (torch.rand(images, classes, generator=generator) < 0.4).to(torch.uint8)
    return 2 * torch.randn(images, classes, generator=generator) + targets, targets


def test_the_loss_is_the_binary_cross_entropy_of_each_class() -> None:
    logits, targets = made(images=3)
    for smoothing in (0.0, 0.2):
        total = 0.0
        for row, target in zip(logits.tolist(), targets.tolist(), strict=True):
            for logit, has in zip(row, target, strict=True):
                share = has * (1 - smoothing) + smoothing / 2
                p = 1 / (1 + math.exp(-logit))
                total -= share * math.log(p) + (1 - share) * math.log(1 - p)
        for given in (targets, MULTILABEL.shares(targets, 4)):
            assert float(MULTILABEL.loss(logits, given, "sigmoid", smoothing)) == pytest.approx(total / 3, rel=1e-5)
    assert float(MULTILABEL.soft_loss(logits, logits, 2.0)) == pytest.approx(
        4 * float(functional.binary_cross_entropy_with_logits(logits / 2, (logits / 2).sigmoid())) * 4, rel=1e-5
    )


def test_mixed_images_have_shares_of_the_labels_of_both() -> None:
    _, targets = made(images=5)
    inputs = torch.randn(5, 3, 8, 8)
    images, shares = mixed(inputs, MULTILABEL.shares(targets, 4), 0.4, Draws(0, 0, torch.arange(5)))
    part = float(((images[0] - inputs[1]) / (inputs[0] - inputs[1])).mean())
    assert torch.allclose(shares[0], part * targets[0] + (1 - part) * targets[1], atol=1e-5)


def test_scores_are_those_of_scikit_learn() -> None:
    logits, targets = made()
    found = MULTILABEL.evidence((logits,), targets, 4)
    truth = targets.numpy()
    assert MULTILABEL.scores(found) == {
        "map": pytest.approx(average_precision_score(truth, logits.numpy(), average="macro")),
        "f1": pytest.approx(f1_score(truth, logits.sigmoid().numpy() >= 0.5, average="micro")),
    }
    assert list(MULTILABEL.scores(found)) == [metric.key for metric in MULTILABEL.metrics]
    of_class = MULTILABEL.by_class(found, 4)
    assert MULTILABEL.score(found) == pytest.approx(np.nanmean(of_class.scores))
    assert of_class.counts.tolist() == of_class.images.tolist() == targets.sum(0).tolist()
    other = MULTILABEL.evidence((made(seed=1)[0],), targets, 4)
    for place, difference in enumerate(MULTILABEL.class_differences(found, other, 4)):
        assert difference is not None
        precisions = (average_precision_score(truth[:, place], each["logits"][:, place]) for each in (found, other))
        assert of_class.scores[place] + difference.delta == pytest.approx(list(precisions)[1])
        assert difference.low < difference.delta < difference.high
    assert len(MULTILABEL.ease(found)) == 40
    weights = np.random.default_rng(0).integers(0, 4, 40)
    repeated = MULTILABEL.score(rows_of(found, np.repeat(np.arange(40), weights)))
    assert MULTILABEL.score(found, weights.astype(np.float64)) == pytest.approx(repeated)


def test_a_difference_and_an_interval_are_wider_for_groups() -> None:
    logits, targets = made(images=80)
    found, other = (MULTILABEL.evidence((each,), targets, 4) for each in (logits, logits + 0.5 * made(80, seed=2)[0]))
    low, high = MULTILABEL.interval(found)
    assert low < MULTILABEL.score(found) < high
    whole = MULTILABEL.difference(found, other)
    assert whole.delta == pytest.approx(MULTILABEL.score(other) - MULTILABEL.score(found))
    assert whole.low < whole.delta < whole.high
    grouped = found | {GROUPS: torch.arange(80) // 10}
    assert MULTILABEL.difference(grouped, other).spread.groups == 8
    assert MULTILABEL.interval(grouped)[1] > high


def test_agreement_is_the_share_of_labels_in_both_answers_of_those_in_either() -> None:
    signs = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]]), torch.tensor([[1, 0, 1], [1, 0, 0], [0, 0, 0]])
    expected, found = ((2.0 * each - 1,) for each in signs)
    evidence = [MULTILABEL.evidence(each, signs[0], 3) for each in (expected, found)]
    share = pytest.approx((1 / 3 + 1 + 1) / 3)
    assert MULTILABEL.agreements(*evidence) == {MULTILABEL.agreement.key: share}
    alike = MULTILABEL.likeness(expected, found)
    assert alike.share == share
    assert alike.said == "77.8% of the labels of 3 training images alike"


def test_the_gate_fails_for_a_network_that_answers_nothing() -> None:
    logits, _ = made(images=32)
    noisy = logits + 0.01 * made(32, seed=1)[0]
    assert "labels of 32 training images alike" in check_answers(logits, noisy, Gate(), "int8", task=MULTILABEL)
    with pytest.raises(PassError, match=r"labels of 32 training images alike; this is broken"):
        check_answers(logits, logits - 9, Gate(min_sqnr=-99.0), "int8", task=MULTILABEL)


def test_classes_that_are_never_answered_are_named() -> None:
    logits, targets = made()
    names = ["a", "b", "c", "d"]
    assert MULTILABEL.remarks(MULTILABEL.evidence((logits,), targets, 4), targets, names) == []
    logits[:, 1] = -1.0
    (said,) = MULTILABEL.remarks(MULTILABEL.evidence((logits,), targets, 4), targets, names)
    assert said.endswith("1 of their 4 classes: b")


def test_a_network_for_classification_suits_and_one_for_maps_does_not() -> None:
    source = ModelSource("net", "net", "0", None, task="classification")
    source.check_task("multilabel", "photos")
    with pytest.raises(UserError, match="net is a network for segmentation, and photos is for multilabel"):
        dataclasses.replace(source, task="segmentation").check_task("multilabel", "photos")


def bars(count: int, seed: int) -> Split:
    """Grey pictures that may have a bright bar at the top, and a dark one at the bottom."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, (count, 2), np.uint8)
    pictures = rng.integers(100, 156, (count, SIDE, SIDE))
    for picture, (top, bottom) in zip(pictures, labels, strict=True):
        picture[:4] += 90 * top
        picture[-4:] -= 90 * bottom
    return Split([png(picture) for picture in pictures], Vectors(torch.from_numpy(labels)))


@pytest.fixture(scope="module")
def context() -> Context:
    data = ImageData("bars", "multilabel", ("bright", "dark"), bars(96, 0), bars(32, 1), "none", (SIDE, SIDE))
    return Context(data, GREY, CPU)


def network(*end: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(32, 2), *end
    )


def test_a_network_learns_them_and_is_judged_by_the_map(context: Context) -> None:
    result = train(network(), context, TrainingConfig(epochs=3, batch_size=16, learning_rate=0.05))
    assert result.metric == "mAP"
    assert result.held_out_score > 0.9


def test_a_network_that_ends_in_a_sigmoid_gives_its_logits_and_one_with_a_softmax_is_refused(
    context: Context, tmp_path: Path
) -> None:
    config = TrainingConfig(epochs=1, max_steps=2)
    for end in ((), (nn.Sigmoid(),)):
        source = ModelSource("net", "net", "0", None, origin="own", factory=lambda *_, end=end: network(*end))
        (tmp_path / str(len(end))).mkdir()
        product = make_baseline(source, context, config, tmp_path / str(len(end)))
        assert product.probabilities == "sigmoid"
        assert product.structure == ({"ending": "sigmoid"} if end else {})
    source = ModelSource("net", "net", "0", None, origin="own", factory=lambda *_: network(nn.Softmax(dim=1)))
    with pytest.raises(UserError, match="an image may have several classes, and these numbers sum to one: remove"):
        make_baseline(source, context, config, tmp_path)


def test_the_task_is_found_by_its_name() -> None:
    assert find_task("multilabel") is MULTILABEL
