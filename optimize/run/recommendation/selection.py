"""Chooses the pair to deploy by the user's rule, and explains the choice."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from optimize.measure.figures import LEVEL, Measured
from optimize.measure.latency import Speed, falls_behind, level, typical
from optimize.measure.rows import Pair, Proof, Recommendation, Row
from optimize.report.number_format import number, percent, points, times
from optimize.run.recommendation.missing_graph import missing_graph
from optimize.run.recommendation.non_inferiority import Tested, first_level, most_of_one, prove
from optimize.run.recommendation.rule import Objective, Recommend
from optimize.statistics import PairedDifference
from optimize.tasks.base import Task

#: A tail is long if p95 is at least this many p50s, and this many times the usual ratio of the others.
_LONG_TAIL = 2.0


@dataclass(frozen=True)
class _Goal:
    """An objective: its words, and the costs of a contestant's rounds, where lower is better.

    ``costs_of`` returns the same costs of a reference, and ``better`` are the words for how much better a reference is.
    For the size they are absent, because a reference has no known size.
    """

    best: str
    worse: str
    tie: str
    costs: Callable[[_Candidate], list[float]]
    better: str = ""
    costs_of: Callable[[Speed], list[float]] | None = None

    def worse_than(self, other: _Candidate, candidate: _Candidate) -> bool:
        """Return whether the candidate is clearly worse than the other."""
        return falls_behind(level(self.costs(other), self.costs(candidate)))


@dataclass(frozen=True)
class _Candidate:
    """A measured pair, its times, and its difference to the baseline at the rule's confidence, on all images.

    ``metric`` is the title of the score.
    """

    row: Row
    pair: Pair
    measured: Measured
    speed: Speed
    difference: PairedDifference
    metric: str

    @property
    def id(self) -> str:
        return self.pair.id

    @property
    def bytes(self) -> int:
        return self.row.file.bytes if self.row.file else 0


def _per_image(speed: Speed) -> list[float]:
    """Return the time per image of each round, at the batch size with the shortest time."""
    return min(map(speed.per_image, speed.rounds), key=statistics.median)


_GOALS: dict[Objective, _Goal] = {
    "latency": _Goal(
        "the fastest at batch 1",
        "latency",
        "the smallest file",
        lambda c: c.speed.medians(),
        "as fast as",
        Speed.medians,
    ),
    "p95": _Goal(
        "the lowest p95 at batch 1",
        "p95",
        "the smallest file",
        lambda c: c.speed.tails(),
        "as fast at p95 as",
        Speed.tails,
    ),
    "throughput": _Goal(
        "the highest throughput",
        "time per image",
        "the smallest file",
        lambda c: c.speed.per_image(c.measured.best_batch),
        "the throughput of",
        _per_image,
    ),
    "size": _Goal("the smallest file", "size", "the fastest", lambda c: [float(c.bytes)]),
}


def recommend(
    rows: Sequence[Row],
    speeds: Mapping[str, Speed],
    by: Recommend,
    task: Task,
    *,
    differences: Mapping[str, PairedDifference],
    classes: int | None = None,
) -> Recommendation:
    """Choose among the measured pairs of all rows.

    Args:
        rows: artifacts of the report, the baseline first.
        speeds: the times of their pairs by id, and of references by name, from one measurement in turns.
        by: the user's rule.
        task: what the network is for.
        differences: the differences of the measured pairs' scores to that of the first pair, by id, its own included.
        classes: the number of classes. None: unknown, and a baseline that only guesses is not noticed.
    """
    rule = _rule(by, task)
    rejected = {row.name: str(row.skip) for row in rows if row.skip is not None}
    rejected |= {pair.id: str(pair.skip) for row in rows if not row.skip for pair in row.pairs if pair.skip}
    measured = [(row, pair, pair.measured) for row in rows for pair in row.pairs if pair.measured is not None]
    if not measured:
        return Recommendation(name=None, rule=rule, rejected=rejected)
    candidates = [
        _Candidate(row, pair, found, speeds[pair.id], differences[pair.id].at(by.confidence), task.metric.title)
        for row, pair, found in measured
    ]
    baseline, goal = candidates[0], _GOALS[by.objective]
    # A pair that is clearly worse than the baseline, which needs no proof, is never chosen. So it takes no share of the
    # error. This is valid because its costs do not depend on its accuracy.
    able = [c for c in candidates if c is baseline or not goal.worse_than(baseline, c)]
    tested = prove({c.id: c.difference for c in able if c.row is not baseline.row}, by.max_drop, by.confidence)
    proven = [c for c in able if _is_baseline(c, baseline, by) or (c.id in tested and tested[c.id].proven)]
    chosen, reasons = _best(proven, by, [c for c in candidates if c not in able])
    for candidate in able:
        if candidate not in proven:
            rejected[candidate.id] = _unproven(candidate, tested, by)
    remarks, unproven = _doubts(chosen, able, tested, by)
    remarks += _guesses(baseline, task, classes)
    remarks += _beyond_the_limit(chosen, baseline, by)
    if chosen.measured.speedup.slower:
        remarks.append(
            f"{chosen.id} is not faster than the fastest float execution: at batch 1 it has "
            f"{_times(chosen.measured.speedup.value)} times its speed."
        )
    if goal.costs_of is not None:
        remarks += missing_graph(
            chosen.id, goal.costs(chosen), rows, speeds, costs_of=goal.costs_of, better=goal.better
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
        selection=_selection(len(candidates), tested, chosen, by),
        proof=_proof(tested, chosen),
    )


def _is_baseline(candidate: _Candidate, baseline: _Candidate, by: Recommend) -> bool:
    """Return whether a candidate is the baseline, which needs no proof, whatever engine runs it."""
    return candidate is baseline or (candidate.row is baseline.row and candidate.difference.delta > -by.max_drop)


def _proof(tested: Mapping[str, Tested], chosen: _Candidate) -> Proof | None:
    found = tested.get(chosen.id)
    return Proof(tested=len(tested), level=found.level, low=found.low) if found else None


def _selection(candidates: int, tested: Mapping[str, Tested], chosen: _Candidate, by: Recommend) -> str | None:
    """Say how the choice was made. None if there was only one pair."""
    if candidates < 2:
        return None
    said = (
        f"It is the best of {candidates} pairs on the same {chosen.difference.n:,} images and rounds that are "
        "reported, so its figures are slightly too good."
    )
    if not tested:
        return said
    error = min(1 - by.confidence, len(tested) * most_of_one(by.confidence)) * 100
    pairs = "1 pair was tested" if len(tested) == 1 else f"{len(tested)} pairs were tested together"
    said += (
        f" {pairs} for accuracy: the chance that one passes which loses {by.max_drop * 100:g} points or more is at "
        f"most {error:.3g} % (Holm 1979)."
    )
    if (found := tested.get(chosen.id)) is None:
        return said
    return (
        f"{said} {chosen.id} passed: its lower bound is {points(found.low)} points at the one-sided level of its test, "
        f"{found.level * 100:.2g} %."
    )


def _rule(by: Recommend, task: Task) -> str:
    goal, metric = _GOALS[by.objective], task.metric.title
    return (
        f"among the pairs of artifact and execution whose {metric} is, with {by.confidence * 100:g} % confidence "
        f"for all of them together, less than {by.max_drop * 100:g} points below the baseline's, those that are level "
        f"with {goal.best} (within {(1 - LEVEL) * 100:.0f} %); of these the one whose interval of {metric} begins "
        f"highest, and of equals {goal.tie}"
    )


def _best(
    candidates: Sequence[_Candidate], by: Recommend, others: Sequence[_Candidate] = ()
) -> tuple[_Candidate, dict[str, str]]:
    """Return the best by the objective, and the reason against each other. ``others`` cannot be chosen."""
    goal = _GOALS[by.objective]
    first = min(candidates, key=lambda c: typical(goal.costs(c)))
    reasons: dict[str, str] = {}
    equals = []
    able = {candidate.id for candidate in candidates}
    for candidate in (*candidates, *others):
        ratio = level(goal.costs(first), goal.costs(candidate))
        if candidate is first or (candidate.id in able and not falls_behind(ratio)):
            equals.append(candidate)
        else:
            reasons[candidate.id] = f"{_times(1 / ratio.value)} times the {goal.worse} of {first.id}"

    def tie(candidate: _Candidate) -> float:
        return candidate.measured.latency_ms.p50 if by.objective == "size" else candidate.bytes

    chosen = min(equals, key=lambda c: (-c.difference.low, tie(c)))
    for candidate in equals:
        if candidate is not chosen:
            behind = chosen.difference.low - candidate.difference.low
            last = "slower" if by.objective == "size" else "a larger file"
            why = f"its interval of {chosen.metric} begins {percent(behind)} points lower" if behind > 0 else last
            as_good = "as small" if by.objective == "size" else "as fast"
            reasons[candidate.id] = f"{as_good} as {chosen.id}, and {why}"
    return chosen, reasons


def _unproven(candidate: _Candidate, tested: Mapping[str, Tested], by: Recommend) -> str:
    """Say why a pair is not shown to be accurate enough, and how many images would show it."""
    found, test = candidate.difference, tested.get(candidate.id)
    reason = f"its {candidate.metric} may be {percent(-(test.low if test else found.low))} points below the baseline's"
    if found.delta <= -by.max_drop:
        return f"{reason} (measured: {percent(-found.delta)}{_share(test, tested, by)})"
    would = f"; at this rate, {test.images:,} images would show that it loses less" if test and test.images else ""
    return (
        f"{reason} (measured on {found.n:,} images: {percent(abs(found.delta))} {_side(found.delta)}"
        f"{_share(test, tested, by)}{would})"
    )


def _share(test: Tested | None, tested: Mapping[str, Tested], by: Recommend) -> str:
    """Say so if a bound is not an end of the interval at the rule's confidence."""
    if test is None or test.level >= most_of_one(by.confidence):
        return ""
    return f"; {len(tested)} pairs are tested together, this one at {test.level * 100:.2g} %"


