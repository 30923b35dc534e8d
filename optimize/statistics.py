"""Intervals and summaries of measurements: pure functions of numbers. Nothing is timed here.

Every interval is two-sided, at 95 % unless stated otherwise. Accuracies and their differences are fractions (0 to 1, −1
to 1).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

#: More images than anybody will evaluate on.
MOST_IMAGES = 10**9


@dataclass(frozen=True)
class PairedDifference(ABC):
    """How much better one model's score is than another's on the same images.

    ``delta`` is the score of the second minus that of the first, ``low`` and ``high`` its interval. ``gained`` counts
    the images that the second answers better, ``lost`` those that the first answers better, ``n`` all images.
    """

    delta: float
    low: float
    high: float
    gained: int
    lost: int
    n: int

    @abstractmethod
    def at(self, confidence: float) -> Self:
        """Return the same difference with its interval at another confidence."""

    @abstractmethod
    def score(self, loss: float) -> float:
        """Compute the statistic against the hypothesis that the second model loses ``loss`` or more.

        It is standard normal if the loss is exactly ``loss``. It is above a normal quantile exactly if the lower end of
        the interval at that quantile is above ``-loss``. It grows with the square root of the number of images.
        """

    @abstractmethod
    def smallest_loss(self, confidence: float) -> float:
        """Return the smallest loss that these images can exclude, if both models answer all of them alike."""

    @abstractmethod
    def images_needed(self, loss: float, confidence: float) -> int | None:
        """Return the fewest such images that exclude a loss, if both models answer all of them alike. None: none do."""


@dataclass(frozen=True)
class ShareDifference(PairedDifference):
    """The difference of two shares of images, such as accuracies, with Tango's interval; see `paired_difference`."""

    def at(self, confidence: float) -> ShareDifference:
        """See `PairedDifference`."""
        return paired_interval(self.gained, self.lost, self.n, confidence)

    def score(self, loss: float) -> float:
        """See `loss_score`."""
        return loss_score(self.gained, self.lost, self.n, loss)

    def smallest_loss(self, confidence: float) -> float:
        """See `smallest_loss`."""
        return smallest_loss(self.n, confidence)

    def images_needed(self, loss: float, confidence: float) -> int | None:
        """See `images_needed`."""
        return images_needed(loss, confidence)


@dataclass(frozen=True)
class Percentiles:
    """The 50th, 95th and 99th percentile, in the unit of the samples."""

    p50: float
    p95: float
    p99: float


@dataclass(frozen=True)
class RatioInterval:
    """The median of per-round ratios and an interval for it.

    ``coverage`` is the probability that the interval contains the true median. It is at least 0.95 from six rounds on.
    Fewer rounds cannot reach that, whatever their values are.
    """

    median: float
    low: float
    high: float
    coverage: float


def paired_difference(
    correct_a: Sequence[bool] | NDArray[np.bool_], correct_b: Sequence[bool] | NDArray[np.bool_]
) -> ShareDifference:
    """Return the accuracy of b minus that of a on the same images, with Tango's score interval.

    Tango, "Equivalence test and confidence interval for the difference in proportions for the paired-sample design",
    Statistics in Medicine 17 (1998), 891–908. Unlike the Wald interval it keeps its coverage when few images change
    sides, and is not empty when none does.

    Args:
        correct_a: Whether each image is classified correctly by the first model, shape ``(n,)``.
        correct_b: The same for the second model, in the same order.

    Raises:
        ValueError: The two are not one-dimensional, differ in length, or are empty.
    """
    a, b = np.asarray(correct_a, dtype=bool), np.asarray(correct_b, dtype=bool)
    if a.ndim != 1 or a.shape != b.shape or a.size == 0:
        raise ValueError(f"paired outcomes must be two equally long, non-empty vectors, got {a.shape} and {b.shape}")
    return paired_interval(int(np.sum(b & ~a)), int(np.sum(a & ~b)), int(a.size))


def paired_interval(gained: int, lost: int, n: int, confidence: float = 0.95) -> ShareDifference:
    """Return the same from counts: of ``n`` images, only the second gets ``gained`` right, only the first ``lost``."""
    low, high = _tango(gained, lost, n, confidence)
    return ShareDifference(delta=(gained - lost) / n, low=low, high=high, gained=gained, lost=lost, n=n)


def images_needed(loss: float, confidence: float = 0.95, *, gained: float = 0.0, lost: float = 0.0) -> int | None:
    """Return the fewest images whose interval excludes a loss, if images change sides at the given rates.

    The search uses the interval itself. If no images change sides, the result is the smallest n with z² / (n + z²) <
    loss.

    Args:
        loss: loss of accuracy, a fraction.
        confidence: confidence of the interval.
        gained: share of the images that only the second model gets right.
        lost: share of the images that only the first model gets right.

    Returns:
        The number. None if no number of images is enough (the loss is real), or a billion is not.
    """

    def excludes(n: int) -> bool:
        return _tango(gained * n, lost * n, n, confidence)[0] > -loss

    enough = 1
    while not excludes(enough):
        enough *= 2
        if enough > MOST_IMAGES:
            return None
    short = enough // 2
    while enough - short > 1:
        middle = (short + enough) // 2
        short, enough = (short, middle) if excludes(middle) else (middle, enough)
    return enough


