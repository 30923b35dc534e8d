"""The search for the settings with the highest rate or the lowest latency. It skips useless measurements."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from serve.runtime.card.serving import Serving
from serve.runtime.errors import PipelineError, message_of
from serve.tune.space import Stage

Objective = Literal["throughput", "latency"]

#: The highest rate is found to within this factor, and a winner must be better by it.
STEP = 1.06
#: A short measurement of the saturation may be too low by this factor.
_NOISE = 1.05
#: As long as no rate holds, the next one is this part of the last, down to `_LEAST` of the saturation.
_RATE_STEP_DOWN = 0.5
_LEAST = 0.05
#: A rate that misses the p99 by more than this factor is not tried a second time.
_NEAR = 1.5
#: Final turns of the best and the present settings, and how many the best must win. Of two equal ones, one in sixteen
#: would (binomial). Without turns, the luckiest of a dozen short measurements nearly always looks better.
_TURNS, _WINS_NEEDED = 7, 6
#: Most measurements for the turns. Each starts a server, because the settings take turns.
MOST_ASKED = 2 * _TURNS


@dataclass(frozen=True)
class Point:
    """The result of one measurement.

    Attributes:
        rate: nominal arrivals a second. None: closed loop, at saturation.
        seconds: its duration.
        throughput: known answers a second.
        p50: ms.
        p99: ms. NaN if nothing was answered.
        bad: wrong, failed and lost requests.
        rejected: requests that the server refused because it was full.
        gave_up: whether it ended because a request waited far too long.
        memory_bytes: memory of the server's processes.
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
        """Whether all requests due at the rate got their known answer, with a p99 of at most ``p99_ms``.

        Throughput is no criterion, because arrivals are random: in 4 s at 100 a second they are 400, plus or minus 20.
        """
        return self.rate is not None and self.answered_ms <= p99_ms

    @property
    def answered_ms(self) -> float:
        """The p99 if all requests got their known answer, else infinite."""
        return math.inf if self.gave_up or self.bad or self.rejected or math.isnan(self.p99) else self.p99


class Measure(Protocol):
    """Serves with some settings and measures at a rate. None: at saturation. ``effort`` multiplies the time."""

    def __call__(self, way: Serving, rate: float | None, effort: float) -> Point: ...  # noqa: D102


@dataclass(frozen=True)
class Goal:
    """The goal of a search.

    Attributes:
        objective: the highest rate that holds, or the lowest p99 at ``rate``.
        p99_ms: highest allowed 99th percentile of the latency.
        rate: arrivals a second for the latency. None: half of the present settings' throughput at saturation.
        memory_bytes: most memory of the server's processes. None: any.
    """

    objective: Objective = "throughput"
    p99_ms: float = 20.0
    rate: float | None = None
    memory_bytes: int | None = None


@dataclass
class Trial:
    """Some serving settings, with their measurements and the outcome."""

    way: Serving
    stage: str
    points: list[Point]
    outcome: str = ""

    def best(self, goal: Goal) -> Point | None:
        """Return the best point: the highest rate that held, or the lowest p99. None: none is good enough."""
        good = [point for point in self.points if point.holds(goal.p99_ms) and self.fits(goal)]
        if goal.objective == "throughput":
            return max(good, key=lambda point: (point.rate or 0, -point.p99), default=None)
        # Only the longest measurements, because they are the most reliable, also on a failure.
        longest = max((point.seconds for point in self.points if point.rate is not None), default=0.0)
        return min((point for point in good if point.seconds == longest), key=lambda point: point.p99, default=None)

    def fits(self, goal: Goal) -> bool:
        """Whether the server stayed within the memory."""
        most = max((point.memory_bytes for point in self.points), default=0)
        return goal.memory_bytes is None or most <= goal.memory_bytes