def _side(delta: float) -> str:
    return "points better" if delta > 0 else "points"


def _times(ratio: float) -> str:
    """Format a ratio as in the table, without its sign."""
    return times(ratio).removesuffix("×")


def _doubts(
    chosen: _Candidate, candidates: Sequence[_Candidate], tested: Mapping[str, Tested], by: Recommend
) -> tuple[list[str], str | None]:
    """Return remarks about what more images might change, and the pair that would then be chosen."""
    plausible = [c for c in candidates if c is chosen or c.difference.delta > -by.max_drop]
    best, _ = _best(plausible, by)
    goal = _GOALS[by.objective]
    ratio = level(goal.costs(chosen), goal.costs(best))
    gain = 1 / ratio.value if by.objective == "size" else ratio.value
    # A pair that is only as good is no reason for more images.
    unproven = best if best is not chosen and ratio.value > 1 / LEVEL else None
    remarks = _too_few(chosen.difference, len(tested), by)
    if unproven is not None:
        better = f"{_times(gain)} times the size" if by.objective == "size" else f"{_times(gain)} times as fast"
        remarks.append(f"Unproven best: {unproven.id} ({better}); {_unproven(unproven, tested, by)}.")
    return remarks, unproven.id if unproven else None


def _too_few(difference: PairedDifference, tested: int, by: Recommend) -> list[str]:
    """Say so if there are too few images to prove even pairs that always answer as the baseline does."""
    if not tested:
        return []
    confidence = 1 - 2 * first_level(tested, by.confidence)
    needed = difference.images_needed(by.max_drop, confidence)
    if needed is not None and difference.n >= needed:
        return []
    of = f" of any of {tested} pairs" if tested > 2 else ""
    would = f", {needed:,} would" if needed else ""
    fewer = ", measure fewer pairs" if tested > 2 else ""
    return [
        f"{difference.n:,} images cannot show a loss below {by.max_drop * 100:g} points{of}{would}: even an artifact "
        f"that answers every one of them alike may lose {percent(difference.smallest_loss(confidence))}. Evaluate on "
        f"more images{fewer}, or allow a larger max_drop."
    ]


