"""The mIoU and its intervals: known values, what a jackknife must agree with, and coverage in seeded simulations."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from optimize.jackknife import Spread, student_quantile, student_score
from optimize.mean_iou import (
    class_ious,
    grouped_difference,
    grouped_share,
    iou_difference,
    iou_interval,
    mean_iou,
)
from optimize.run.recommendation.non_inferiority import prove
from optimize.statistics import images_needed, paired_interval, smallest_loss, wilson_interval

Z = NormalDist().inv_cdf(0.975)

Maps = NDArray[np.int64]


def counted(targets: Maps, answers: Maps, classes: int) -> NDArray[np.int32]:
    """A confusion matrix for each image, pixel by pixel."""
    found = np.zeros((len(targets), classes, classes), np.int32)
    for image, (target, answer) in enumerate(zip(targets, answers, strict=True)):
        for pair in zip(target.flat, answer.flat, strict=True):
            found[image][pair] += 1
    return found


def maps(seed: int, images: int = 12, classes: int = 4, wrong: float = 0.3) -> tuple[Maps, Maps, Maps]:
    """Targets, and two answers that are alike in most of their errors."""
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, classes, (images, 6, 5))
    first = np.where(rng.random(targets.shape) < wrong, rng.integers(0, classes, targets.shape), targets)
    second = np.where(rng.random(targets.shape) < 0.1, rng.integers(0, classes, targets.shape), first)
    return targets, first, second


def by_definition(targets: Maps, answers: Maps) -> float:
    ratios = []
    for name in np.unique(targets):
        own, given = targets == name, answers == name
        ratios.append((own & given).sum() / (own | given).sum())
    return float(np.mean(ratios))


def test_the_mean_iou_is_that_of_the_pixels_of_all_images_together() -> None:
    targets, first, _ = maps(0)
    found = counted(targets, first, 4)
    assert mean_iou(found) == pytest.approx(by_definition(targets, first))
    assert np.nanmean(class_ious(found)) == pytest.approx(mean_iou(found))
    rows = np.random.default_rng(0).integers(0, 12, 30)
    weights = np.bincount(rows, minlength=12).astype(np.float64)
    assert mean_iou(found, weights) == pytest.approx(by_definition(targets[rows], first[rows]))


def test_a_class_without_pixels_is_left_out_even_if_an_answer_has_it() -> None:
    targets, answers = np.array([[[0, 0, 0, 1]]]), np.array([[[0, 0, 2, 1]]])
    found = counted(targets, answers, 4)
    assert mean_iou(found) == pytest.approx((2 / 3 + 1) / 2)
    assert np.isnan(class_ious(found)).tolist() == [False, False, True, True]
    assert mean_iou(np.zeros((2, 3, 3), np.int32)) == 0.0


def test_the_standard_error_is_that_of_leaving_out_each_group() -> None:
    targets, first, second = maps(1)
    groups = np.arange(12) // 2
    left = []
    for group in range(6):
        rest = groups != group
        left.append(by_definition(targets[rest], second[rest]) - by_definition(targets[rest], first[rest]))
    found = iou_difference(counted(targets, first, 4), counted(targets, second, 4), groups)
    assert found.delta == pytest.approx(by_definition(targets, second) - by_definition(targets, first))
    assert found.spread.error == pytest.approx(math.sqrt(5 / 6 * np.sum((np.array(left) - np.mean(left)) ** 2)))
    assert (found.spread.groups, found.n) == (6, 12)
    assert found.low < found.delta < found.high
    right = [(answer == targets).sum((1, 2)) for answer in (first, second)]
    assert (found.gained, found.lost) == ((right[1] > right[0]).sum(), (right[1] < right[0]).sum())


def test_swapped_networks_have_the_opposite_difference() -> None:
    targets, first, second = maps(2)
    forth = iou_difference(counted(targets, first, 4), counted(targets, second, 4))
    back = iou_difference(counted(targets, second, 4), counted(targets, first, 4))
    assert (back.delta, back.low, back.high) == pytest.approx((-forth.delta, -forth.high, -forth.low))
    assert (back.gained, back.lost) == (forth.lost, forth.gained)


def test_images_of_one_class_that_answer_alike_have_tangos_interval() -> None:
    alike = np.zeros((60, 3, 3), np.int32)
    alike[np.arange(60), np.arange(60) % 3, np.arange(60) % 3] = 100
    found, tango = iou_difference(alike, alike), paired_interval(0, 0, 60)
    assert (found.delta, found.low, found.high) == pytest.approx((tango.delta, tango.low, tango.high))
    assert found.smallest_loss(0.99) == smallest_loss(60, 0.99) == pytest.approx(-found.at(0.99).low)
    assert found.score(0.02) == pytest.approx(tango.score(0.02))
    assert found.images_needed(0.02, 0.95) == images_needed(0.02) == 189


def test_with_two_classes_in_an_image_a_class_of_it_costs_half_and_groups_count_once() -> None:
    alike = np.tile(np.diag([50, 50]).astype(np.int32), (120, 1, 1))
    found = iou_difference(alike, alike, np.arange(120) // 4)
    assert found.low == pytest.approx(-Z * Z / (30 + Z * Z) / 2)
    assert found.images_needed(0.02, 0.95) == 4 * images_needed(0.04)  # type: ignore[operator]
    alone = iou_difference(alike, alike, np.zeros(120, np.int64))
    assert (alone.low, alone.high) == (-1.0, 1.0)
    assert alone.score(0.5) == 0.0
    assert iou_interval(alike, np.zeros(120, np.int64)) == (0.0, 1.0)


@given(st.integers(0, 50), st.floats(0.0, 0.3), st.floats(0.5, 0.999))
def test_a_loss_is_excluded_exactly_if_the_interval_excludes_it(seed: int, loss: float, confidence: float) -> None:
    targets, first, second = maps(seed % 5)
    found = iou_difference(counted(targets, first, 4), counted(targets, second, 4))
    z, low = NormalDist().inv_cdf(0.5 + confidence / 2), found.at(confidence).low
    if low > -0.999 and abs(low + loss) > 1e-9:
        assert (found.score(loss) > z) == (low > -loss)


def test_the_rule_of_the_recommendation_takes_such_differences() -> None:
    targets, first, second = maps(3, images=100, wrong=0.2)
    alike, worse = (iou_difference(counted(targets, first, 4), counted(targets, own, 4)) for own in (first, second))
    found = prove({"alike": alike, "worse": worse}, 0.05, 0.95)
    assert found["alike"].proven
    assert not found["worse"].proven
    assert found["alike"].low > -0.05 >= found["worse"].low


@pytest.mark.parametrize(("freedom", "most"), [(2, 1.23), (3, 1.07), (5, 1.02), (10, 1.003), (50, 1.0002)])
@pytest.mark.parametrize("z", [0.5, 1.645, 1.96, 3.0])
def test_students_quantile_is_near_the_exact_one_and_has_an_inverse(freedom: float, most: float, z: float) -> None:
    exact = pytest.importorskip("scipy.stats").t.ppf(NormalDist().cdf(z), freedom)
    assert exact * 0.99 < student_quantile(z, freedom) < exact * most
    assert student_score(student_quantile(-z, freedom), freedom) == pytest.approx(-z)


def test_far_quantiles_of_few_degrees_of_freedom_are_infinite() -> None:
    assert student_quantile(40.0, 1.0) == math.inf
    assert Spread(0.1, 1.0, 2, 1.0).reach(40.0) == math.inf


def test_groups_of_alike_images_count_as_one_image_each() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.random((2, 60)) < 0.8
    groups, frames = np.arange(60), np.repeat(np.arange(60), 5)
    alone, several = (
        grouped_difference(np.repeat(first, times), np.repeat(second, times), names)
        for times, names in ((1, groups), (5, frames))
    )
    assert (several.delta, several.low, several.high) == pytest.approx((alone.delta, alone.low, alone.high))
    assert several.gained == 5 * alone.gained
    tango = paired_interval(alone.gained, alone.lost, 60)
    assert (alone.delta, alone.low, alone.high) == pytest.approx((tango.delta, tango.low, tango.high), abs=0.02)
    assert grouped_share(np.repeat(first, 5), frames) == pytest.approx(wilson_interval(first.mean(), 60), abs=0.03)
    assert grouped_share(np.repeat(first, 5), np.arange(300))[0] > grouped_share(np.repeat(first, 5), frames)[0]


# --- coverage

CLASSES = 8
_COMMON = np.array([1.0, 0.9, 0.9, 0.8, 0.8, 0.7, 0.7, 0.6])
_RARE = np.array([1.0, 0.9, 0.8, 0.6, 0.4, 0.2, 0.1, 0.05])
_HARD = np.array([3.0, 2.0, 1.5, 1.2, 1.0, 0.8, 0.5, 0.3])


def simulated(
    groups: int, each: int, present: NDArray[np.float64], loss: tuple[float, float], rng: np.random.Generator
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Confusion matrices of two networks: images differ in size and presence of classes, difficulty, and losses.

    ``loss`` is the mean share of right pixels that the second network loses, and how far it is spread (lognormal, half
    of it by groups). A class is present in that share of the images.
    """
    images, between = groups * each, 0.5 if each > 1 else 0.0

    def normal() -> NDArray[np.float64]:
        shared = np.repeat(rng.normal(size=(groups, CLASSES)), each, 0)
        return math.sqrt(between) * shared + math.sqrt(1 - between) * rng.normal(size=(images, CLASSES))

    thresholds = np.array([NormalDist().inv_cdf(1 - share) if share < 1 else -math.inf for share in present])
    size = rng.gamma(0.7, 1.0, (images, CLASSES)) * (normal() > thresholds)
    size[:, 0] += 0.05
    size = np.floor(4000 * size / size.sum(1, keepdims=True))
    shares = 1 / (1 + np.exp(-_HARD - 0.7 * normal() - 0.7 * rng.normal(size=(images, 1))))
    lost = loss[0] * np.exp(loss[1] * (normal() - loss[1] / 2))
    gained = 0.6 * loss[0] * rng.exponential(1.0, shares.shape) * (1 - shares)
    made = []
    for right in (shares, np.clip(shares * (1 - lost) + gained, 0, 1)):
        kept = np.floor(size * right)
        confusion = (size - kept)[:, :, None] * rng.dirichlet(np.ones(CLASSES), images)[:, None]
        confusion[:, np.arange(CLASSES), np.arange(CLASSES)] = kept
        made.append(confusion.astype(np.int32))
    return made[0], made[1]