@dataclass(frozen=True)
class Turn:
    """The best and the present settings, measured one after the other at the same rate."""

    best: Point
    usual: Point

    @property
    def won(self) -> bool:
        """Whether the best settings had the lower p99."""
        return self.best.answered_ms < self.usual.answered_ms


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        chosen: trial of the chosen settings.
        usual: trial of the present settings.
        trials: all trials in order.
        rate: arrivals a second for the latency objective.
        turns: the repeated comparisons of best and present settings; see `confirmed`.
    """

    chosen: Trial
    usual: Trial
    trials: tuple[Trial, ...]
    rate: float | None
    turns: tuple[Turn, ...] = ()


class Search:
    """A search over stages. Each trial is measured only as long as it could still win.

    Args:
        measure: measures, or returns earlier measurements.
        goal: the goal.
        on_trial: called after each trial, with the most trials that may follow.
    """

    def __init__(
        self, measure: Measure, goal: Goal, on_trial: Callable[[Trial, int], Any] = lambda trial, left: None
    ) -> None:
        self._measure, self._goal, self._on_trial = measure, goal, on_trial
        self._trials: list[Trial] = []
        self._best: Trial | None = None
        self._rate = goal.rate

    def run(self, usual: Serving, stages: Sequence[Stage]) -> Found:
        """Measure ``usual``, then each stage's variants of the best settings so far.

        Raises:
            PipelineError: no settings hold the p99, or none fit into the memory.
        """
        first = self._try(usual, "as it is", sum(len(stage.variants(usual)) for stage in stages))
        for number, stage in enumerate(stages):
            base = self._best.way if self._best is not None else usual
            after = sum(len(later.variants(base)) for later in stages[number + 1 :])
            known = [trial.way for trial in self._trials]
            fresh = [way for way in stage.variants(base) if way not in known]
            if self._goal.objective == "latency":
                self._successive_halving(fresh, stage.name, after)
                continue
            for index, way in enumerate(fresh):
                self._try(way, stage.name, len(fresh) - index - 1 + after)
        if self._best is None:
            raise PipelineError(self._failure_text())
        return Found(self._best, first, tuple(self._trials), self._rate)

    def asks(self, left: int) -> int:
        """Return the most measurements that `confirmed` will need, as far as known with ``left`` trials left."""
        usual = self._trials[0]
        # The lowest latency is decided only after the last trial of a stage was reported.
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
                trial.outcome = f"{first.bad} requests failed"
            elif latency:
                self._measure_latency(trial, effort, None if first.rate is None else first)
            else:
                self._find_highest_rate(trial, first)
        except PipelineError as error:
            if len(self._trials) == 1:  # no other would work either
                raise
            # So many processes may not fit, or an engine may not start with so many threads. That is a result.
            trial.points.clear()
            trial.outcome = f"does not work: {message_of(error)}"
        self._on_trial(trial, left)
        return trial

    def _point(self, trial: Trial, rate: float | None, effort: float = 1.0) -> Point:
        point = self._measure(trial.way, None if rate is None else round(rate, 1), effort)
        trial.points.append(point)
        return point

    # The highest rate.

    def _find_highest_rate(self, trial: Trial, saturated: Point) -> None:
        """Find the highest rate that holds. Stop once the best trial so far cannot be beaten."""
        to_beat = self._held(self._best)
        if saturated.throughput * _NOISE <= to_beat:
            trial.outcome = f"cannot be the best: {saturated.throughput:.0f}/s at saturation"
            return
        rate = to_beat * STEP if to_beat else saturated.throughput * 0.6
        ceiling = saturated.throughput * _NOISE
        if not self._holds(trial, rate):
            if to_beat:
                trial.outcome = f"does not hold {rate:.0f}/s"
                return
            ceiling, rate = rate, rate * _RATE_STEP_DOWN
            while not self._holds(trial, rate):
                if rate < saturated.throughput * _LEAST:
                    trial.outcome = f"does not hold the p99 even at {rate:.0f}/s"
                    return
                ceiling, rate = rate, rate * _RATE_STEP_DOWN
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
        """Whether a rate holds. A near miss gets a second attempt, because other load may have disturbed it."""
        first = self._point(trial, rate)
        if first.holds(self._goal.p99_ms):
            return True
        near = not first.gave_up and first.p99 <= _NEAR * self._goal.p99_ms
        return near and self._point(trial, rate).holds(self._goal.p99_ms)

    def _held(self, trial: Trial | None) -> float:
        point = trial.best(self._goal) if trial is not None else None
        return (point.rate or 0.0) if point is not None else 0.0

    # The lowest latency.

    def _measure_latency(self, trial: Trial, effort: float, point: Point | None = None) -> None:
        point = point or self._point(trial, self._rate, effort)
        trial.outcome = f"p99 {point.p99:.2f} ms at {self._rate:.0f}/s"
        if self._best is None and trial.best(self._goal) is not None:
            self._best = trial

    def _successive_halving(self, ways: Sequence[Serving], stage: str, after: int) -> None:
        """Successive halving: all for a short time, the better half for twice that, and so on, with the best so far."""
        trials = [self._try(way, stage, len(ways) - index - 1 + after) for index, way in enumerate(ways)]
        racing = [trial for trial in trials if trial.best(self._goal) is not None]
        if self._best is not None and self._best not in racing:
            racing.append(self._best)
        effort = 1.0
        while len(racing) > 1:
            effort *= 2
            racing.sort(key=self._latest)
            for trial in racing[len(racing) // 2 :]:
                trial.outcome += "; others are faster"
            racing = racing[: len(racing) // 2]
            for trial in racing if len(racing) > 1 else ():
                self._measure_latency(trial, effort)
        if racing:
            self._best = racing[0]

    def _latest(self, trial: Trial) -> float:
        point = trial.best(self._goal)
        return point.p99 if point is not None else math.inf

    def _failure_text(self) -> str:
        goal = self._goal
        if not any(trial.fits(goal) for trial in self._trials):
            least = min(max(point.memory_bytes for point in trial.points) for trial in self._trials if trial.points)
            return (
                f"no setting fits into {(goal.memory_bytes or 0) / 1e6:.0f} MB: the smallest needed {least / 1e6:.0f}"
            )
        p99s = [point.p99 for trial in self._trials for point in trial.points if point.rate is not None]
        best = min((value for value in p99s if not math.isnan(value)), default=math.nan)
        return f"no setting reaches a p99 of {goal.p99_ms:g} ms: the best is {best:.1f} ms"


def confirmed(found: Found, goal: Goal, measure: Measure, say: Callable[[str], None] = lambda line: None) -> Found:
    """Compare the best and the present settings again in turns. Return the better ones.

    If the present settings do not hold the p99, the result stays.
    """
    best, usual = found.chosen, found.usual
    point = best.best(goal)
    if best is usual or usual.best(goal) is None or point is None:
        return found
    say("comparing the best and the present settings in turns …")
    turns: list[Turn] = []
    while len(turns) < _TURNS and sum(not turn.won for turn in turns) <= _TURNS - _WINS_NEEDED:
        turns.append(Turn(measure(best.way, point.rate, 1.0), measure(usual.way, point.rate, 1.0)))
    won = sum(turn.won for turn in turns)
    best.outcome += f"; compared in turns with the present settings, better in {won} of {len(turns)}"
    return replace(found, chosen=best if won >= _WINS_NEEDED else usual, turns=tuple(turns))
