"""At most 5 % wrong over all candidates, and how often an accurate one is proven: exact sums and seeded simulations.

"Before" is the rule that tested each candidate at 2.5 % by itself, on a random half of the images from 612 on.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
import pytest

from optimize.run.recommendation.non_inferiority import prove
from optimize.statistics import PairedDifference, ShareDifference, holm, loss_score, paired_interval

LIMIT = 0.02
#: Shares of the images that are gained and lost by a float graph, by an accurate integer one, and at the limit.
FLOAT, ACCURATE, AT_LIMIT = (0.001, 0.001), (0.01, 0.01), (0.01, 0.03)


def difference(gained: int, lost: int, n: int) -> PairedDifference:
    return ShareDifference((gained - lost) / n, math.nan, math.nan, gained, lost, n)


def binomial(n: int, p: float) -> np.ndarray:
    """The probabilities of 0 to n, by logarithms of factorials."""
    if p == 0.0:
        return np.eye(1, n + 1)[0]
    k = np.arange(n + 1)
    factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, n + 1)))])
    return np.exp(factorials[n] - factorials[k] - factorials[n - k] + k * math.log(p) + (n - k) * math.log1p(-p))


def most_lost(gained: int, n: int, z: float) -> int:
    """The largest number of lost images that still passes; −1 if none does."""
    low, high = -1, gained + math.ceil(n * LIMIT) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if loss_score(gained, middle, n, LIMIT) > z else (low, middle)
    return low


def chance(n: int, rates: tuple[float, float], level: float) -> float:
    """The exact probability that a candidate with these rates passes at this level."""
    gain, loss = rates
    z = NormalDist().inv_cdf(1 - level)
    total = 0.0
    for gained, weight in enumerate(binomial(n, gain)):
        if weight > 1e-7:
            total += weight * binomial(n - gained, loss / (1 - gain))[: most_lost(gained, n, z) + 1].sum()
    return total


@pytest.mark.parametrize("images", [300, 500, 1000, 5000])
@pytest.mark.parametrize("gain", [0.0, 0.01, 0.03])
def test_of_any_number_of_candidates_at_the_limit_at_most_one_in_twenty_passes(images: int, gain: float) -> None:
    """By the exact level of one test; of all tests by the sum, which holds however alike the candidates' errors are."""
    for candidates in (2, 4, 13, 30):
        one = chance(images, (gain, gain + LIMIT), min(0.025, 0.05 / candidates))
        assert candidates * one <= 0.0502
        assert 1 - (1 - one) ** candidates <= 0.05
    if images == 500 and gain == 0.01:
        before = chance(images, (gain, gain + LIMIT), 0.025)
        assert 1 - (1 - before) ** 13 > 0.24


def draw(rates: Sequence[tuple[float, float]], n: int, shared: float, rng: np.random.Generator) -> np.ndarray:
    """Images gained and lost by each candidate, ``(candidates, 2)``; that share of them by all alike."""
    common, own = rng.random(n), rng.random((len(rates), n))
    gained, lost = np.array(rates).T[:, :, None]
    alike = np.where(common < shared * lost, -1, np.where(common > 1 - shared * gained, 1, 0))
    alone = np.where(own < (1 - shared) * lost, -1, np.where(own > 1 - (1 - shared) * gained, 1, 0))
    side = np.where(alike, alike, alone)
    return np.stack([(side > 0).sum(1), (side < 0).sum(1)], 1)


@functools.cache
def z_of(gained: int, lost: int, n: int) -> float:
    return loss_score(gained, lost, n, LIMIT)


def passed(counts: np.ndarray, n: int) -> list[bool]:
    """By the tests together, as `prove` makes them; its own way of it is compared elsewhere."""
    p = [0.5 * math.erfc(z_of(int(g), int(c), n) / math.sqrt(2)) for g, c in counts]
    return [proven for proven, _ in holm(p, 0.05, 0.025)]


@pytest.mark.parametrize("shared", [0.0, 0.8])
@pytest.mark.parametrize("floats", [0, 7])
@pytest.mark.parametrize("images", [300, 500, 2000])
def test_candidates_at_the_limit_rarely_pass_beside_accurate_ones_and_whether_their_errors_are_alike_or_not(
    images: int, floats: int, shared: float
) -> None:
    """Those that pass leave their share of the error to the others, and a bad one passes in at most one of 20 runs."""
    rng, times = np.random.default_rng(0), 1200
    rates = [FLOAT] * floats + [AT_LIMIT] * (13 - floats)
    wrong = sum(any(passed(draw(rates, images, shared, rng), images)[floats:]) for _ in range(times))
    assert wrong / times <= 0.05


