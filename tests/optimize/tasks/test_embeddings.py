"""The task of vectors of which those of one class are near each other: losses, evidence, figures and words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from optimize.context import Context
from optimize.data.formats.base import default_data, open_data
from optimize.data.random_draws import Draws
from optimize.data.records import ImageData, Split
from optimize.data.targets import Labels
from optimize.errors import PassError
from optimize.models.source import ModelSource
from optimize.quantization.gate import Gate, check_answers
from optimize.tasks.base import GROUPS, find_task, joined_evidence, rows_of
from optimize.tasks.embeddings import EMBEDDINGS, OUTPUTS
from optimize.training.baseline import make_baseline
from optimize.training.config import TrainingConfig
from optimize.training.loop import train
from optimize.training.mixup import mixed
from serve.runtime.card.card import Preprocessing
from serve.runtime.errors import UserError
from tests.optimize.workbench import CPU, png

SIDE = 16
GREY = Preprocessing(SIDE, (SIDE, SIDE), mean=(0.5,), std=(0.25,))


def made(images: int = 60, noise: float = 1.3, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors of any length that lie around those of four classes, and the classes."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (images,), generator=generator)
    centres = torch.randn(4, 8, generator=torch.Generator().manual_seed(9))
    lengths = 0.5 + 5 * torch.rand(images, 1, generator=generator)
    return (centres[labels] + noise * torch.randn(images, 8, generator=generator)) * lengths, labels


def by_anchor(vectors: torch.Tensor, labels: torch.Tensor) -> float:
    """Equation 2 of Khosla et al. 2020, with a temperature of 0.1, anchor by anchor."""
    z = functional.normalize(vectors, dim=1)
    losses = []
    for i in range(len(z)):
        others = [a for a in range(len(z)) if a != i]
        positive = [p for p in others if labels[p] == labels[i]]
        whole = sum(torch.exp(z[i] @ z[a] / 0.1) for a in others)
        if positive:
            losses.append(-sum(torch.log(torch.exp(z[i] @ z[p] / 0.1) / whole) for p in positive) / len(positive))
    return float(sum(losses) / len(losses))


def test_the_loss_is_the_supervised_contrastive_one() -> None:
    vectors, labels = made(12)
    labels[0] = 7  # alone in its class
    expected = by_anchor(vectors, labels)
    for targets in (labels, EMBEDDINGS.shares(labels, 8)):
        assert float(EMBEDDINGS.loss(vectors, targets, "softmax")) == pytest.approx(expected, rel=1e-4)
    assert float(EMBEDDINGS.loss(3 * vectors, labels, "softmax")) == pytest.approx(expected, rel=1e-4)
    vectors.requires_grad_()
    alone = EMBEDDINGS.loss(vectors, torch.arange(12), "softmax")
    assert alone.item() == 0.0
    (gradient,) = torch.autograd.grad(alone, vectors)
    assert not gradient.any()
    with pytest.raises(UserError, match=r"label_smoothing is 0.1, and embeddings have no probabilities"):
        EMBEDDINGS.loss(vectors, labels, "softmax", 0.1)


def test_mixed_images_are_alike_to_the_extent_of_their_shares() -> None:
    vectors, labels = made(6)
    _, shares = mixed(torch.randn(6, 3, 8, 8), EMBEDDINGS.shares(labels, 4), 0.4, Draws(0, 0, torch.arange(6)))
    loss = EMBEDDINGS.loss(vectors, shares, "softmax")
    assert loss.isfinite()


def test_a_student_learns_the_direction_of_its_teachers_vectors() -> None:
    vectors, _ = made(5)
    assert float(EMBEDDINGS.soft_loss(vectors, 2 * vectors, 1.0)) == pytest.approx(0, abs=1e-6)
    assert float(EMBEDDINGS.soft_loss(vectors, -vectors, 1.0)) == pytest.approx(2)
    with pytest.raises(UserError, match="the teacher gives vectors of 4 numbers and the student of 8"):
        EMBEDDINGS.soft_loss(vectors, vectors[:, :4], 1.0)


def test_scores_of_the_parts_joined_are_those_of_a_loop_over_all_images() -> None:
    vectors, labels = made()
    parts = [EMBEDDINGS.evidence((vectors[at],), labels[at], 4) for at in (slice(25), slice(25, None))]
    found = joined_evidence(parts)
    cosines = functional.cosine_similarity(vectors[:, None], vectors[None], dim=2).fill_diagonal_(-9)
    order = cosines.argsort(1, descending=True)[:, :-1]
    right = labels[order] == labels[:, None]
    precisions = right.cumsum(1) / torch.arange(1, 60)
    assert EMBEDDINGS.scores(found) == {
        "recall1": pytest.approx(right[:, 0].double().mean().item()),
        "recall5": pytest.approx(right[:, :5].any(1).double().mean().item()),
        "map": pytest.approx(((precisions * right).sum(1) / right.sum(1)).mean().item(), rel=1e-5),
    }
    assert list(EMBEDDINGS.scores(found)) == [metric.key for metric in EMBEDDINGS.metrics]
    weights = np.random.default_rng(0).integers(0, 4, 60).astype(np.float64)
    assert EMBEDDINGS.score(found, weights) == pytest.approx(np.average(right[:, 0], weights=weights))
    assert np.array_equal(EMBEDDINGS.ease(found), right[:, 0])
    assert EMBEDDINGS.score(rows_of(found, np.flatnonzero(labels == 1))) == 1.0
    low, high = EMBEDDINGS.interval(found)
    assert low < EMBEDDINGS.score(found) < high


def test_frames_of_the_same_group_are_no_findings() -> None:
    vectors, labels = made(30)
    twice = EMBEDDINGS.evidence((vectors.repeat_interleave(2, 0),), labels.repeat_interleave(2), 4)
    assert EMBEDDINGS.score(twice) == 1.0
    once = EMBEDDINGS.evidence((vectors,), labels, 4)
    grouped = twice | {GROUPS: torch.arange(60) // 2}
    assert EMBEDDINGS.score(grouped) == EMBEDDINGS.score(once) < 1.0
    assert EMBEDDINGS.difference(grouped, grouped).spread.groups == 30


def test_a_difference_is_that_of_the_recalls() -> None:
    vectors, labels = made()
    found, other = (EMBEDDINGS.evidence((each,), labels, 4) for each in (vectors, vectors + made(seed=3, noise=2)[0]))
    whole = EMBEDDINGS.difference(found, other)
    assert whole.delta == pytest.approx(EMBEDDINGS.score(other) - EMBEDDINGS.score(found))
    assert whole.delta == pytest.approx((whole.gained - whole.lost) / 60)
    assert whole.low < whole.delta < whole.high


def test_vectors_agree_from_a_cosine_of_099() -> None:
    vectors = torch.eye(4)
    other = vectors + torch.tensor([[0, 0.1, 0, 0], [0.2, 0, 0, 0], [0, 0, 1, 0], [0.0, 0, 0, 0]])
    evidence = [EMBEDDINGS.evidence((each,), torch.arange(4), 4) for each in (vectors, other)]
    assert EMBEDDINGS.agreements(*evidence) == {EMBEDDINGS.agreement.key: 0.75}


def test_the_gate_fails_for_a_network_that_gives_all_images_one_vector() -> None:
    vectors, _ = made(32)
    note = check_answers(vectors, 1.001 * vectors, Gate(), "int8", task=EMBEDDINGS)
    assert "same nearest image for 32 of 32 training images" in note
    constant = vectors[:1].expand_as(vectors)
    with pytest.raises(PassError, match=r"same nearest image for \d of 32 training images; this is broken"):
        check_answers(vectors, constant, Gate(min_sqnr=-99.0), "int8", task=EMBEDDINGS)


@pytest.mark.parametrize("shape", [(4,), (4, 1), (3, 8), (4, 8, 1)])
def test_an_output_that_is_no_vector_for_each_image_is_refused(shape: tuple[int, ...]) -> None:
    inputs = torch.zeros(4, 3, 8, 8)
    assert EMBEDDINGS.fault_of(torch.zeros(4, 8), inputs, 10) is None
    fault = EMBEDDINGS.fault_of(torch.zeros(shape), inputs, 10)
    assert fault == "it must give a vector for each image, of shape (4, any size from 2)"


def stripes(count: int, seed: int) -> Split:
    """Grey pictures of noise, with stripes along, across or not at all."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, count)
    pictures = rng.integers(90, 166, (count, SIDE, SIDE))
    pictures[labels == 1, ::2] += 80
    pictures[labels == 2, :, ::2] += 80
    return Split([png(picture) for picture in pictures], Labels(torch.from_numpy(labels)))


