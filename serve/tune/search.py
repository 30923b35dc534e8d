"""Which way to serve holds the highest rate, or answers soonest: what is measured, and what is not worth measuring."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from serve.runtime.card.serving import Serving
from serve.runtime.errors import PipelineError, message_of
from serve.tune.space import Stage

Objective = Literal["throughput", "latency"]

#: The highest rate that is held is found to within this factor, and what is to win must be better by it.
STEP = 1.06
#: What a short measurement of the saturation may be too low by.
_NOISE = 1.05
#: Where nothing is held yet, a rate that is not held is followed by this part of it, down to `_LEAST` of saturation.
_BACK = 0.5
_LEAST = 0.05
#: A rate that misses the p99 by more than this is not asked for a second time.
_NEAR = 1.5
#: Turns of the best way and the present one in the end, and how many the best must win: of two that are level, one in
#: sixteen would (binomial), where the luckiest of a dozen short measurements nearly always looks better.
_TURNS, _WON = 7, 6
#: Measurements that these take at most, each on a server that was started for it: ways take turns.
MOST_ASKED = 2 * _TURNS


@dataclass(frozen=True)
class Point:
    """What one measurement found.

    Attributes:
        rate: stated arrivals a second; None: closed loop, at saturation.
        seconds: that it lasted.
        throughput: known answers a second.
        p50: ms.
        p99: ms; NaN where nothing was answered.
        bad: wrong, failed and lost requests.
        rejected: requests that were told to try again.
        gave_up: whether it was ended because a request waited far too long.
        memory_bytes: of the server's processes.
    """

    rate: float | None
    seconds: float
    throughput: float
    p50: float
    p99: float
    bad: int
    rejected: int
    gave_up: bool
    memory_bytes: int

    def holds(self, p99_ms: float) -> bool:
        """Whether all that was due at the rate was answered as known, with a p99 of at most ``p99_ms``.

        Arrivals are random: in 4 s at 100 a second they are 400, give or take 20, so that the throughput says nothing.
        """
        return self.rate is not None and self.answered_ms <= p99_ms

    @property
    def answered_ms(self) -> float:
        """The p99 where all was answered as known, else infinite."""
        return math.inf if self.gave_up or self.bad or self.rejected or math.isnan(self.p99) else self.p99


class Measure(Protocol):
    """Serves in some way and measures: at a rate, or at saturation where it is None; longer by ``effort``."""

    def __call__(self, way: Serving, rate: float | None, effort: float) -> Point: ...  # noqa: D102


@dataclass(frozen=True)
class Goal:
    """What is wanted.

    Attributes:
        objective: the highest rate that is held, or the lowest p99 at ``rate``.
        p99_ms: most that the 99th percentile of the latency may be.
        rate: arrivals a second for the latency; None: half of what the present way serves at saturation.
        memory_bytes: most that the server's processes may hold; None: any.
    """

    objective: Objective = "throughput"
    p99_ms: float = 20.0
    rate: float | None = None
    memory_bytes: int | None = None


@dataclass
class Trial:
    """One way to serve: what was measured of it, and what became of it."""

    way: Serving
    stage: str
    points: list[Point]
    outcome: str = ""

    def best(self, goal: Goal) -> Point | None:
        """Its best point: the highest rate that it held, or the lowest p99 that it had; None: none is good enough."""
        good = [point for point in self.points if point.holds(goal.p99_ms) and self.fits(goal)]
        if goal.objective == "throughput":
            return max(good, key=lambda point: (point.rate or 0, -point.p99), default=None)
        # What was asked for longer is known better, also that it does not hold.
        longest = max((point.seconds for point in self.points if point.rate is not None), default=0.0)
        return min((point for point in good if point.seconds == longest), key=lambda point: point.p99, default=None)

    def fits(self, goal: Goal) -> bool:
        """Whether the server stayed within the memory."""
        most = max((point.memory_bytes for point in self.points), default=0)
        return goal.memory_bytes is None or most <= goal.memory_bytes


@dataclass(frozen=True)
class Turn:
    """The best way and the present one, asked one after the other at the same rate."""

    best: Point
    usual: Point

    @property
    def won(self) -> bool:
        """Whether the best way answered sooner, at the 99th percentile."""
        return self.best.answered_ms < self.usual.answered_ms


@dataclass(frozen=True)
class Found:
    """What was found.

    Attributes:
        chosen: the trial of the way that was chosen.
        usual: that of the present way.
        trials: all, in the order they were made.
        rate: arrivals a second of the latency objective.
        turns: of the best way and the present one, where these were asked again; see `confirmed`.
    """

    chosen: Trial
    usual: Trial
    trials: tuple[Trial, ...]
    rate: float | None
    turns: tuple[Turn, ...] = ()


class Search:
    """A search over stages; each way is measured only for as long as it could still win.

    Args:
        measure: really measures, or takes what was measured before.
        goal: what is wanted.
        on_trial: called after each way with its trial and the number of ways that are left at most.
    """

    def __init__(
        self, measure: Measure, goal: Goal, on_trial: Callable[[Trial, int], Any] = lambda trial, left: None
    ) -> None:
        self._measure, self._goal, self._on_trial = measure, goal, on_trial
        self._trials: list[Trial] = []
        self._best: Trial | None = None
        self._rate = goal.rate

    def run(self, usual: Serving, stages: Sequence[Stage]) -> Found:
        """Measure ``usual``, then each stage's variants of the best way so far.

        Raises:
            PipelineError: no way holds the p99, or none within the memory.
        """
        first = self._try(usual, "as it is", sum(len(stage.variants(usual)) for stage in stages))
        for number, stage in enumerate(stages):
            base = self._best.way if self._best is not None else usual
            after = sum(len(later.variants(base)) for later in stages[number + 1 :])
            known = [trial.way for trial in self._trials]
            fresh = [way for way in stage.variants(base) if way not in known]
            if self._goal.objective == "latency":
                self._halve(fresh, stage.name, after)
                continue
            for index, way in enumerate(fresh):
                self._try(way, stage.name, len(fresh) - index - 1 + after)
        if self._best is None:
            raise PipelineError(self._why_none())
        return Found(self._best, first, tuple(self._trials), self._rate)

    def asks(self, left: int) -> int:
        """How many measurements `confirmed` will take at most, as far as is known where ``left`` ways are left."""
        usual = self._trials[0]
        # Which one answers soonest is decided after the last way of a stage was told.
        decided = left == 0 and self._goal.objective == "throughput"
        return 0 if usual.best(self._goal) is None or (decided and self._best is usual) else MOST_ASKED

    def _try(self, way: Serving, stage: str, left: int, effort: float = 1.0) -> Trial:
        trial = Trial(way, stage, [])
        self._trials.append(trial)
        latency = self._goal.objective == "latency"
        try:
            first = self._point(trial, self._rate if latency else None, effort)
            if latency and self._rate is None:
                self._rate = round(first.throughput / 2, 1)
            if not trial.fits(self._goal):
                trial.outcome = f"needs {first.memory_bytes / 1e6:.0f} MB"
            elif first.bad or not first.throughput:
                trial.outcome = f"{first.bad} requests went wrong"
            elif latency:
                self._once(trial, effort, None if first.rate is None else first)
            else:
                self._climb(trial, first)
        except PipelineError as error:
            if len(self._trials) == 1:  # nor would any other
                raise
            # So many processes may not find room, or an engine not start with so many threads: that is what was found.
            trial.points.clear()
            trial.outcome = f"does not work: {message_of(error)}"
        self._on_trial(trial, left)
        return trial

    def _point(self, trial: Trial, rate: float | None, effort: float = 1.0) -> Point:
        point = self._measure(trial.way, None if rate is None else round(rate, 1), effort)
        trial.points.append(point)
        return point

    # The highest rate.

    def _climb(self, trial: Trial, saturated: Point) -> None:
        """Find the highest rate that is held; end where the best way so far cannot be beaten any more."""
        to_beat = self._held(self._best)
        if saturated.throughput * _NOISE <= to_beat:
            trial.outcome = f"cannot win: {saturated.throughput:.0f}/s at saturation"
            return
        rate = to_beat * STEP if to_beat else saturated.throughput * 0.6
        ceiling = saturated.throughput * _NOISE
        if not self._holds(trial, rate):
            if to_beat:
                trial.outcome = f"does not hold {rate:.0f}/s"
                return
            ceiling, rate = rate, rate * _BACK
            while not self._holds(trial, rate):
                if rate < saturated.throughput * _LEAST:
                    trial.outcome = f"does not hold the p99 even at {rate:.0f}/s"
                    return
                ceiling, rate = rate, rate * _BACK
        while ceiling / rate > STEP:
            between = math.sqrt(rate * ceiling)
            if self._holds(trial, between):
                rate = between
            else:
                ceiling = between
        if not trial.fits(self._goal):  # under load it took more than at saturation
            trial.outcome = f"needs {max(point.memory_bytes for point in trial.points) / 1e6:.0f} MB"
            return
        trial.outcome = f"holds {self._held(trial):.0f}/s"
        self._best = trial

    def _holds(self, trial: Trial, rate: float) -> bool:
        """Whether a rate is held; at the second attempt if the first missed it by little: neighbours disturb."""
        first = self._point(trial, rate)
        if first.holds(self._goal.p99_ms):
            return True
        near = not first.gave_up and first.p99 <= _NEAR * self._goal.p99_ms
        return near and self._point(trial, rate).holds(self._goal.p99_ms)

    def _held(self, trial: Trial | None) -> float:
        point = trial.best(self._goal) if trial is not None else None
        return (point.rate or 0.0) if point is not None else 0.0

    # The lowest latency.

    def _once(self, trial: Trial, effort: float, point: Point | None = None) -> None:
        point = point or self._point(trial, self._rate, effort)
        trial.outcome = f"p99 {point.p99:.2f} ms at {self._rate:.0f}/s"
        if self._best is None and trial.best(self._goal) is not None:
            self._best = trial

    def _halve(self, ways: Sequence[Serving], stage: str, after: int) -> None:
        """Successive halving: all for a short time, the better half for twice that, and so on; with the best so far."""
        trials = [self._try(way, stage, len(ways) - index - 1 + after) for index, way in enumerate(ways)]
        racing = [trial for trial in trials if trial.best(self._goal) is not None]
        if self._best is not None and self._best not in racing:
            racing.append(self._best)
        effort = 1.0
        while len(racing) > 1:
            effort *= 2
            racing.sort(key=self._latest)
            for trial in racing[len(racing) // 2 :]:
                trial.outcome += "; others are quicker"
            racing = racing[: len(racing) // 2]
            for trial in racing if len(racing) > 1 else ():
                self._once(trial, effort)
        if racing:
            self._best = racing[0]

    def _latest(self, trial: Trial) -> float:
        point = trial.best(self._goal)
        return point.p99 if point is not None else math.inf

    def _why_none(self) -> str:
        goal = self._goal
        if not any(trial.fits(goal) for trial in self._trials):
            least = min(max(point.memory_bytes for point in trial.points) for trial in self._trials if trial.points)
            return (
                f"no way to serve fits into {(goal.memory_bytes or 0) / 1e6:.0f} MB: the least took {least / 1e6:.0f}"
            )
        p99s = [point.p99 for trial in self._trials for point in trial.points if point.rate is not None]
        best = min((value for value in p99s if not math.isnan(value)), default=math.nan)
        return f"no way to serve holds a p99 of {goal.p99_ms:g} ms: the best that was measured is {best:.1f} ms"


def confirmed(found: Found, goal: Goal, measure: Measure, say: Callable[[str], None] = lambda line: None) -> Found:
    """What was found, if it is better than the present way when both are asked again in turns; else the present way.

    Where the present way does not hold the p99, what was found stays.
    """
    best, usual = found.chosen, found.usual
    point = best.best(goal)
    if best is usual or usual.best(goal) is None or point is None:
        return found
    say("asking the best and the present way in turns …")
    turns: list[Turn] = []
    while len(turns) < _TURNS and sum(not turn.won for turn in turns) <= _TURNS - _WON:
        turns.append(Turn(measure(best.way, point.rate, 1.0), measure(usual.way, point.rate, 1.0)))
    won = sum(turn.won for turn in turns)
    best.outcome += f"; asked in turns with the present way, better in {won} of {len(turns)}"
    return replace(found, chosen=best if won >= _WON else usual, turns=tuple(turns))
