"""Measures latency and throughput of several variants in turns, so that a slow minute of the machine affects all alike.

One call of a variant does the work of one request after decoding (`serve.runtime.service.predictor.infer`): copy the
batch to the device, normalise, run the network, copy the logits back. A turn happens in the variant's own process
(`take_turn`). The process that controls all of them starts it (`measure_speed`).
"""

from __future__ import annotations

import functools
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from optimize.listener import SILENT, Listener
from optimize.measure.contention import UNSTEADY, Disturbance, Watch, disturbance
from optimize.measure.figures import LEVEL, Latency, Ratio, Timed
from optimize.measure.timing import Timing
from optimize.statistics import ENOUGH, percentile_summary, ratio_interval, student_ratio
from serve.runtime.errors import PipelineError
from serve.runtime.outputs import Outputs

#: Seconds in all for turns that are repeated because others took the cores.
_AGAIN_S = 20.0

#: ``uint8 (N, C, H, W)`` on the host to outputs on the host.
Call = Callable[[torch.Tensor], Outputs]
#: Takes a turn at a batch size and returns the milliseconds of each call.
Turn = Callable[[int], list[float]]
#: Runs a call on a batch and returns its milliseconds.
Clock = Callable[[Call, torch.Tensor], float]


@dataclass(frozen=True)
class Speed:
    """Times of one variant.

    Attributes:
        rounds: for each batch size and turn, the milliseconds of each call.
        starts: the turns at batch 1 that were the first of a process. Empty if one process took all turns. Otherwise a
            larger batch size has one turn in each process.
        others: for each batch size and turn, the share of the cores that other processes took. None if it is unknown.
        clocks: the cores' clock in MHz after each turn. None if it is unknown.
    """

    rounds: Mapping[int, Sequence[Sequence[float]]]
    starts: Sequence[int] = ()
    others: Mapping[int, Sequence[float | None]] = field(default_factory=dict)
    clocks: Sequence[float | None] = ()

    @property
    def shares(self) -> list[float | None]:
        """Return the share of the cores that others took in each turn."""
        return [share for shares in self.others.values() for share in shares]

    @property
    def processes(self) -> int:
        """Return the number of processes that it was timed in."""
        return max(1, len(self.starts))

    def against(self, yardstick: Speed, eager: Speed) -> Timed:
        """Compute latency at batch 1, throughput by batch size, and the speed-up over ``yardstick`` and over ``eager``.

        p50 is the geometric mean of the processes' medians (see `typical`), so that a ratio of two variants is the
        ratio of their p50s. With one process it is the median of the rounds' medians. p95 and p99 are those of all
        calls, because rare calls make up a tail. Throughput is the median over the processes, or over the rounds of one
        process.
        """
        single = [value for turn in self.rounds[1] for value in turn]
        tail = percentile_summary(single)
        throughput = {
            size: statistics.median(1e3 / milliseconds for milliseconds in self.per_image(size)) for size in self.rounds
        }
        p50 = self.p50
        return Timed(
            latency_ms=Latency(p50=p50, p95=tail.p95, p99=tail.p99, samples=len(single)),
            throughput=throughput,
            speedup=compare(yardstick, self),
            vs_eager=compare(eager, self),
        )

    @property
    def p50(self) -> float:
        """Return the latency at batch 1, in ms, that a report states."""
        return typical(self.medians()) if self.processes > 1 else statistics.median(self.medians())

    def medians(self) -> list[float]:
        """Return median latencies at batch 1, ms: for each process the median of its rounds' medians.

        With one process there is one for each round.
        """
        return self._medians

    @functools.cached_property
    def _medians(
        self,
    ) -> list[float]:  # cached, because every comparison needs them: 0.2 s of a run that makes nothing
        return [statistics.median(map(statistics.median, turns)) for turns in self._by_process(1)]

    def tails(self) -> list[float]:
        """Return the 95th percentile of the latency at batch 1 in each process, or in each round of one process, ms."""
        calls = ([call for turn in turns for call in turn] for turns in self._by_process(1))
        return [percentile_summary(every).p95 for every in calls]

    def per_image(self, size: int) -> list[float]:
        """Return the time per image at this batch size in each process, or in each round of one process, ms."""
        return [statistics.mean(sum(turn) / len(turn) / size for turn in turns) for turns in self._by_process(size)]

    def _by_process(self, size: int) -> list[Sequence[Sequence[float]]]:
        """Return the turns of each process. With one process, each turn separately."""
        turns = self.rounds[size]
        if self.processes == 1 or size != 1:
            return [[turn] for turn in turns]
        return [turns[start:end] for start, end in itertools.pairwise((*self.starts, len(turns)))]