def test_a_network_learns_vectors_of_more_numbers_than_there_are_classes(tmp_path: Path) -> None:
    classes, train_part, val_part = ("none", "along", "across"), stripes(96, 0), stripes(32, 1)
    data = ImageData("stripes", "embeddings", classes, train_part, val_part, "none", (SIDE, SIDE))
    context = Context(data, GREY, CPU)

    def factory(outputs: int, _: int | None) -> nn.Module:
        torch.manual_seed(0)
        features = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
        return nn.Sequential(*features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, outputs))

    result = train(factory(OUTPUTS, None), context, TrainingConfig(epochs=3, batch_size=24, learning_rate=0.1))
    assert result.metric == "recall@1"
    assert result.held_out_score > 0.8
    source = ModelSource("net", "net", "0", None, origin="own", factory=factory)
    product = make_baseline(source, context, TrainingConfig(epochs=1, max_steps=2), tmp_path)
    from safetensors.torch import load_file

    assert load_file(tmp_path / "weights.safetensors")["5.weight"].shape == (OUTPUTS, 8)
    assert product.structure == {}


def test_class_folders_and_digits_are_read_as_for_classification(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(4):
            (tmp_path / name / f"{number}.png").write_bytes(png(np.full((4, 4), number, np.uint8)))
    found, same = open_data(f"retrieval:{tmp_path}"), open_data(f"imagefolder:{tmp_path}")
    assert (found.task, same.task) == ("embeddings", "classification")
    assert (found.classes, found.fingerprint) == (same.classes, same.fingerprint)
    assert default_data("embeddings") == "retrievaldigits"
    digits = open_data("retrievaldigits")
    assert (digits.name, digits.task, len(digits.val)) == ("retrievaldigits", "embeddings", 359)
    assert find_task("embeddings") is EMBEDDINGS
