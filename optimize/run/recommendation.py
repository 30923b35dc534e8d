"""Which pair to deploy: one rule that the user chooses, in a sentence, and why each other one was not chosen."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import ConfigDict, Field

from optimize.measure.figures import LEVEL, Measured
from optimize.measure.latency import Speed, falls_behind, level
from optimize.measure.rows import Pair, Recommendation, Row
from optimize.measure.statistics import (
    PairedDifference,
    images_needed,
    smallest_loss,
    wilson_interval,
)
from optimize.run.halves import Judge, Right, images_to_split
from serve.config import Config

Objective = Literal["latency", "p95", "throughput", "size"]

#: A p95 of more than so many p50s is a long tail, if it is also so many times that of the others.
_LONG_TAIL = 2.0


class Recommend(Config):
    """How the recommended artifact is chosen."""

    model_config = ConfigDict(title="")  # in messages, its settings are the command line's

    objective: Objective = Field(
        default="latency",
        description="what must be best: the median latency of one image, its 95th percentile, the throughput at the "
        "best batch size, or the file's size",
    )
    max_drop: float = Field(
        default=0.02,
        ge=0,
        le=1,
        description="largest loss of top-1, as a fraction, that the interval must exclude",
    )
    # Above it, half of what is left is lost in a double, and the interval has no end.
    confidence: float = Field(default=0.95, ge=0.5, le=1 - 1e-9, description="of that interval")


@dataclass(frozen=True)
class _Goal:
    """An objective: the words for it, and what each round of a contestant cost, lower being better."""

    best: str
    worse: str
    tie: str
    costs: Callable[[_Candidate], list[float]]


@dataclass(frozen=True)
class _Candidate:
    """A measured pair, its times, and its difference to the baseline at the rule's confidence."""

    row: Row
    pair: Pair
    measured: Measured
    speed: Speed
    difference: PairedDifference

    @property
    def id(self) -> str:
        return self.pair.id

    @property
    def bytes(self) -> int:
        return self.row.file.bytes if self.row.file else 0


_GOALS: dict[Objective, _Goal] = {
    "latency": _Goal("the fastest at batch 1", "latency", "the smallest file", lambda c: c.speed.medians()),
    "p95": _Goal("the lowest p95 at batch 1", "p95", "the smallest file", lambda c: c.speed.tails()),
    "throughput": _Goal(
        "the highest throughput",
        "time per image",
        "the smallest file",
        lambda c: c.speed.per_image(c.measured.best_batch),
    ),
    "size": _Goal("the smallest file", "size", "the fastest", lambda c: [float(c.bytes)]),
}


def recommend(
    rows: Sequence[Row],
    speeds: Mapping[str, Speed],
    by: Recommend,
    right: Right | None = None,
    *,
    classes: int | None = None,
) -> Recommendation:
    """Choose among the measured pairs of all rows.

    Args:
        rows: artifacts of the report, the baseline first.
        speeds: the times of their pairs by id, from one measurement in turns.
        by: the user's rule.
        right: what each measured pair answers correctly. Where there are enough images, half of them choose and the
            others judge; without it all of them choose.
        classes: that an image may be of; None: not told, and then a baseline that guesses is not noticed.
    """
    rule = _rule(by)
    rejected = {row.name: str(row.skip) for row in rows if row.skip is not None}
    rejected |= {pair.id: str(pair.skip) for row in rows if not row.skip for pair in row.pairs if pair.skip}
    measured = [(row, pair, pair.measured) for row in rows for pair in row.pairs if pair.measured is not None]
    if not measured:
        return Recommendation(name=None, rule=rule, rejected=rejected)
    judge = Judge.of(measured[0][1].id, measured[0][2].accuracy.images, right, by.max_drop, by.confidence)
    candidates = [
        _Candidate(*found, speeds[found[1].id], judge.chooses(found[1].id, found[2].accuracy)) for found in measured
    ]
    baseline = candidates[0]
    proven = [c for c in candidates if c.difference.low > -by.max_drop or _is_baseline(c, baseline, by)]
    for candidate in candidates:
        if candidate not in proven:
            rejected[candidate.id] = _unproven(candidate, by)
    chosen, reasons = _best(proven, by)
    remarks, unproven = _doubts(chosen, candidates, by)
    remarks += _guesses(baseline, classes)
    if chosen.measured.speedup.slower:
        remarks.append(
            f"{chosen.id} is not faster than the fastest float execution: at batch 1 it has "
            f"{chosen.measured.speedup.value:.2f} times its speed."
        )
    remarks += _tail(chosen, candidates, proven, by)
    return Recommendation(
        name=chosen.row.name,
        pair=chosen.id,
        execution=chosen.pair.execution,
        rule=rule,
        rejected=rejected | reasons,
        unproven=unproven,
        remarks=tuple(remarks),
        selection=_selection(len(candidates), judge, chosen, by),
        judged=judge.judges(chosen.id),
    )


