"""The explained absolute error against scikit-learn, its influences against images left out, and intervals of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.metrics import d2_absolute_error_score

from optimize.explained_error import (
    error_difference,
    error_interval,
    errors_of_images,
    explained_error,
    explained_shares,
    influences,
    spreads,
)
from optimize.statistics import smallest_loss

_Floats = NDArray[np.float64]


@st.composite
def answered(draw: st.DrawFn) -> tuple[_Floats, _Floats]:
    """Answers and targets of few values, so that many are equal, of up to three numbers."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    shape, most = (draw(st.integers(2, 12)), draw(st.integers(1, 3))), draw(st.integers(1, 6))
    return rng.integers(0, most + 1, shape).astype(np.float64), rng.integers(0, most, shape).astype(np.float64)


@given(answered(), st.integers(0, 1 << 30))
def test_it_is_scikit_learns_also_with_weights(made: tuple[_Floats, _Floats], seed: int) -> None:
    answers, targets = made
    expected = d2_absolute_error_score(targets, answers, multioutput="raw_values")
    np.testing.assert_allclose(explained_shares(answers, targets), expected)
    weights = np.random.default_rng(seed).integers(0, 3, len(targets))
    rows = np.repeat(np.arange(len(targets)), weights)
    if len(rows) >= 2:
        repeated = d2_absolute_error_score(targets[rows], answers[rows])
        assert explained_error(answers, targets, weights.astype(np.float64)) == pytest.approx(repeated)


@given(answered())
def test_an_influence_is_the_change_without_the_image(made: tuple[_Floats, _Floats]) -> None:
    answers, targets = made
    rows, whole = np.arange(len(targets)), explained_error(answers, targets)
    left = [explained_error(answers[rows != row], targets[rows != row]) - whole for row in rows]
    np.testing.assert_allclose(influences(answers, targets), left, atol=1e-9)


def test_spreads_are_mean_distances_from_the_median_and_errors_are_in_their_units() -> None:
    targets = np.array([[1.0, 10.0], [2.0, 10.0], [6.0, 40.0]])
    middle, spread = spreads(targets)
    np.testing.assert_allclose((middle, spread), ([2.0, 10.0], [5 / 3, 10.0]))
    np.testing.assert_allclose(errors_of_images(targets + np.array([5 / 3, 0.0]), targets), [0.5] * 3)
    assert explained_error(np.broadcast_to(middle, (3, 2)), targets) == 0.0
    assert explained_error(targets, targets) == 1.0


def simulated(images: int, rng: np.random.Generator) -> tuple[_Floats, _Floats, _Floats]:
    """Answers of a network and of a noisy copy of it, and skewed targets of two numbers in different units."""
    units = np.array([1.0, 300.0])
    targets = rng.lognormal(0, 0.7, (images, 2))
    first = targets + 0.15 * rng.standard_t(4, targets.shape)
    changed = rng.random((images, 1)) < 0.5
    return first * units, (first + changed * 0.1 * rng.normal(size=targets.shape)) * units, targets * units


@pytest.mark.parametrize("images", [50, 200, 500])
def test_intervals_of_a_difference_contain_it(images: int) -> None:
    rng = np.random.default_rng(images)
    first, second, targets = simulated(200_000, rng)
    true = explained_error(second, targets) - explained_error(first, targets)
    found = [error_difference(*simulated(images, rng)) for _ in range(400)]
    assert np.mean([each.low <= true <= each.high for each in found]) >= 0.93
    by_student = [abs(each.delta - true) <= 2 * each.spread.error for each in found]
    assert np.mean(by_student) >= 0.92


def test_networks_that_answer_alike_may_still_differ_by_what_the_images_cannot_exclude() -> None:
    first, second, targets = simulated(200, np.random.default_rng(0))
    found = error_difference(first, first, targets)
    assert (found.delta, found.gained, found.lost, found.n) == (0.0, 0, 0, 200)
    assert found.low == pytest.approx(-smallest_loss(200))
    other = error_difference(first, second, targets)
    assert other.gained + other.lost == np.sum((second != first).any(1))
    assert other.lost > other.gained


def test_a_network_far_worse_than_a_constant_has_an_interval_and_one_group_says_nothing() -> None:
    first, _, targets = simulated(100, np.random.default_rng(1))
    found = error_difference(first, first + 1e9, targets)
    assert found.low <= found.delta <= found.high < -1e6
    low, high = error_interval(first + 1e9, targets)
    assert low <= explained_error(first + 1e9, targets) <= high
    one = error_difference(first, first, targets, np.zeros(100, np.int64))
    assert np.isfinite([one.low, one.high]).all()
    assert one.low < -1000


def test_groups_of_equal_images_say_no_more_than_their_number() -> None:
    made = simulated(60, np.random.default_rng(2))
    first, second, targets = made[0].repeat(5, 0), made[1].repeat(5, 0), made[2].repeat(5, 0)
    images, grouped = (error_difference(first, second, targets, each) for each in (None, np.repeat(np.arange(60), 5)))
    assert grouped.spread.error == pytest.approx(5**0.5 * images.spread.error, rel=0.05)