@pytest.mark.parametrize(("groups", "each"), [(50, 1), (100, 1), (500, 1), (15, 10), (40, 5)], ids=str)
@pytest.mark.parametrize("present", [_COMMON, _RARE], ids=["common", "rare"])
def test_intervals_of_95_percent_cover_the_difference_of_all_images(
    groups: int, each: int, present: NDArray[np.float64]
) -> None:
    """At a mild loss, and at a large one that a few images have most of. With the floor, and by Student alone."""
    rng = np.random.default_rng(groups)
    repetitions = 200
    covered = by_student = 0
    for loss in ((0.01, 1.0), (0.03, 1.5)):
        everything = simulated(20_000 // each, each, present, loss, rng)
        true = mean_iou(everything[1]) - mean_iou(everything[0])
        for _ in range(repetitions):
            first, second = simulated(groups, each, present, loss, rng)
            found = iou_difference(first, second, np.repeat(np.arange(groups), each))
            covered += found.low <= true <= found.high
            reach = found.spread.error * student_quantile(Z, found.spread.freedom)
            by_student += abs(found.delta - true) <= reach
    assert covered / (2 * repetitions) >= 0.93
    assert by_student / (2 * repetitions) >= 0.92


def test_the_interval_of_a_networks_own_score_covers_it() -> None:
    rng = np.random.default_rng(0)
    true = mean_iou(simulated(20_000, 1, _RARE, (0.01, 1.0), rng)[0])
    ends = [iou_interval(simulated(100, 1, _RARE, (0.01, 1.0), rng)[0]) for _ in range(200)]
    assert np.mean([low <= true <= high for low, high in ends]) >= 0.93
