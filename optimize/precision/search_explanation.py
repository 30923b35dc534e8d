"""Explains in sentences why a search returned its result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from optimize.measure.figures import Measured, Ratio
from optimize.measure.rows import Pair, Row
from optimize.precision.precision_records import Found
from optimize.report.number_format import number, points
from optimize.run.recommendation.accuracy_drop import within
from serve.runtime.errors import listed

#: The explanation of 16 bits, wherever they are offered.
SIXTEEN = (
    "16 bits are FP16 weights, and arithmetic in executions that have it; the engines for x86 CPUs here (ONNX Runtime, "
    "and OpenVINO kept to FP32) cast such a layer back and compute it in FP32: there only the file becomes smaller."
)
_NAMED = 6


@dataclass(frozen=True)
class Choice:
    """The choice from the last measurement, and the rejected pairs.

    Attributes:
        float_name: the fastest float execution, a pair or a reference.
        float_p50: its latency in ms.
        float_is_pair: whether it is a pair, which can be packed and served.
        refused: pairs that do not keep the budget, by id, and why.
        beaten: int8 pairs that keep it and are slower than that execution, with their relative speed.
        row: the chosen pair's artifact. None: no trial meets the budget.
        pair: the chosen pair.
        measured: its measurement.
        quickest: if nothing was chosen, the lowest latency of all, in ms, and its pair.
    """

    float_name: str
    float_p50: float
    float_is_pair: bool = True
    refused: Mapping[str, str] = field(default_factory=dict)
    beaten: Mapping[str, Ratio] = field(default_factory=dict)
    row: Row | None = None
    pair: Pair | None = None
    measured: Measured | None = None
    quickest: tuple[float, str] | None = None

    @property
    def p50(self) -> float | None:
        """The chosen pair's latency in ms."""
        return self.measured.latency_ms.p50 if self.measured else None

    @property
    def is_float(self) -> bool:
        """Whether the choice has no integers."""
        return self.row is not None and self.row.file is not None and self.row.file.is_float


def why(found: Found, choice: Choice, remarks: Sequence[str]) -> tuple[str, ...]:
    """Return the explanation of a choice."""
    said = [_trials(found), *remarks]
    if choice.pair is None or choice.measured is None:
        said.append(_nothing(found, choice))
    elif choice.is_float:
        said += _lost(found, choice)
    else:
        said += [_chosen(choice), _left(found)]
        said += [f"{name} was refused: it {reason}." for name, reason in list(choice.refused.items())[:_NAMED]]
    said += _judged(found)
    if 16 in found.budget.bits:
        said.append(SIXTEEN)
    return tuple(sentence for sentence in said if sentence)


def _trials(found: Found) -> str:
    held, tried = sum(trial.holds for trial in found.trials), len(found.trials)
    return (
        f"{tried} {'trial' if tried == 1 else 'trials'} of {found.layers} layers ({found.method}), judged by "
        f"{found.chose:,} of the evaluation images; {found.metric} within "
        f"{found.budget.max_drop * 100:g} points in {held}."
    )


def _chosen(choice: Choice) -> str:
    assert choice.pair is not None
    assert choice.measured is not None
    ratio = choice.measured.speedup
    sure = "" if ratio.low >= 1 else f" (the interval, from {ratio.low:.2f}, does not exclude that it is slower)"
    return (
        f"{choice.pair.id} is the fastest that keeps the budget: {number(choice.p50, 'ms')}, {ratio.value:.2f} times "
        f"as fast as the fastest float execution, {choice.float_name} ({number(choice.float_p50, 'ms')}){sure}."
    )


def _left(found: Found) -> str:
    counts = Counter(found.bits.values())
    if counts[8] == found.layers:
        return "Every layer is int8: nothing had to stay in float."
    others = [name for name, bits in found.bits.items() if bits != 8]
    return (
        f"{counts[8]} of {found.layers} layers are int8; not so {listed(others, _NAMED)}: with them in int8 "
        "it lost too much, or nothing was won."
    )


def _lost(found: Found, choice: Choice) -> list[str]:
    """Return the reasons why a float pair was chosen."""
    assert choice.pair is not None
    said = []
    if choice.beaten:
        name, ratio = max(choice.beaten.items(), key=lambda entry: entry[1].value)
        said.append(
            f"INT8 loses here: {name}, the fastest that keeps the budget of accuracy, has {ratio.value:.2f} times the "
            f"speed of the fastest float execution, {choice.float_name} ({number(choice.float_p50, 'ms')})."
        )
    elif not any(trial.holds for trial in found.trials):
        said.append("No trial keeps the budget of accuracy with a layer in int8.")
    else:
        said.append("No pair with a layer in int8 keeps the budget and is at least as fast as the float ones.")
    said.append(f"{choice.pair.id} is returned, the fastest float pair: {number(choice.p50, 'ms')}.")
    if not choice.float_is_pair:
        said.append(f"{choice.float_name} is faster and a reference only: it cannot be packed or served.")
    return said


def _nothing(found: Found, choice: Choice) -> str:
    limit = found.budget.max_latency_ms
    assert choice.quickest is not None
    quickest, name = choice.quickest
    return (
        f"Nothing keeps the budget of {found.budget.max_drop * 100:g} points and {number(limit, 'ms')}: the lowest "
        f"latency is that of {name}, {number(quickest, 'ms')}, which {choice.refused[name]}."
    )


def _judged(found: Found) -> list[str]:
    if found.judged is None or found.judged.difference is None:
        return []
    difference, limit = found.judged.difference, found.budget.max_drop
    if difference.low > -limit:
        verdict = "the interval excludes a loss beyond the budget"
    elif within(difference.delta, limit):
        verdict = "within the budget, which the interval does not prove"
    else:
        verdict = "MORE than the budget: it was kept on the images that chose, and is not on these"
    return [
        f"On the other {found.judged.images:,} images, which had no part in the choice, {found.metric} is "
        f"{found.judged.score * 100:.2f} %, {points(difference.delta)} points from the baseline's "
        f"({points(difference.low)} to {points(difference.high)}): {verdict}."
    ]