def _is_baseline(candidate: _Candidate, baseline: _Candidate, by: Recommend) -> bool:
    """The baseline is what the others are held against: it is allowed unproven, as whatever engine runs it."""
    return candidate is baseline or (candidate.row is baseline.row and candidate.difference.delta > -by.max_drop)


def _selection(candidates: int, judge: Judge, chosen: _Candidate, by: Recommend) -> str | None:
    """By what the choice was made; None where there was none."""
    if candidates < 2:
        return None
    if judge.halves is not None:
        choose, judged = judge.halves
        return (
            f"It was chosen among {candidates} pairs by {len(choose):,} of the images, drawn at random; the accuracy "
            f"beside it is that on the other {len(judged):,}, which had no part in that. Its speed is that of the "
            "rounds that it was chosen by; that flatters it."
        )
    enough = images_to_split(by.max_drop, by.confidence)
    more = f" From {enough:,} images on, half of them choose and the others judge." if enough else ""
    return (
        f"It is the best of {candidates} pairs on the same {chosen.difference.n:,} images and rounds that are "
        f"reported; that flatters it.{more}"
    )


def _rule(by: Recommend) -> str:
    goal = _GOALS[by.objective]
    return (
        f"among the pairs of artifact and execution whose top-1 is, with {by.confidence * 100:g} % confidence, less "
        f"than {by.max_drop * 100:g} points below the baseline's, those that are level with {goal.best} (within "
        f"{(1 - LEVEL) * 100:.0f} %); of these the one whose interval of top-1 begins highest, and of equals {goal.tie}"
    )


def _best(candidates: Sequence[_Candidate], by: Recommend) -> tuple[_Candidate, dict[str, str]]:
    """The best by the objective, and why not each of the others."""
    goal = _GOALS[by.objective]
    first = min(candidates, key=lambda c: statistics.median(goal.costs(c)))
    reasons: dict[str, str] = {}
    equals = []
    for candidate in candidates:
        ratio = level(goal.costs(first), goal.costs(candidate))
        if candidate is first or not falls_behind(ratio):
            equals.append(candidate)
        else:
            reasons[candidate.id] = f"{1 / ratio.value:.2f} times the {goal.worse} of {first.id}"

    def tie(candidate: _Candidate) -> float:
        return candidate.measured.latency_ms.p50 if by.objective == "size" else candidate.bytes

    chosen = min(equals, key=lambda c: (-c.difference.low, tie(c)))
    for candidate in equals:
        if candidate is not chosen:
            behind = (chosen.difference.low - candidate.difference.low) * 100
            last = "slower" if by.objective == "size" else "a larger file"
            why = f"its interval of top-1 begins {behind:.2f} points lower" if behind > 0 else last
            as_good = "as small" if by.objective == "size" else "as fast"
            reasons[candidate.id] = f"{as_good} as {chosen.id}, and {why}"
    return chosen, reasons