def smallest_loss(n: int, confidence: float = 0.95) -> float:
    """Return the smallest loss of accuracy that n images can exclude, if both models answer all images alike."""
    return -_tango(0, 0, n, confidence)[0]


def loss_score(gained: float, lost: float, n: int, loss: float) -> float:
    """Compute Tango's score statistic against the hypothesis that the second model loses ``loss`` or more.

    It is above a normal quantile exactly if the lower end of `paired_interval` at that quantile is above ``-loss``.

    Args:
        gained: images that only the second model gets right.
        lost: images that only the first model gets right.
        n: all images.
        loss: loss of accuracy, a fraction, from 0.

    Returns:
        The statistic, standard normal if the loss is exactly ``loss``. A higher value is stronger evidence that the
            loss is smaller. At constant rates of gained and lost images it grows with the square root of ``n``.
    """
    distance = gained - lost + n * loss
    variance = n * _paired_variance(-loss, gained, lost, n)
    if variance == 0.0:
        return math.copysign(math.inf, distance) if distance else 0.0
    return distance / math.sqrt(variance)


def holm(p_values: Sequence[float], error: float, each: float) -> list[tuple[bool, float]]:
    """Test several hypotheses together. The chance of rejecting any true one is at most ``error``.

    Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics 6 (1979), 65-70.
    The smallest p-value is compared with ``error`` divided by the number of hypotheses. The next one is compared with
    ``error`` divided by the number that is left, and so on until one is not small enough. This holds for any dependence
    between the p-values.

    Args:
        p_values: one for each hypothesis.
        error: the chance for all together.
        each: the highest level for any single hypothesis, however few are left.

    Returns:
        For each hypothesis whether it is rejected, and the level of its last comparison.
    """
    found = [(False, 0.0)] * len(p_values)
    level, rejecting = 0.0, True
    for done, place in enumerate(sorted(range(len(p_values)), key=lambda place: p_values[place])):
        if rejecting:
            level = min(each, error / (len(p_values) - done))
            rejecting = p_values[place] < level
        found[place] = rejecting, level
    return found


