"""Timing in turns, with a clock that the calls themselves move on: every expectation is exact."""

from __future__ import annotations

import gc
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from optimize.listener import Silent
from optimize.measure import latency
from optimize.measure.figures import Timed
from optimize.measure.latency import Speed, Turn, clock_of, compare, falls_behind, measure_speed, take_turn
from optimize.measure.timing import Timing
from serve.runtime.errors import PipelineError, UserError
from serve.runtime.outputs import Outputs


@pytest.fixture(autouse=True, scope="module")
def settled() -> None:
    """As in an execution's process: what was there before is not collected again at every turn."""
    gc.collect()
    gc.freeze()  # for good, as what `tests.conftest` freezes: there is one place for all that is frozen


class Machine:
    """A fake clock in seconds, and calls that take as long as they are told; ``log`` has (name, batch) of each."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[tuple[str, int]] = []

    def call(self, name: str, milliseconds):
        counter = iter(range(10**9))

        def run(images: torch.Tensor) -> Outputs:
            self.log.append((name, len(images)))
            self.now += milliseconds(next(counter), len(images)) / 1e3
            return (images,)

        return run


@pytest.fixture
def fake(monkeypatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(latency, "time", SimpleNamespace(perf_counter=lambda: machine.now))
    return machine


def images(size: int) -> torch.Tensor:
    return torch.zeros((size, 3, 4, 4), dtype=torch.uint8)


def in_turns(calls, timing: Timing, device: str = "cpu") -> dict[str, Speed]:
    """Each call takes its turns in this process."""

    def turn_of(call) -> Turn:
        return lambda size: take_turn(call, images(size), clock_of(device), timing)

    return measure_speed({name: turn_of(call) for name, call in calls.items()}, timing)


def figures(speed: Speed) -> Timed:
    return speed.against(speed, speed)


def turns(log: list[tuple[str, int]]) -> list[tuple[str, int, int]]:
    """Runs of equal entries: (name, batch, calls)."""
    found: list[tuple[str, int, int]] = []
    for name, size in log:
        if found and found[-1][:2] == (name, size):
            found[-1] = (name, size, found[-1][2] + 1)
        else:
            found.append((name, size, 1))
    return found


def test_variants_take_turns_and_each_round_begins_with_another(fake: Machine) -> None:
    calls = {name: fake.call(name, lambda n, size: 1.0) for name in "abc"}
    timing = Timing(rounds=4, batch_sizes=(1, 2), seconds=1e-9, minimum=2, warm_up=1)
    in_turns(calls, timing)
    seen = turns(fake.log)
    assert [name for name, size, _ in seen if size == 1] == list("abc" + "bca" + "cab" + "abc")
    assert [name for name, size, _ in seen if size == 2] == list("abc" + "bca" + "cab" + "abc")
    # One untimed call, then the minimum: five times as many at batch 1.
    assert {(size, calls) for _, size, calls in seen} == {(1, 11), (2, 3)}


def test_a_turn_lasts_its_time_and_never_less_than_the_minimum(fake: Machine) -> None:
    calls = {"fast": fake.call("fast", lambda n, size: 1.0), "slow": fake.call("slow", lambda n, size: 1000.0)}
    speeds = in_turns(calls, Timing(rounds=1, batch_sizes=(1,), seconds=0.1, minimum=2, warm_up=0))
    assert len(speeds["fast"].rounds[1][0]) in (100, 101)  # floating sums
    assert len(speeds["slow"].rounds[1][0]) == 10


def test_warm_up_calls_are_in_no_figure(fake: Machine) -> None:
    per_turn = 3 + 5

    def cold_then_warm(n: int, size: int) -> float:
        return 500.0 if n % per_turn < 3 else 2.0

    calls = {"a": fake.call("a", cold_then_warm)}
    timing = Timing(rounds=3, batch_sizes=(1,), seconds=1e-9, minimum=1, warm_up=3)
    found = figures(in_turns(calls, timing)["a"]).latency_ms
    assert (found.p50, found.p95, found.p99) == pytest.approx((2.0, 2.0, 2.0))
    assert found.samples == 15


def test_figures_equal_an_independent_calculation() -> None:
    generator = np.random.default_rng(0)
    rounds = {size: [list(generator.uniform(1, 9, 7) * size**0.5) for _ in range(5)] for size in (1, 8, 32)}
    found = figures(Speed(rounds))
    assert found.latency_ms.p50 == statistics.median([statistics.median(turn) for turn in rounds[1]])
    every = sorted(value for turn in rounds[1] for value in turn)

    def percentile(share: float) -> float:
        place = share * (len(every) - 1)
        low = int(place)
        return every[low] + (place - low) * (every[min(low + 1, len(every) - 1)] - every[low])

    assert found.latency_ms.p95 == pytest.approx(percentile(0.95))
    assert found.latency_ms.p99 == pytest.approx(percentile(0.99))
    expected = {size: statistics.median([size * 7 * 1e3 / sum(turn) for turn in rounds[size]]) for size in rounds}
    assert found.throughput == pytest.approx(expected)
    assert found.best_batch == max((1, 8, 32), key=lambda size: expected[size])
    assert found.best_throughput == pytest.approx(max(expected.values()))
    assert found.latency_ms.samples == 35


def test_a_slow_minute_of_the_machine_favours_nobody(fake: Machine) -> None:
    """The machine is ten times slower in its second half; the ratio of the two stays what it is."""

    def of(milliseconds: float):
        return lambda n, size: milliseconds * (10 if fake.now > 0.5 else 1)

    calls = {"parent": fake.call("parent", of(4.0)), "child": fake.call("child", of(2.0))}
    speeds = in_turns(calls, Timing(rounds=7, batch_sizes=(1,), seconds=0.05, minimum=1, warm_up=0))
    assert compare(speeds["parent"], speeds["child"]).value == pytest.approx(2.0)


def speed(*medians: float) -> Speed:
    return Speed({1: [[median] for median in medians]})


def test_a_plain_loss_is_said_to_be_slower_and_with_one_disturbed_round_to_be_unclear() -> None:
    parent = speed(*[10.0] * 7)
    assert compare(parent, speed(*[12.0] * 7)).slower is True
    disturbed = compare(parent, speed(*[12.0] * 6, 9.0))
    assert (disturbed.slower, disturbed.unclear) == (False, True)
    assert falls_behind(disturbed)  # a choice does not wait for certainty


def test_slower_is_said_of_a_small_loss_only_where_every_round_shows_it() -> None:
    parent = speed(*[10.0] * 7)
    assert compare(parent, speed(*[10.1] * 7)).slower is True
    assert compare(parent, speed(*[10.1] * 6, 9.9)).slower is False
    assert compare(parent, speed(*[10.0] * 7)).slower is False
    ratio = compare(parent, speed(*[5.0] * 7))
    assert (ratio.value, ratio.low, ratio.high, ratio.slower) == (2.0, 2.0, 2.0, False)
    assert ratio.coverage == pytest.approx(1 - 2 / 2**7)


def test_the_garbage_collector_rests_meanwhile_and_is_back_afterwards() -> None:
    seen = []

    def broken(batch: torch.Tensor) -> torch.Tensor:
        seen.append(gc.isenabled())
        raise RuntimeError("the variant fails")

    assert gc.isenabled()
    with pytest.raises(RuntimeError):
        in_turns({"a": broken}, Timing(rounds=1, batch_sizes=(1,)))
    assert seen == [False]
    assert gc.isenabled()


def test_one_that_fails_leaves_and_the_others_go_on() -> None:
    left: list[str] = []

    def breaks(size: int) -> list[float]:
        left.append("turn")
        if len(left) == 3:
            raise PipelineError("its process was ended by SIGKILL")
        return [1.0]

    turns: dict[str, Turn] = {"a": lambda size: [1.0], "breaks": breaks, "b": lambda size: [2.0]}
    found = measure_speed(turns, Timing(rounds=4, batch_sizes=(1, 2)))
    assert found.keys() == {"a", "b"}
    assert found["b"].rounds == {1: [[2.0]] * 4, 2: [[2.0]] * 4}
    assert len(left) == 3


def test_progress_ends_at_one_and_never_goes_back(fake: Machine) -> None:
    heard = []

    class Heard(Silent):
        def progressed(self, fraction: float, message: str) -> None:
            heard.append(fraction)

    timing = Timing(rounds=2, batch_sizes=(1,))
    measure_speed({name: lambda size: [1.0] for name in "ab"}, timing, Heard())
    assert heard == sorted(heard) == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("sizes", [(), (2,), (1, 1), (8, 1), (1, 8, 4), (0, 1)])
def test_batch_sizes_must_ascend_from_one(sizes: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="batch_sizes"):
        Timing(batch_sizes=sizes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_a_call_is_timed_to_its_end_and_not_to_its_launch() -> None:
    matrix = torch.randn(4096, 4096, device="cuda")

    def call(batch: torch.Tensor) -> torch.Tensor:
        product = matrix
        for _ in range(10):
            product = product @ matrix  # launched at once, computed for milliseconds
        return product

    times = in_turns({"a": call}, Timing(rounds=1, batch_sizes=(1,), seconds=0.05), "cuda")["a"]
    operations = 10 * 2 * 4096**3
    assert figures(times).latency_ms.p50 > operations / 2e15 * 1e3  # no GPU does two petaflops in FP32
