"""Accuracy, the paired difference and parity, against numpy."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from optimize.context import Context
from optimize.errors import PassError
from optimize.measure.accuracy import (
    PARITY_IMAGES,
    Answers,
    accuracy,
    answer,
    load_answers,
    parity,
    save_answers,
)
from optimize.tasks.classification import CLASSIFICATION
from serve.runtime.outputs import Outputs
from tests.optimize.workbench import CPU, GREY16, image_data, noise


class Scripted:
    """A network that gives image i the i-th row of scores, whatever it shows."""

    def __init__(self, scores: np.ndarray) -> None:
        self.scores, self.seen = torch.from_numpy(scores).float(), 0

    def __call__(self, batch: torch.Tensor) -> Outputs:
        rows = self.scores[self.seen : self.seen + len(batch)]
        self.seen += len(batch)
        return (rows,)


def answers_of(scores: np.ndarray, classes: int, max_batch: int = 7) -> tuple[Answers, np.ndarray]:
    data = image_data(noise(8, classes=classes), noise(len(scores), classes=classes), classes)
    found = answer(Scripted(scores), Context(data, GREY16, CPU), max_batch)
    return found, data.val.labels.numpy()


@pytest.mark.parametrize("count", [1, 20, 700])
def test_answers_equal_numpys(count: int) -> None:
    scores = np.random.default_rng(1).normal(size=(count, 10))
    found, labels = answers_of(scores, 10)
    order = np.argsort(-scores, axis=1)
    assert CLASSIFICATION.scores(found.evidence)["top1"] == np.mean(order[:, 0] == labels)
    assert CLASSIFICATION.scores(found.evidence)["top5"] == np.mean(
        [label in row[:5] for label, row in zip(labels, order, strict=True)]
    )
    assert np.array_equal(found.evidence["predicted"].numpy(), order[:, 0])
    record = accuracy(found, None, "key", CLASSIFICATION)
    assert (record.scores, record.images) == (CLASSIFICATION.scores(found.evidence), count)
    assert record.score == record.scores["top1"]


def test_kept_logits_are_spread_over_a_split_that_is_sorted_by_class() -> None:
    count = 3 * PARITY_IMAGES + 5
    scores = np.arange(count * 4, dtype=np.float64).reshape(count, 4)
    found, _ = answers_of(scores, 4)
    assert found.outputs[0].shape == (PARITY_IMAGES, 4)
    rows = found.outputs[0][:, 0].numpy() / 4
    assert rows[0] == 0
    assert rows[-1] >= count - 5
    assert set(np.diff(rows)) <= {3, 4}


def test_fewer_images_than_that_are_all_kept_in_order() -> None:
    scores = np.random.default_rng(2).normal(size=(9, 3))
    assert np.allclose(answers_of(scores, 3)[0].outputs[0].numpy(), scores)


def test_of_equal_logits_the_lower_class_comes_first_as_it_is_served() -> None:
    """An int8 head often gives two classes the same integer."""
    scores = np.round(np.random.default_rng(3).normal(size=(300, 10)))
    found, labels = answers_of(scores, 10, max_batch=64)
    assert np.array_equal(found.evidence["predicted"].numpy(), scores.argmax(axis=1))  # numpy's takes the first
    first_five = np.argsort(-scores, axis=1, kind="stable")[:, :5]
    assert np.array_equal(found.evidence["five"].numpy(), (first_five == labels[:, None]).any(axis=1))


def test_with_fewer_than_five_classes_the_right_one_is_always_among_them() -> None:
    found, _ = answers_of(np.random.default_rng(4).normal(size=(11, 3)), 3)
    assert CLASSIFICATION.scores(found.evidence)["top5"] == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_answers_that_are_no_numbers_are_refused(bad: float) -> None:
    scores = np.zeros((20, 4))
    scores[17, 2] = bad
    with pytest.raises(PassError, match="NaN or infinite"):
        answers_of(scores, 4)


def test_what_is_saved_is_loaded(tmp_path) -> None:
    found, _ = answers_of(np.random.default_rng(5).normal(size=(12, 4)), 4)
    found = dataclasses.replace(found, outputs=(*found.outputs, torch.rand(12, 3, 4), torch.rand(12, 2)))
    save_answers(found, tmp_path)
    loaded = load_answers(tmp_path)
    for one, other in zip(loaded.outputs, found.outputs, strict=True):
        assert torch.equal(one, other)
    assert loaded.evidence.keys() == found.evidence.keys()
    for name, tensor in loaded.evidence.items():
        assert torch.equal(tensor, found.evidence[name])
    assert torch.equal(loaded.left_out, found.left_out)


def answers_with(right: np.ndarray) -> Answers:
    first = torch.from_numpy(right)
    return Answers(
        {"first": first, "five": first, "predicted": torch.zeros(len(right), dtype=torch.int64)},
        (torch.zeros(len(right), 2),),
    )


def test_the_difference_to_the_baseline_counts_the_images_that_changed_sides() -> None:
    right = np.array([1, 1, 1, 0, 0, 1, 0, 1, 1, 1], dtype=bool)
    other = np.array([1, 0, 1, 1, 0, 1, 0, 0, 0, 1], dtype=bool)
    found = accuracy(answers_with(other), answers_with(right), "key", CLASSIFICATION).difference
    assert found is not None
    assert found.delta == pytest.approx(-0.2)
    assert (found.gained, found.lost) == (1, 3)
    assert -1 <= found.low < -0.2 < 0 < found.high < 1


def test_the_baseline_has_no_difference_to_itself() -> None:
    assert accuracy(answers_with(np.array([True, False])), None, "key", CLASSIFICATION).difference is None


def test_parity_equals_numpys() -> None:
    generator = np.random.default_rng(6)
    reference = generator.normal(size=(40, 6))
    other = reference + generator.normal(size=(40, 6)) * 0.3
    first, second = answers_of(reference, 6)[0], answers_of(other, 6)[0]
    record = parity(first, second, "fuse", CLASSIFICATION)
    difference = np.abs(reference - other)
    assert record.reference == "fuse"
    assert record.max_abs == pytest.approx(difference.max(), rel=1e-5)
    assert record.mean_abs == pytest.approx(difference.mean(), rel=1e-5)
    assert record.sqnr_db == pytest.approx(10 * np.log10((reference**2).sum() / (difference**2).sum()), rel=1e-5)
    assert record.agreement == np.mean(reference.argmax(1) == other.argmax(1))
    assert (record.images, record.logits_of) == (40, 40)


def test_parity_of_equal_and_of_silent_networks_has_no_ratio() -> None:
    scores = np.random.default_rng(7).normal(size=(5, 4))
    found, silent = answers_of(scores, 4)[0], answers_of(np.zeros((5, 4)), 4)[0]
    assert parity(found, found, "a", CLASSIFICATION).sqnr_db is None
    assert parity(silent, found, "a", CLASSIFICATION).sqnr_db is None
    assert parity(found, silent, "a", CLASSIFICATION).sqnr_db == pytest.approx(0)