def _unproven(candidate: _Candidate, by: Recommend) -> str:
    """Why a pair is not shown to be accurate enough, and how many images would show it."""
    found = candidate.difference
    reason = f"its top-1 may be {-found.low * 100:.1f} points below the baseline's"
    if found.delta <= -by.max_drop:
        return f"{reason} (measured: {-found.delta * 100:.1f})"
    needed = images_needed(by.max_drop, by.confidence, gained=found.gained / found.n, lost=found.lost / found.n)
    would = f"; if it goes on so, {needed:,} images would show that it loses less" if needed else ""
    return f"{reason} (measured on {found.n:,} images: {abs(found.delta) * 100:.1f} {_side(found.delta)}{would})"


def _side(delta: float) -> str:
    return "points better" if delta > 0 else "points"


def _doubts(chosen: _Candidate, candidates: Sequence[_Candidate], by: Recommend) -> tuple[list[str], str | None]:
    """What more images might change: the remarks, and the pair that would then be chosen."""
    plausible = [c for c in candidates if c is chosen or c.difference.delta > -by.max_drop]
    best, _ = _best(plausible, by)
    goal = _GOALS[by.objective]
    ratio = level(goal.costs(chosen), goal.costs(best))
    gain = 1 / ratio.value if by.objective == "size" else ratio.value
    # One that is merely level is no reason for more images.
    unproven = best if best is not chosen and ratio.value > 1 / LEVEL else None
    remarks = []
    images, needed = chosen.difference.n, images_needed(by.max_drop, by.confidence)
    if needed is None or images < needed:
        would = f", {needed:,} would" if needed else ""
        remarks.append(
            f"{images:,} images cannot show a loss below {by.max_drop * 100:g} points{would}: even an artifact that "
            f"answers every one of them alike may lose {smallest_loss(images, by.confidence) * 100:.1f}. Evaluate on "
            "more images, or allow a larger max_drop."
        )
    if unproven is not None:
        better = f"{gain:.2f} times the size" if by.objective == "size" else f"{gain:.2f} times as fast"
        remarks.append(f"Unproven best: {unproven.id} ({better}); {_unproven(unproven, by)}.")
    return remarks, unproven.id if unproven else None


def _guesses(baseline: _Candidate, classes: int | None) -> list[str]:
    """Says so if the baseline is not shown to know more than one who guesses: then equal answers are no merit."""
    accuracy = baseline.measured.accuracy
    if classes is None or wilson_interval(accuracy.top1, accuracy.images)[0] > 1 / classes:
        return []
    return [
        f"The baseline's top-1 of {accuracy.top1 * 100:.2f} % on {accuracy.images:,} images is not above what guessing "
        f"among {classes:,} classes gives ({100 / classes:.2f} %): differences of accuracy say nothing here. Bring a "
        "checkpoint, or train longer (baseline: {epochs: …} in a recipe)."
    ]


def _tail(
    chosen: _Candidate, candidates: Sequence[_Candidate], proven: Sequence[_Candidate], by: Recommend
) -> list[str]:
    """Says so if the chosen one's slow answers are much slower than its usual ones, and the others' are not."""

    def ratio(candidate: _Candidate) -> float:
        return candidate.measured.latency_ms.p95 / candidate.measured.latency_ms.p50

    others = [ratio(candidate) for candidate in candidates if candidate is not chosen]
    if by.objective == "p95" or not others:
        return []
    usual = statistics.median(others)
    if ratio(chosen) < _LONG_TAIL or ratio(chosen) < _LONG_TAIL * usual:
        return []
    steady, _ = _best(proven, by.model_copy(update={"objective": "p95"}))
    latency = chosen.measured.latency_ms
    instead = f" would choose {steady.id}" if steady is not chosen else " would choose it too"
    return [
        f"One answer in twenty of {chosen.id} takes {latency.p95:.2f} ms or more, {ratio(chosen):.1f} times its p50 "
        f"of {latency.p50:.2f} (others: {usual:.1f} times). Where that matters, objective: p95{instead}."
    ]
