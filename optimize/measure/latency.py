"""Latency and throughput of several variants, measured in turns so that a slow minute of the machine hits all alike.

One call of a variant is what one request pays after decoding (`serve.runtime.predictor.infer`): the
batch's way to the device, normalising, the network, the logits' way back. A turn is taken in the variant's own process
(`take_turn`), on command of the one that has them all (`measure_speed`).
"""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from optimize.listener import SILENT, Listener
from optimize.measure.figures import Latency, Ratio, Timed
from optimize.measure.statistics import percentile_summary, ratio_interval
from optimize.measure.timing import Timing
from serve.runtime.errors import PipelineError

#: Two variants whose speeds differ by less than this factor are level.
LEVEL = 0.97

#: ``uint8 (N, C, H, W)`` on the host to logits on the host.
Call = Callable[[torch.Tensor], torch.Tensor]
#: Takes a turn at a batch size: milliseconds of each call.
Turn = Callable[[int], list[float]]
#: Runs a call on a batch and gives the milliseconds that it took.
Clock = Callable[[Call, torch.Tensor], float]


@dataclass(frozen=True)
class Speed:
    """Times of one variant: for each batch size and round, the milliseconds of each call."""

    rounds: Mapping[int, Sequence[Sequence[float]]]

    def against(self, yardstick: Speed, eager: Speed) -> Timed:
        """Latency at batch 1, throughput by batch size, and the speed-up over ``yardstick`` and over ``eager``.

        p50 is the median of the rounds' medians; p95 and p99 are those of all calls, because a tail is
        made of the rare ones; throughput is the median of the rounds'.
        """
        single = [value for turn in self.rounds[1] for value in turn]
        tail = percentile_summary(single)
        throughput = {
            size: statistics.median(1e3 / milliseconds for milliseconds in self.per_image(size)) for size in self.rounds
        }
        p50 = statistics.median(self.medians())
        return Timed(
            latency_ms=Latency(p50=p50, p95=tail.p95, p99=tail.p99, samples=len(single)),
            throughput=throughput,
            speedup=compare(yardstick, self),
            vs_eager=compare(eager, self),
        )

    def medians(self) -> list[float]:
        """Median latency at batch 1 in each round, ms."""
        return self._medians

    @functools.cached_property
    def _medians(
        self,
    ) -> list[float]:  # every comparison asks for them: a fifth of a second of a run that makes nothing
        return [statistics.median(turn) for turn in self.rounds[1]]

    def tails(self) -> list[float]:
        """95th percentile of the latency at batch 1 in each round, ms."""
        return [percentile_summary(turn).p95 for turn in self.rounds[1]]

    def per_image(self, size: int) -> list[float]:
        """Time per image at this batch size in each round, ms."""
        return [sum(turn) / len(turn) / size for turn in self.rounds[size]]


def measure_speed(
    turns: Mapping[str, Turn], timing: Timing, listener: Listener = SILENT, sizes: Sequence[int] | None = None
) -> dict[str, Speed]:
    """Time every variant in turns, one at a time.

    Args:
        turns: the variants by name, warmed up at every batch size.
        timing: see `Timing`.
        listener: told how far it is.
        sizes: batch sizes, where they are not those of ``timing``.

    Returns:
        Times by variant; one whose turn raised a `PipelineError` has left, and is absent.
    """
    sizes = sizes or timing.batch_sizes
    times: dict[str, dict[int, list[list[float]]]] = {name: {size: [] for size in sizes} for name in turns}
    names = list(turns)
    for number in range(timing.rounds):
        # Each round begins with another variant: none always follows the same neighbour's heat.
        for place in range(len(names)):
            name = names[(place + number) % len(names)]
            for size in sizes if name in times else ():
                try:
                    times[name][size].append(turns[name](size))
                except PipelineError:
                    del times[name]
                    break
            done = (number * len(names) + place + 1) / (timing.rounds * len(names))
            listener.progressed(done, f"speed, round {number + 1}/{timing.rounds}")
    return {name: Speed(rounds) for name, rounds in times.items()}


def take_turn(call: Call, images: torch.Tensor, clock: Clock, timing: Timing) -> list[float]:
    """Call a variant again and again, for as long as a turn lasts: milliseconds of each call, warm-up left out.

    Args:
        call: the variant, warmed up at this batch size.
        images: ``uint8 (N, C, H, W)``, real ones.
        clock: see `clock_of`.
        timing: see `Timing`.
    """
    gc.collect()
    gc.disable()  # a collection inside a turn would be charged to whoever has it
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
    """What times one call on a device: on CUDA with events and synchronised, so that it is timed to its end."""
    return _cuda_clock(torch.device(device)) if device != "cpu" else _wall_clock


def compare(parent: Speed, child: Speed) -> Ratio:
    """How many times as fast the child is at batch 1, round by round, and whether it is slower than its parent.

    It is called slower where the median ratio is below `LEVEL`, or the whole interval below 1. The first
    does not wait for certainty: of a few rounds one that was disturbed would hide a plain loss.
    """
    return level(parent.medians(), child.medians())


def level(parent: Sequence[float], child: Sequence[float]) -> Ratio:
    """The same of any cost that is lower the better, one number for each round; of one number there is no interval."""
    ratio = ratio_interval(parent, child)
    slower = ratio.median < LEVEL or (len(parent) > 1 and ratio.high < 1)
    return Ratio(value=ratio.median, low=ratio.low, high=ratio.high, coverage=ratio.coverage, slower=slower)


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