def wilson_interval(part: float, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return the interval of a fraction from n observations, such as an accuracy.

    Args:
        part: the fraction, 0 to 1.
        n: the number of observations, from 1.
        confidence: confidence of the interval.

    Returns:
        Its ends. Source: Wilson 1927, "Probable inference, the law of succession, and statistical inference".
    """
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    centre = (part + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(part * (1 - part) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    # At 0 and 1 one end equals the fraction, apart from rounding. The interval always contains the fraction.
    return max(0.0, min(part, centre - half)), min(1.0, max(part, centre + half))


def _tango(gained: float, lost: float, n: int, confidence: float) -> tuple[float, float]:
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    delta = (gained - lost) / n

    def outside(candidate: float) -> bool:
        # |T(Δ)| > z without the division: the variance is 0 at ±1, and at 0 when no image changed sides.
        distance = gained - lost - n * candidate
        return distance * distance > z * z * n * _paired_variance(candidate, gained, lost, n)

    return _border(outside, inside=delta, limit=-1.0), _border(outside, inside=delta, limit=1.0)


def _paired_variance(delta: float, gained: float, lost: float, n: int) -> float:
    """Return the variance of n (accuracy b − accuracy a), divided by n, if the true difference were ``delta``.

    Source: Tango 1998. q21 maximises the likelihood of "only a is right" under q12 = q21 + Δ. Its score equation
    b/(q+Δ) + c/q − 2(n−b−c)/(1−2q−Δ) = 0 is the quadratic A q² + B q + C = 0 below (b gained, c lost).
    """
    a = 2.0 * n
    b = -gained - lost + (2 * n - gained + lost) * delta
    c = -lost * delta * (1 - delta)
    root = math.sqrt(max(b * b - 4 * a * c, 0.0))
    q21 = (root - b) / (2 * a)
    return max(2 * q21 + delta * (1 - delta), 0.0)


def _border(outside: Callable[[float], bool], *, inside: float, limit: float) -> float:
    """Find the place between ``inside`` and ``limit`` where ``outside`` becomes true, by bisection to the last bit."""
    if not outside(limit):
        return limit
    near, far = inside, limit
    while True:
        middle = near + (far - near) / 2
        if middle in (near, far):
            return near
        if outside(middle):
            far = middle
        else:
            near = middle


def percentile_summary(samples: ArrayLike) -> Percentiles:
    """Return the median, 95th and 99th percentile, interpolated linearly between order statistics.

    Raises:
        ValueError: There are no samples, or one is not finite.
    """
    values = _finite(samples, "samples")
    p50, p95, p99 = (float(p) for p in np.percentile(values, [50, 95, 99]))
    return Percentiles(p50, p95, p99)


def ratio_interval(a_rounds: ArrayLike, b_rounds: ArrayLike) -> RatioInterval:
    """Return how many times as large a is as b: the median over rounds of a/b, and its interval.

    Rounds are paired (both values were measured within the same short time), so that a slow round affects both and
    cancels. The interval lies between two order statistics and assumes nothing about the distribution: see Conover,
    Practical Nonparametric Statistics (3rd ed., 1999, section 3.2). For an even number of rounds the median is the
    geometric mean of the middle two, so that swapping a and b inverts the result exactly.

    Args:
        a_rounds: One positive number per round, such as the parent's median latency in ms.
        b_rounds: The same of the other side, in the same order.

    Raises:
        ValueError: The two differ in length or are empty, or a number is not positive and finite.
    """
    a, b = _finite(a_rounds, "a_rounds"), _finite(b_rounds, "b_rounds")
    if a.shape != b.shape or a.min() <= 0 or b.min() <= 0:
        raise ValueError(f"ratios need two equally long vectors of positive numbers, got {a.shape} and {b.shape}")
    ratios = np.sort(a / b)
    n = int(ratios.size)
    middle = ratios[(n - 1) // 2], ratios[n // 2]
    rank = _median_rank(n)
    tail = sum(math.comb(n, k) for k in range(rank)) / 2**n
    return RatioInterval(
        median=float(middle[0]) if n % 2 else math.sqrt(float(middle[0]) * float(middle[1])),
        low=float(ratios[rank - 1]),
        high=float(ratios[n - rank]),
        coverage=1 - 2 * tail,
    )


#: The count of numbers from which the interval between order statistics reaches 95 %.
ENOUGH = 6

#: The 97.5th percentile of Student's distribution by degrees of freedom, from 1.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def student_ratio(a: ArrayLike, b: ArrayLike) -> RatioInterval:
    """Return how many times as large a is as b: the geometric mean of a/b, and its 95 % interval (Student).

    For a few numbers, each the median of a process. The interval is that of the mean of their logarithms, with the
    error estimated from their spread.

    Args:
        a: One positive number per process, 2 to 11.
        b: The same of the other side, in the same order.

    Raises:
        ValueError: The two differ in length, are too few or too many, or a number is not positive and finite.
    """
    first, second = _finite(a, "a"), _finite(b, "b")
    if first.shape != second.shape or first.min() <= 0 or second.min() <= 0:
        raise ValueError(f"ratios need two equally long vectors of positive numbers, got {first.shape}, {second.shape}")
    if not 2 <= first.size <= len(_STUDENT) + 1:
        raise ValueError(f"2 to {len(_STUDENT) + 1} numbers are needed, got {first.size}")
    logarithms = np.log(first / second)
    mean = float(logarithms.mean())
    half = _STUDENT[first.size - 2] * float(logarithms.std(ddof=1)) / math.sqrt(first.size)
    return RatioInterval(median=math.exp(mean), low=math.exp(mean - half), high=math.exp(mean + half), coverage=0.95)


def _median_rank(n: int) -> int:
    """Return the largest rank r for which [r-th smallest, r-th largest] contains the median with 95 %, at least 1.

    The number of samples below the median is binomial(n, ½), so the interval misses with probability 2·P(X < r).
    """
    rank, cumulative = 0, 0
    while 40 * (cumulative := cumulative + math.comb(n, rank)) <= 2**n:  # one tail: 1/40, in exact integers
        rank += 1
    return max(rank, 1)


def sqnr_db(reference: ArrayLike, other: ArrayLike) -> float | None:
    """Return the signal to quantization-noise ratio in dB: 10 log10(Σ reference² / Σ (reference − other)²).

    Higher is closer. Each bit of a uniform quantizer is worth about 6 dB (Bennett, "Spectra of quantized signals", Bell
    System Technical Journal 27 (1948), 446–472).

    Returns:
        The ratio. None if the two are equal to the last bit (an infinite ratio, which JSON cannot hold).

    Raises:
        ValueError: The shapes differ, a value is not finite, or the reference is zero everywhere but the other is not.
    """
    r, o = _finite(reference, "reference", vector=False), _finite(other, "other", vector=False)
    if r.shape != o.shape:
        raise ValueError(f"SQNR compares arrays of one shape, got {r.shape} and {o.shape}")
    noise = float(np.sum((r - o) ** 2))
    if noise == 0.0:
        return None
    signal = float(np.sum(r**2))
    if signal == 0.0:
        raise ValueError("the reference is zero everywhere, so that its SQNR is undefined")
    return 10 * math.log10(signal / noise)


def _finite(values: Any, name: str, *, vector: bool = True) -> NDArray[np.float64]:
    """Return ``values`` as float64 (the squares of float16 would overflow). Raises a precise error for bad values."""
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0 or (vector and array.ndim != 1):
        raise ValueError(f"{name}: a non-empty {'vector' if vector else 'array'} is needed, got shape {array.shape}")
    bad = int(np.sum(~np.isfinite(array)))
    if bad:
        raise ValueError(f"{name}: {bad} of {array.size} values are not finite")
    return array
