"""The recall of images by their vectors against a loop over queries, and intervals of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score

from optimize.retrieval import (
    Retrieved,
    mean_average_precision,
    nearest,
    recall_difference,
    recall_interval,
    retrieve,
)
from optimize.statistics import smallest_loss

_Vectors = NDArray[np.float32]
_Labels = NDArray[np.int64]


def of_length_one(values: NDArray[np.float64]) -> _Vectors:
    vectors: _Vectors = (values / np.linalg.norm(values, axis=1, keepdims=True)).astype(np.float32)
    return vectors


@st.composite
def galleries(draw: st.DrawFn) -> tuple[_Vectors, _Labels, _Labels | None]:
    """Vectors, of which many are equal in some, with classes and maybe groups."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    count = draw(st.integers(2, 12))
    values = rng.normal(size=(count, 3))
    vectors = of_length_one(np.sign(values) if draw(st.booleans()) else values)
    return vectors, rng.integers(0, 3, count), rng.integers(0, count, count) if draw(st.booleans()) else None


def by_loop(vectors: _Vectors, labels: _Labels, groups: _Labels | None, k: int) -> tuple[float, float]:
    """Recall@k and the mean average precision, query by query."""
    found, precisions = [], []
    for query in range(len(labels)):
        others = [i for i in range(len(labels)) if (i != query if groups is None else groups[i] != groups[query])]
        cosines = np.round(vectors[others] @ vectors[query], 6)
        right = labels[others] == labels[query]
        if right.any():
            found.append(np.sum(~right & (cosines >= cosines[right].max())) < k)
            precisions.append(average_precision_score(right, cosines))
    return float(np.mean(found)) if found else 0.0, float(np.mean(precisions)) if precisions else 0.0


@given(galleries(), st.integers(1, 5))
def test_wrong_images_that_are_as_near_come_first_and_those_of_the_same_group_do_not_count(
    made: tuple[_Vectors, _Labels, _Labels | None], k: int
) -> None:
    recall, precision = by_loop(*made, k)
    found = retrieve(*made)
    assert found.recall(k) == pytest.approx(recall)
    assert mean_average_precision(*made) == pytest.approx(precision)
    there = np.arange(len(made[1])) % 2 == 0
    vectors, labels, groups = made
    part = by_loop(vectors[there], labels[there], None if groups is None else groups[there], 1)
    assert found.recall_within(there) == pytest.approx(part[0])


def test_many_images_are_compared_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    made = of_length_one(rng.normal(size=(90, 4))), rng.integers(0, 5, 90)
    whole, precision = retrieve(*made), mean_average_precision(*made)
    monkeypatch.setattr("optimize.retrieval._AT_ONCE", 700)
    assert np.array_equal(retrieve(*made).near, whole.near)
    assert mean_average_precision(*made) == pytest.approx(precision)
    expected = [np.delete(np.arange(90), row)[np.delete(made[0] @ made[0][row], row).argmax()] for row in range(90)]
    assert nearest(made[0]).tolist() == expected


def test_a_network_that_gives_all_images_one_vector_finds_nothing() -> None:
    vectors, labels = of_length_one(np.ones((40, 8))), np.repeat(np.arange(4), 10)
    assert retrieve(vectors, labels).recall(1) == 0.0
    assert mean_average_precision(vectors, labels) == pytest.approx(9 / 39)


CENTRES = np.random.default_rng(5).normal(size=(10, 12))


def simulated(images: int, noise: float, rng: np.random.Generator) -> tuple[Retrieved, Retrieved]:
    """What a network retrieves, and a copy of it that gives half of the images a noisy vector."""
    labels = rng.integers(0, 10, images)
    first = 0.7 * CENTRES[labels] + 0.75 * rng.normal(size=(images, 12))
    second = first + (rng.random((images, 1)) < 0.5) * noise * rng.normal(size=first.shape)
    return retrieve(of_length_one(first), labels), retrieve(of_length_one(second), labels)


@pytest.mark.parametrize(("images", "noise"), [(50, 0.6), (200, 0.2), (500, 0.6)])
def test_intervals_of_a_difference_contain_it_and_are_not_twice_as_wide(
    images: int, noise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optimize.retrieval._DIVISIONS", 16)
    rng = np.random.default_rng(images)
    found = [recall_difference(*simulated(images, noise, rng)) for _ in range(50)]
    deltas = np.array([each.delta for each in found])
    true = deltas.mean()
    assert np.mean([each.low <= true <= each.high for each in found]) >= 0.93
    assert 0.95 < np.mean([each.spread.error for each in found]) / deltas.std() < 1.7


def test_networks_that_answer_alike_may_still_differ_by_what_the_images_cannot_exclude() -> None:
    first, second = simulated(200, 0.5, np.random.default_rng(0))
    alike = recall_difference(first, first)
    assert (alike.delta, alike.gained, alike.lost, alike.n) == (0.0, 0, 0, 200)
    assert alike.low == pytest.approx(-smallest_loss(200))
    other = recall_difference(first, second)
    assert other.delta == pytest.approx((other.gained - other.lost) / 200)
    low, high = recall_interval(first)
    assert low < first.recall(1) < high
    weights = np.random.default_rng(1).integers(0, 3, 200).astype(np.float64)
    assert first.recall(1, weights) == pytest.approx(np.average(first.hits(1), weights=weights))