def _beyond_the_limit(chosen: _Candidate, baseline: _Candidate, by: Recommend) -> list[str]:
    """Say so if the chosen pair's interval in the report contains the loss that the rule excludes."""
    found = chosen.difference
    shown = found.at(0.95).low
    if chosen is baseline or shown > -by.max_drop:
        return []
    why = (
        "it is the baseline itself, run by another engine, and is recommended without proof"
        if chosen.row is baseline.row
        else f"the rule asks for {by.confidence * 100:g} % confidence only"
    )
    return [
        f"The 95 % interval of {chosen.id} begins at {points(shown)} points, beyond the limit of "
        f"{by.max_drop * 100:g}: {why}."
    ]


def _guesses(baseline: _Candidate, task: Task, classes: int | None) -> list[str]:
    """Say so if the baseline may be no better than guessing: then equal answers are no merit."""
    accuracy = baseline.measured.accuracy
    chance = None if classes is None else task.chance(classes)
    if chance is None or accuracy.interval[0] > chance:
        return []
    return [
        f"The baseline's {task.metric.title} of {percent(accuracy.score)} % on {accuracy.images:,} images is not above "
        f"what {task.guess.format(f'{classes:,}')} gives ({100 * chance:.2f} %): differences of accuracy mean nothing "
        f"here. Give a checkpoint, or train longer (baseline: {{epochs: …}} in a recipe)."
    ]


def _tail(
    chosen: _Candidate, candidates: Sequence[_Candidate], proven: Sequence[_Candidate], by: Recommend
) -> list[str]:
    """Say so if the chosen pair's slow answers are much slower than its usual ones, unlike the others'."""

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
        f"One answer in twenty of {chosen.id} takes {number(latency.p95)} ms or more, {ratio(chosen):.1f} times its "
        f"p50 of {number(latency.p50)} (others: {usual:.1f} times). Where that matters, objective: p95{instead}."
    ]
