"""Latency and throughput of several variants, measured in turns so that a slow minute of the machine hits all alike.

One call of a variant is what one request pays after decoding (`serve.runtime.predictor.infer`): the
batch's way to the device, normalising, the network, the logits' way back.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from optimize.listener import SILENT, Listener
from optimize.measure.rows import Latency, Ratio, Timed
from optimize.measure.statistics import percentile_summary, ratio_interval
from optimize.measure.timing import Timing

#: Two variants whose speeds differ by less than this factor are level.
LEVEL = 0.97

#: ``uint8 (N, C, H, W)`` on the host to logits on the host.
Call = Callable[[torch.Tensor], torch.Tensor]
#: Runs a call on a batch and gives the milliseconds that it took.
_Clock = Callable[[Call, torch.Tensor], float]


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
        return [statistics.median(turn) for turn in self.rounds[1]]

    def tails(self) -> list[float]:
        """95th percentile of the latency at batch 1 in each round, ms."""
        return [percentile_summary(turn).p95 for turn in self.rounds[1]]

    def per_image(self, size: int) -> list[float]:
        """Time per image at this batch size in each round, ms."""
        return [sum(turn) / len(turn) / size for turn in self.rounds[size]]


def measure_speed(
    calls: Mapping[str, Call],
    batch: Callable[[int], torch.Tensor],
    device: torch.device,
    timing: Timing,
    listener: Listener = SILENT,
) -> dict[str, Speed]:
    """Time every variant in turns.

    Args:
        calls: the variants by name, warmed up at every batch size.
        batch: a ``uint8 (N, C, H, W)`` batch of real images for a size N.
        device: where they run; on CUDA each call is timed with events and synchronised.
        timing: see `Timing`.
        listener: told how far it is.
    """
    batches = {size: batch(size) for size in timing.batch_sizes}
    clock = _cuda_clock(device) if device.type == "cuda" else _wall_clock
    times: dict[str, dict[int, list[list[float]]]] = {name: {size: [] for size in batches} for name in calls}
    names = list(calls)
    gc.collect()
    gc.disable()  # a collection inside a turn would be charged to whoever has it
    try:
        for number in range(timing.rounds):
            # Each round begins with another variant: none always follows the same neighbour's heat.
            for place in range(len(names)):
                name = names[(place + number) % len(names)]
                for size, images in batches.items():
                    times[name][size].append(_turn(calls[name], images, clock, timing))
                done = (number * len(names) + place + 1) / (timing.rounds * len(names))
                listener.progressed(done, f"speed, round {number + 1}/{timing.rounds}")
    finally:
        gc.enable()
    return {name: Speed(rounds) for name, rounds in times.items()}


def compare(parent: Speed, child: Speed) -> Ratio:
    """How many times as fast the child is at batch 1, round by round, and whether it is slower than its parent.

    It is called slower where the median ratio is below `LEVEL`, or the whole interval below 1. The first
    does not wait for certainty: of a few rounds one that was disturbed would hide a plain loss.
    """
    return level(parent.medians(), child.medians())


def level(parent: Sequence[float], child: Sequence[float]) -> Ratio:
    """The same of any cost that is lower the better, one number for each round."""
    ratio = ratio_interval(parent, child)
    slower = ratio.median < LEVEL or ratio.high < 1
    return Ratio(value=ratio.median, low=ratio.low, high=ratio.high, coverage=ratio.coverage, slower=slower)


def _turn(
    call: Call, images: torch.Tensor, clock: Callable[[Call, torch.Tensor], float], timing: Timing
) -> list[float]:
    for _ in range(timing.warm_up):
        call(images)
    minimum = timing.minimum * (5 if len(images) == 1 else 1)
    times: list[float] = []
    end = time.perf_counter() + timing.seconds
    while len(times) < minimum or time.perf_counter() < end:
        times.append(clock(call, images))
    return times


def _wall_clock(call: Call, images: torch.Tensor) -> float:
    start = time.perf_counter()
    call(images)
    return (time.perf_counter() - start) * 1e3


def _cuda_clock(device: torch.device) -> _Clock:
    def clock(call: Call, images: torch.Tensor) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(device)
        start.record()
        call(images)
        end.record()
        torch.cuda.synchronize(device)
        return float(start.elapsed_time(end))

    return clock