def measure_speed(
    turns: Mapping[str, Turn],
    timing: Timing,
    listener: Listener = SILENT,
    sizes: Sequence[int] | None = None,
    *,
    renew: Callable[[str], Turn] | None = None,
    watch: Watch | None = None,
) -> dict[str, Speed]:
    """Time every variant in turns, one at a time.

    A turn is repeated, within a budget, if others took the cores. The turn with the smaller share is kept.

    Args:
        turns: the variants by name, warmed up at every batch size.
        timing: see `Timing`.
        listener: receives the progress.
        sizes: batch sizes, if they differ from those of ``timing``.
        renew: starts a new process for a variant, warms it up, and returns its turn from then on. None: one process
            takes all turns.
        watch: measures the share of the cores that others take. None: it is not measured.

    Returns:
        Times by variant. A variant whose turn raised a `PipelineError` is absent.
    """
    sizes = sizes or timing.batch_sizes
    starts = timing.starts if renew is not None and min(timing.processes, timing.rounds) > 1 else ()
    present = dict(turns)
    times: dict[str, _Taken] = {name: _Taken(sizes) for name in turns}
    names, steady = list(turns), _Steady(watch)
    for number in range(timing.rounds):
        if renew is not None and number in starts[1:]:
            for name in list(present):
                listener.progressed(number / timing.rounds, f"starting {name} again")
                try:
                    present[name] = renew(name)
                except PipelineError:
                    del present[name]
        # Each round begins with another variant, so that none always follows the heat of the same neighbour.
        for place in range(len(names)):
            name = names[(place + number) % len(names)]
            for size in sizes if name in present else ():
                if starts and size != 1 and number not in starts:
                    continue
                try:
                    times[name].add(size, *steady.take(present[name], size))
                    times[name].clocks.append(watch.clock() if watch is not None else None)
                except PipelineError:
                    del present[name]
                    break
            done = (number * len(names) + place + 1) / (timing.rounds * len(names))
            listener.progressed(done, f"speed, round {number + 1}/{timing.rounds}")
    kept = {name: times[name] for name in present}
    return {name: Speed(taken.rounds, starts, taken.others, taken.clocks) for name, taken in kept.items()}


class _Taken:
    """The turns of a variant so far: milliseconds of each call, and the share that others took."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.rounds: dict[int, list[list[float]]] = {size: [] for size in sizes}
        self.others: dict[int, list[float | None]] = {size: [] for size in sizes}
        self.clocks: list[float | None] = []

    def add(self, size: int, calls: list[float], others: float | None) -> None:
        self.rounds[size].append(calls)
        self.others[size].append(others)


class _Steady:
    """Takes turns, and repeats one during which others took the cores, as long as the budget lasts."""

    def __init__(self, watch: Watch | None) -> None:
        self._watch = watch
        self._left = _AGAIN_S

    def take(self, turn: Turn, size: int) -> tuple[list[float], float | None]:
        """Take a turn at a batch size. Returns it with the share of the cores that others took."""
        if self._watch is None:
            return turn(size), None
        calls, others = self._once(turn, size)
        while others is not None and others > UNSTEADY and self._left > 0:
            began = time.perf_counter()
            again, then = self._once(turn, size)
            self._left -= time.perf_counter() - began
            if then is None or then >= others:
                break  # it is not calmer now
            calls, others = again, then
        return calls, others

    def _once(self, turn: Turn, size: int) -> tuple[list[float], float | None]:
        assert self._watch is not None
        self._watch.begin()
        return turn(size), self._watch.others()


def take_turn(call: Call, images: torch.Tensor, clock: Clock, timing: Timing) -> list[float]:
    """Call a variant for the length of a turn, and return the milliseconds of each call after the warm-up.

    Args:
        call: the variant, warmed up at this batch size.
        images: ``uint8 (N, C, H, W)``, real images.
        clock: see `clock_of`.
        timing: see `Timing`.
    """
    gc.collect()
    gc.disable()  # a collection during a turn would count against one variant
    try:
        for _ in range(timing.warm_up):
            call(images)
        minimum = timing.minimum * (5 if len(images) == 1 else 1)
        times: list[float] = []
        end = time.perf_counter() + timing.seconds
        while len(times) < minimum or time.perf_counter() < end:
            times.append(clock(call, images))
        return times
    finally:
        gc.enable()


def clock_of(device: str) -> Clock:
    """Return the clock of a device. On CUDA it uses events and synchronises, so that a call is timed to its end."""
    return _cuda_clock(torch.device(device)) if device != "cpu" else _wall_clock


def disturbance_of(speeds: Iterable[Speed], remedy: str) -> Disturbance:
    """Return the share of the cores that others took while these speeds were measured; see `disturbance`."""
    taken = list(speeds)
    return disturbance(
        (share for speed in taken for share in speed.shares),
        (clock for speed in taken for clock in speed.clocks),
        remedy,
    )


def typical(costs: Sequence[float]) -> float:
    """Return one cost for several processes or rounds: the centre of `level`'s interval."""
    return statistics.geometric_mean(costs) if 1 < len(costs) < ENOUGH else statistics.median(costs)


def compare(parent: Speed, child: Speed) -> Ratio:
    """Compare the speeds at batch 1 process by process, and decide whether the child is slower than its parent.

    It is called slower only if the whole interval says so.
    """
    return level(parent.medians(), child.medians())


def level(parent: Sequence[float], child: Sequence[float]) -> Ratio:
    """Compare costs as `compare` does, one number for each process or round. Lower is better.

    A single number has no interval. The interval lies between order statistics if there are enough numbers for 95 %,
    else it is Student's.
    """
    several = len(parent) > 1
    ratio = (student_ratio if 1 < len(parent) < ENOUGH else ratio_interval)(parent, child)
    return Ratio(
        value=ratio.median,
        low=ratio.low,
        high=ratio.high,
        coverage=ratio.coverage,
        slower=several and ratio.high < 1,
    )


def falls_behind(ratio: Ratio) -> bool:
    """Return whether a variant is ruled out if speed matters: it is below `LEVEL`, or certainly slower.

    A choice has to be made even without the certainty that a statement needs.
    """
    return ratio.value < LEVEL or ratio.slower


def _wall_clock(call: Call, images: torch.Tensor) -> float:
    start = time.perf_counter()
    call(images)
    return (time.perf_counter() - start) * 1e3


def _cuda_clock(device: torch.device) -> Clock:
    def clock(call: Call, images: torch.Tensor) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)
        start.record()
        call(images)
        end.record()
        torch.cuda.synchronize(device)
        return float(start.elapsed_time(end))

    return clock
