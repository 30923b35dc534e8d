"""The mean average precision against scikit-learn, its influences against images left out, and intervals of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score

from optimize.average_precision import (
    class_precisions,
    image_precisions,
    influences,
    mean_precision,
    precision_difference,
    precision_interval,
)
from optimize.statistics import smallest_loss

Z = 1.96


@st.composite
def labelled(draw: st.DrawFn) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Scores of few values, so that many are equal, and labels of up to four classes."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    shape = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    return rng.integers(0, draw(st.integers(1, 6)), shape).astype(np.float64), rng.random(shape) < 0.4


@given(labelled())
def test_it_is_scikit_learns_for_each_class_and_the_mean_of_those_that_occur(
    made: tuple[NDArray[np.float64], NDArray[np.bool_]],
) -> None:
    scores, truth = made
    found = class_precisions(scores, truth)
    expected = [
        average_precision_score(truth[:, place], scores[:, place]) if truth[:, place].any() else np.nan
        for place in range(truth.shape[1])
    ]
    np.testing.assert_allclose(found, expected)
    assert mean_precision(scores, truth) == pytest.approx(np.nanmean(expected) if truth.any() else 0.0)


@given(labelled(), st.integers(0, 1 << 30))
def test_an_influence_is_the_change_without_the_image_and_a_weight_counts_it_so_often(
    made: tuple[NDArray[np.float64], NDArray[np.bool_]], seed: int
) -> None:
    scores, truth = made
    whole, rows = mean_precision(scores, truth), np.arange(len(scores))
    left = [mean_precision(scores[rows != row], truth[rows != row]) - whole for row in rows]
    np.testing.assert_allclose(influences(scores, truth), left, atol=1e-12)
    weights = np.random.default_rng(seed).integers(0, 3, len(scores))
    repeated = np.repeat(rows, weights)
    weighted = mean_precision(scores, truth, weights.astype(np.float64))
    assert weighted == pytest.approx(mean_precision(scores[repeated], truth[repeated]))


def test_the_precision_of_an_image_is_the_mean_at_the_ranks_of_its_labels() -> None:
    scores = np.array([[3.0, 1.0], [2.0, 1.0], [1.0, 0.0]])
    truth = np.array([[True, True], [False, False], [True, False]])
    np.testing.assert_allclose(image_precisions(scores, truth), [(1 + 1 / 2) / 2, 1.0, 2 / 3])


def simulated(
    images: int, shares: NDArray[np.float64], noise: float, rng: np.random.Generator
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
    """Logits of a network and of a noisy copy that is a little less sure of half of the images, and the labels."""
    truth = rng.random((images, len(shares))) < shares
    first = 1.5 * truth + rng.normal(size=truth.shape)
    changed = rng.random((images, 1)) < 0.5
    return first, first + changed * noise * rng.normal(size=truth.shape) - 0.02 * truth, truth


@pytest.mark.parametrize("images", [50, 200, 500])
def test_intervals_of_a_difference_contain_it(images: int) -> None:
    shares = np.array([0.02, 0.05, 0.1, 0.2, 0.4])
    rng = np.random.default_rng(images)
    first, second, truth = simulated(20_000, shares, 0.5, rng)
    true = mean_precision(second, truth) - mean_precision(first, truth)
    found = [precision_difference(*simulated(images, shares, 0.5, rng)) for _ in range(100)]
    assert np.mean([each.low <= true <= each.high for each in found]) >= 0.93
    assert np.median([each.high - each.low for each in found]) < 0.3 * np.sqrt(50 / images) + 0.1


def test_networks_that_answer_alike_may_still_differ_by_what_the_images_cannot_exclude() -> None:
    scores, _, truth = simulated(200, np.full(6, 0.5), 0.0, np.random.default_rng(0))
    found = precision_difference(scores, scores, truth)
    labels = truth.sum(1).mean()
    assert (found.delta, found.gained, found.lost, found.n) == (0.0, 0, 0, 200)
    assert found.low == pytest.approx(-smallest_loss(200) / labels)
    needed = found.images_needed(-found.low * 1.001, 0.95)
    assert needed is not None
    assert 198 <= needed <= 200


def test_groups_of_equal_images_say_no_more_than_their_number() -> None:
    made = simulated(60, np.full(6, 0.4), 0.5, np.random.default_rng(1))
    first, second, truth = made[0].repeat(5, 0), made[1].repeat(5, 0), made[2].repeat(5, 0)
    groups = np.repeat(np.arange(60), 5)
    images, grouped = (precision_difference(first, second, truth, each) for each in (None, groups))
    assert grouped.delta == images.delta
    assert grouped.high - grouped.low > 2 * (images.high - images.low)
    (low, high), (least, most) = (precision_interval(first, truth, each) for each in (None, groups))
    assert least < low < mean_precision(first, truth) < high < most