#: Chance that an accurate candidate (2 % of the images change sides) passes among 13, of which five others are integer
#: ones like it and seven are float: before, and now. By images.
POWER = {300: (0.49, 0.20), 400: (0.66, 0.54), 611: (0.88, 0.87), 612: (0.54, 0.86), 1000: (0.80, 0.98)}


@pytest.mark.parametrize(("images", "expected"), POWER.items())
def test_accurate_candidates_are_proven_as_often_as_the_table_says(images: int, expected: tuple[float, float]) -> None:
    before = chance(images if images < 612 else images // 2, ACCURATE, 0.025)
    rng, times = np.random.default_rng(1), 600
    rates = [FLOAT] * 7 + [ACCURATE] * 6
    now = sum(passed(draw(rates, images, 0.0, rng), images)[-1] for _ in range(times)) / times
    assert before == pytest.approx(expected[0], abs=0.01)
    assert now == pytest.approx(expected[1], abs=0.04)
    assert now > before or images < 612


def test_of_one_or_two_candidates_each_is_tested_as_if_it_were_alone() -> None:
    """The published chances of 611 images, and 1,000: half of the images are never taken for all of them."""
    for moved, at_611, at_1000 in ((0.012, 0.96, 1.00), (0.02, 0.88, 0.98), (0.03, 0.76, 0.93)):
        rates = moved / 2, moved / 2
        assert chance(611, rates, 0.025) == pytest.approx(at_611, abs=0.006)
        assert chance(612, rates, 0.025) == pytest.approx(at_611, abs=0.006)
        assert chance(1000, rates, 0.025) == pytest.approx(at_1000, abs=0.006)
    found = prove({"a": difference(3, 9, 612), "b": difference(0, 9, 612)}, LIMIT, 0.95)
    assert [each.level for each in found.values()] == [pytest.approx(0.025)] * 2


def reference(p: Sequence[float], error: float, each: float) -> list[bool]:
    """Holm's procedure by its definition as a closed test: all sets of hypotheses with this one must be rejected."""
    m = len(p)
    sets = [[i for i in range(m) if chosen >> i & 1] for chosen in range(1, 2**m)]
    rejected = [min(p[i] for i in group) < min(each, error / len(group)) for group in sets]
    return [all(found for group, found in zip(sets, rejected, strict=True) if i in group) for i in range(m)]


@pytest.mark.parametrize("seed", range(40))
def test_holm_is_the_closed_test_of_the_smallest_p_value(seed: int) -> None:
    rng = np.random.default_rng(seed)
    p = (rng.random(5) ** 4 * 0.06).tolist()
    for each in (1.0, 0.025):
        assert [proven for proven, _ in holm(p, 0.05, each)] == reference(p, 0.05, each)


def test_a_candidate_is_proven_exactly_if_its_bound_excludes_the_limit() -> None:
    rng = np.random.default_rng(3)
    for n in (150, 360, 750, 3000):
        counts = draw([FLOAT] * 3 + [ACCURATE] * 6 + [AT_LIMIT] * 4, n, 0.3, rng)
        found = prove({str(i): difference(int(g), int(c), n) for i, (g, c) in enumerate(counts)}, LIMIT, 0.95)
        assert [each.proven for each in found.values()] == passed(counts, n)
        for each, (g, c) in zip(found.values(), counts, strict=True):
            assert each.proven == (each.low > -LIMIT)
            assert each.low == pytest.approx(paired_interval(int(g), int(c), n, 1 - 2 * each.level).low)
            # The interval in the report's table begins no lower: what is proven never contradicts it.
            assert paired_interval(int(g), int(c), n).low >= each.low - 1e-12


def test_the_images_that_would_prove_a_candidate_do_among_its_competitors_and_one_less_does_not() -> None:
    counts = {"float": (0, 0), "good": (4, 6), "fair": (6, 12), "poor": (6, 15), "bad": (5, 25)}
    found = prove({name: difference(*each, 600) for name, each in counts.items()}, LIMIT, 0.95)
    assert found["bad"].images is None
    for name in ("float", "good", "fair", "poor"):
        images = found[name].images
        assert images is not None
        assert found[name].proven == (images <= 600)
        for n, enough in ((images, True), (images - 1, False)):
            scaled = [loss_score(g * n / 600, c * n / 600, n, LIMIT) for g, c in counts.values()]
            p = [0.5 * math.erfc(z / math.sqrt(2)) for z in scaled]
            assert holm(p, 0.05, 0.025)[list(counts).index(name)][0] == enough


def test_of_no_candidates_nothing_is_proven_and_a_limit_of_nothing_is_never_excluded() -> None:
    assert prove({}, LIMIT, 0.95) == {}
    (found,) = prove({"a": difference(0, 0, 1000)}, 0.0, 0.95).values()
    assert (found.proven, found.images) == (False, None)
