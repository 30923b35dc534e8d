"""Expectations come from brute force, simulation, closed forms and published tables, not from the formulas tested."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optimize.statistics import (
    images_needed,
    paired_difference,
    paired_interval,
    percentile_summary,
    ratio_interval,
    smallest_loss,
    sqnr_db,
    wilson_interval,
)

Z = 1.959963984540054
COUNTS = st.tuples(*[st.integers(0, 60)] * 4).filter(lambda c: sum(c) > 0)


def outcomes(gained: int, lost: int, both: int, neither: int) -> tuple[np.ndarray, np.ndarray]:
    a = np.repeat([False, True, True, False], [gained, lost, both, neither])
    b = np.repeat([True, False, True, False], [gained, lost, both, neither])
    return a, b


def score_by_brute_force(gained: int, lost: int, n: int, delta: float) -> float:
    """The score statistic, with the constrained maximum likelihood found on a grid and not by any formula."""
    low, high = max(0.0, -delta), (1 - delta) / 2
    for _ in range(8):
        grid = np.linspace(low, high, 4001)[1:-1]
        with np.errstate(divide="ignore", invalid="ignore"):
            likelihood = (
                (gained * np.log(grid + delta) if gained else 0.0)
                + (lost * np.log(grid) if lost else 0.0)
                + ((n - gained - lost) * np.log(1 - 2 * grid - delta) if n > gained + lost else 0.0)
            )
        best = int(np.nanargmax(likelihood + 0 * grid))
        step = grid[1] - grid[0]
        low, high = max(low, grid[best] - 2 * step), min(high, grid[best] + 2 * step)
    q21 = grid[best]
    variance = n * (2 * q21 + delta * (1 - delta))  # n times (q12 + q21 - delta squared), with q12 = q21 + delta
    return float((gained - lost - n * delta) / math.sqrt(variance))


@pytest.mark.parametrize(("gained", "lost", "n"), [(3, 9, 100), (9, 3, 100), (0, 5, 60), (40, 1, 50), (1, 1, 7)])
def test_paired_borders_are_where_the_brute_force_score_reaches_z(gained: int, lost: int, n: int) -> None:
    a, b = outcomes(gained, lost, n - gained - lost, 0)
    found = paired_difference(a, b)
    assert score_by_brute_force(gained, lost, n, found.low) == pytest.approx(Z, abs=1e-3)
    assert score_by_brute_force(gained, lost, n, found.high) == pytest.approx(-Z, abs=1e-3)


def test_paired_difference_counts_what_changed_sides() -> None:
    found = paired_difference([True, True, False, False, True], [True, False, True, True, True])
    assert (found.gained, found.lost, found.n) == (2, 1, 5)
    assert found.delta == pytest.approx(0.2)


@pytest.mark.parametrize("n", [1, 20, 360, 50_000])
def test_no_discordant_image_still_leaves_an_interval(n: int) -> None:
    found = paired_difference([True] * n, [True] * n)
    assert found.delta == 0
    # With no discordants the score equation reduces to n·Δ = z²·(1 − Δ).
    assert found.high == pytest.approx(Z**2 / (n + Z**2), rel=1e-9)
    assert found.low == pytest.approx(-found.high, rel=1e-9)


@pytest.mark.parametrize("n", [1, 30])
def test_total_reversal_ends_at_the_limit(n: int) -> None:
    better = paired_difference([False] * n, [True] * n)
    assert better.delta == better.high == 1
    assert -1 < better.low < 1
    worse = paired_difference([True] * n, [False] * n)
    assert worse.delta == worse.low == -1
    assert -1 < worse.high < 1


@pytest.mark.parametrize(("gain", "loss", "n"), [(0.01, 0.03, 360), (0.005, 0.005, 1000), (0.10, 0.02, 120)])
def test_paired_interval_covers_the_truth_in_about_95_of_100_simulations(gain: float, loss: float, n: int) -> None:
    rng = np.random.default_rng(7)
    draws = rng.multinomial(n, [gain, loss, 0.8, 0.2 - gain - loss], size=1500)
    known: dict[tuple[int, int], bool] = {}
    held = 0
    for gained, lost, both, neither in draws.tolist():
        if (gained, lost) not in known:
            found = paired_difference(*outcomes(gained, lost, both, neither))
            known[gained, lost] = found.low <= gain - loss <= found.high
        held += known[gained, lost]
    assert 0.93 <= held / len(draws) <= 0.98


@given(COUNTS)
def test_paired_interval_holds_its_delta_and_mirrors_under_swap(counts: tuple[int, int, int, int]) -> None:
    a, b = outcomes(*counts)
    forth, back = paired_difference(a, b), paired_difference(b, a)
    assert -1 <= forth.low <= forth.delta <= forth.high <= 1
    assert forth.low < forth.high
    assert (back.gained, back.lost, back.delta) == (forth.lost, forth.gained, -forth.delta)
    assert back.low == pytest.approx(-forth.high, abs=1e-9)
    assert back.high == pytest.approx(-forth.low, abs=1e-9)


@given(COUNTS)
def test_paired_interval_shrinks_when_the_same_outcomes_come_four_times(counts: tuple[int, int, int, int]) -> None:
    once = paired_difference(*outcomes(*counts))
    often = paired_difference(*outcomes(*(4 * c for c in counts)))
    assert often.delta == pytest.approx(once.delta)
    assert often.high - often.low < once.high - once.low


@given(COUNTS, st.randoms(use_true_random=False))
def test_paired_difference_ignores_the_order_of_images(counts: tuple[int, int, int, int], random: object) -> None:
    a, b = outcomes(*counts)
    order = np.arange(a.size)
    random.shuffle(order)  # type: ignore[attr-defined]
    assert paired_difference(a, b) == paired_difference(a[order], b[order])


@pytest.mark.parametrize(("a", "b"), [([], []), ([True], [True, False]), ([[True]], [[True]])])
def test_unpaired_outcomes_are_refused(a: list[bool], b: list[bool]) -> None:
    with pytest.raises(ValueError, match="equally long"):
        paired_difference(a, b)


@pytest.mark.parametrize("loss", [0.005, 0.01, 0.02, 0.05, 0.3])
def test_the_images_that_exclude_a_loss_are_the_fewest_whose_interval_does(loss: float) -> None:
    """Expected from the definition, by intervals of outcomes; and from the closed form for equal answers."""

    def low(n: int) -> float:
        return paired_difference([True] * n, [True] * n).low

    needed = images_needed(loss)
    assert needed is not None
    assert low(needed) > -loss >= low(needed - 1)
    assert needed == math.floor(Z * Z * (1 - loss) / loss) + 1
    assert smallest_loss(needed) == pytest.approx(Z * Z / (needed + Z * Z), abs=1e-9)


def test_two_points_take_189_images_more_confidence_more_and_a_real_loss_any_number() -> None:
    assert images_needed(0.02) == 189
    assert images_needed(0.02, 0.99) > images_needed(0.02) > images_needed(0.02, 0.8)  # type: ignore[operator]
    assert images_needed(0.0) is None
    assert images_needed(0.02, gained=0.01, lost=0.04) is None
    more = images_needed(0.02, gained=0.01, lost=0.02)
    assert more is not None
    assert more > 189


@given(COUNTS, st.floats(0.5, 0.98))
def test_less_confidence_is_a_narrower_interval_around_the_same_difference(
    counts: tuple[int, int, int, int], confidence: float
) -> None:
    gained, lost, n = counts[0], counts[1], sum(counts)
    wide, narrow = paired_interval(gained, lost, n, 0.99), paired_interval(gained, lost, n, confidence)
    assert wide.low <= narrow.low <= narrow.delta <= narrow.high <= wide.high
    assert paired_interval(gained, lost, n) == paired_difference(*outcomes(*counts))


def test_percentiles_of_0_to_100_are_their_own_ranks() -> None:
    found = percentile_summary(np.random.default_rng(0).permutation(101))
    assert (found.p50, found.p95, found.p99) == (50.0, 95.0, 99.0)


@given(st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=50))
def test_percentiles_are_ordered_and_within_the_samples(samples: list[float]) -> None:
    found = percentile_summary(samples)
    slack = 1e-9 * max(samples)
    assert min(samples) - slack <= found.p50 <= found.p95 + slack <= found.p99 + 2 * slack <= max(samples) + 3 * slack


@pytest.mark.parametrize("samples", [[], [1.0, math.nan], [math.inf], [[1.0, 2.0]]])
def test_percentiles_of_unusable_samples_are_refused(samples: list[float]) -> None:
    with pytest.raises(ValueError, match="samples"):
        percentile_summary(samples)


def test_a_drift_shared_by_both_sides_leaves_the_ratio_alone() -> None:
    slow_minute = np.array([1.0, 1.0, 3.0, 9.0, 2.0, 1.0, 4.0])
    found = ratio_interval(10 * slow_minute, 4 * slow_minute)
    assert (found.median, found.low, found.high) == pytest.approx((2.5, 2.5, 2.5))


@pytest.mark.parametrize(
    ("rounds", "low", "high", "coverage"),
    # From the binomial distribution: for 10 samples the 2nd to the 9th, 97.85 %; below 6 the whole range.
    [(5, 1, 5, 0.9375), (6, 1, 6, 0.96875), (10, 2, 9, 0.978515625), (1, 1, 1, 0.0)],
)
def test_ratio_interval_lies_between_order_statistics(rounds: int, low: int, high: int, coverage: float) -> None:
    ratios = np.random.default_rng(1).permutation(np.arange(1, rounds + 1))
    found = ratio_interval(ratios * 7.0, np.full(rounds, 7.0))
    assert (found.low, found.high) == pytest.approx((low, high))
    assert found.coverage == coverage


def test_ratio_interval_covers_the_true_median_as_often_as_it_says() -> None:
    rng = np.random.default_rng(3)
    found = [ratio_interval(rng.lognormal(0.5, 0.3, 9), np.ones(9)) for _ in range(2000)]
    held = np.mean([f.low <= math.exp(0.5) <= f.high for f in found])
    assert held == pytest.approx(found[0].coverage, abs=0.02)


def test_thousands_of_rounds_do_not_overflow() -> None:
    found = ratio_interval(np.arange(1, 3001), np.ones(3000))
    assert 0.95 <= found.coverage < 0.96
    # The normal approximation to the binomial puts the ranks at n/2 ± z·√n/2.
    assert found.low == pytest.approx(1500 - Z * math.sqrt(3000) / 2, abs=2)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3)), min_size=1, max_size=30))
def test_swapping_the_sides_inverts_the_ratio(pairs: list[tuple[float, float]]) -> None:
    a, b = (np.array(side) for side in zip(*pairs, strict=True))
    forth, back = ratio_interval(a, b), ratio_interval(b, a)
    assert forth.low <= forth.median * (1 + 1e-12)
    assert forth.median <= forth.high * (1 + 1e-12)
    assert back.median == pytest.approx(1 / forth.median)
    assert (back.low, back.high) == pytest.approx((1 / forth.high, 1 / forth.low))


@pytest.mark.parametrize(("a", "b"), [([], []), ([1.0], [1.0, 2.0]), ([0.0], [1.0]), ([1.0], [math.nan])])
def test_unpaired_or_impossible_rounds_are_refused(a: list[float], b: list[float]) -> None:
    with pytest.raises(ValueError, match=r"rounds|ratios"):
        ratio_interval(a, b)


def test_noise_a_tenth_as_large_is_20_db() -> None:
    reference = np.array([[3.0, -4.0], [5.0, 1.0]])
    assert sqnr_db(reference, reference * 1.1) == pytest.approx(20.0)


def test_eight_uniform_bits_of_a_full_scale_sine_reach_the_textbook_ratio() -> None:
    sine = np.sin(np.linspace(0, 1000, 200_001))
    step = 2 / 2**8
    assert sqnr_db(sine, np.round(sine / step) * step) == pytest.approx(6.02 * 8 + 1.76, abs=0.1)


def test_equality_to_the_last_bit_has_no_ratio() -> None:
    assert sqnr_db(np.array([1, 2], np.float32), np.array([1, 2], np.float32)) is None
    assert sqnr_db([0.0], [0.0]) is None


def test_half_precision_values_do_not_overflow_the_sum() -> None:
    reference = np.full(1000, 60_000, dtype=np.float16)
    assert sqnr_db(reference, reference / np.float16(2)) == pytest.approx(20 * math.log10(2))


@pytest.mark.parametrize(
    ("reference", "other", "word"),
    [([1.0], [math.nan], "not finite"), ([0.0], [1.0], "zero"), ([1.0, 2.0], [1.0], "shape"), ([], [], "non-empty")],
)
def test_a_ratio_that_does_not_exist_is_refused(reference: list[float], other: list[float], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        sqnr_db(reference, other)


@given(st.integers(1, 5000), st.data(), st.sampled_from([0.8, 0.95, 0.99]))
def test_the_interval_of_a_fraction_is_scipys(n: int, data: st.DataObject, confidence: float) -> None:
    stats = pytest.importorskip("scipy.stats")
    seen = data.draw(st.integers(0, n))
    expected = stats.binomtest(seen, n).proportion_ci(confidence, method="wilson")
    low, high = wilson_interval(seen / n, n, confidence)
    assert [low, high] == pytest.approx([expected.low, expected.high], abs=1e-12)
    assert low <= seen / n <= high
