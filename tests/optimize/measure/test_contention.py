"""Speeds of a busy machine say so, turns are taken again when it is busy, and each variant has several processes."""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from optimize.measure import latency
from optimize.measure.contention import BUSY, UNSTEADY, Disturbance, Watch, disturbance
from optimize.measure.latency import Speed, Turn, compare, measure_speed
from optimize.measure.timing import Timing
from optimize.run.relative_speeds import fastest
from optimize.statistics import student_ratio
from serve.runtime.errors import PipelineError

CORES = len(os.sched_getaffinity(0))
BURN = "import time\nend = time.perf_counter() + 60\nwhile time.perf_counter() < end: pass"


@pytest.fixture
def burning() -> Iterator[list[int]]:
    """Processes that burn all cores: their ids."""
    found = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(CORES)]
    try:
        time.sleep(0.3)
        yield [process.pid for process in found]
    finally:
        for process in found:
            process.kill()
            process.wait()


def seconds_of(pids: list[int]) -> float:
    return sum(psutil.Process(pid).cpu_times().user + psutil.Process(pid).cpu_times().system for pid in pids)


def test_what_others_take_is_told_and_what_is_ours_is_not(burning: list[int]) -> None:
    theirs, ours = Watch(lambda: ()), Watch(lambda: burning)
    began, before = time.perf_counter(), seconds_of(burning)
    theirs.begin()
    ours.begin()
    time.sleep(1.0)
    whole, less = theirs.others(), ours.others()
    burned = (seconds_of(burning) - before) / (time.perf_counter() - began) / CORES
    assert whole is not None
    assert less is not None
    assert whole > 0.8  # whatever else runs here burns them too
    assert whole - less == pytest.approx(burned, abs=0.1)


def test_a_process_that_has_gone_is_no_error() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pid = process.pid
    watch = Watch(lambda: [pid])
    watch.begin()
    time.sleep(0.05)
    found = watch.others()
    assert found is not None
    assert 0 <= found <= 1


class Others:
    """A watch that tells what it is given, share by share."""

    def __init__(self, *shares: float) -> None:
        self.shares = list(shares)

    def begin(self) -> None:
        pass

    def others(self) -> float:
        return self.shares.pop(0) if self.shares else 0.0

    def clock(self) -> float:
        return 2600.0


ONE = Timing(rounds=1, processes=1, batch_sizes=(1,))


def test_a_turn_that_others_disturbed_is_taken_again_and_the_calmer_one_kept() -> None:
    times = iter([[50.0], [10.0]])
    speeds = measure_speed({"a": lambda size: next(times)}, ONE, watch=Others(0.6, 0.01))  # type: ignore[arg-type]
    assert speeds["a"].rounds == {1: [[10.0]]}
    assert speeds["a"].others == {1: [0.01]}


def test_where_it_is_no_calmer_the_turn_stays_and_is_known_to_be_disturbed() -> None:
    times = iter([[50.0], [60.0]])
    speeds = measure_speed({"a": lambda size: next(times)}, ONE, watch=Others(0.6, 0.7))  # type: ignore[arg-type]
    assert speeds["a"].rounds == {1: [[50.0]]}
    assert speeds["a"].shares == [0.6]


def test_turns_are_taken_again_within_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "_AGAIN_S", 0.0)
    taken: list[int] = []

    def turn(size: int) -> list[float]:
        taken.append(size)
        return [1.0]

    measure_speed({"a": turn}, ONE, watch=Others(0.9, 0.0))  # type: ignore[arg-type]
    assert taken == [1]


def test_speeds_of_a_busy_machine_are_provisional_and_say_what_to_do() -> None:
    found = disturbance([0.4, None, 0.2], [2599.6, None, 3100.2], "measure again with --remeasure")
    assert (found.others, found.busiest, found.clocks) == (0.3, 0.4, (2600, 3100))
    assert found.warning == (
        "Provisional: other processes used 30% of the cores while speeds were measured, more than 10%. On a quiet "
        "machine, measure again with --remeasure."
    )
    assert disturbance([BUSY / 2] * 3, [], "").warning == ""
    assert disturbance([None], [None], "") == Disturbance()
    assert BUSY < UNSTEADY


def test_the_clock_is_the_average_of_the_cores_and_none_where_one_does_not_tell(tmp_path: Path) -> None:
    watch = Watch(list)
    watch.clocks = tmp_path
    assert watch.clock() is None
    cores = sorted(os.sched_getaffinity(0))
    for number, core in enumerate(cores):
        folder = tmp_path / f"cpu{core}" / "cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_cur_freq").write_text(f"{2_000_000 + 500_000 * number}\n")
    assert watch.clock() == pytest.approx(2000 + 250 * (len(cores) - 1))


def test_the_clock_behind_each_turn_is_kept() -> None:
    speeds = measure_speed({"a": lambda size: [1.0]}, ONE, watch=Others(0.0))  # type: ignore[arg-type]
    assert speeds["a"].clocks == [2600.0]


def test_each_variant_is_started_anew_and_larger_batches_have_a_turn_in_each_process() -> None:
    log: list[str] = []

    def variant(name: str, process: int) -> Turn:
        def turn(size: int) -> list[float]:
            log.append(f"{name}{process}x{size}")
            return [float(process)]

        return turn

    begun = {"a": 0, "b": 0}

    def renew(name: str) -> Turn:
        begun[name] += 1
        return variant(name, begun[name])

    timing = Timing(rounds=6, processes=3, batch_sizes=(1, 8))
    speeds = measure_speed({name: variant(name, 0) for name in begun}, timing, renew=renew)
    assert begun == {"a": 2, "b": 2}
    assert speeds["a"].rounds == {1: [[0.0], [0.0], [1.0], [1.0], [2.0], [2.0]], 8: [[0.0], [1.0], [2.0]]}
    assert speeds["a"].starts == (0, 2, 4)
    assert log[:4] == ["a0x1", "a0x8", "b0x1", "b0x8"]
    assert log[4:6] == ["b0x1", "a0x1"]


def test_one_that_does_not_start_again_leaves_and_the_others_go_on() -> None:
    def renew(name: str) -> Turn:
        if name == "breaks":
            raise PipelineError("no memory")
        return lambda size: [1.0]

    turns: dict[str, Turn] = {"a": lambda size: [1.0], "breaks": lambda size: [1.0]}
    assert measure_speed(turns, Timing(rounds=4, processes=2, batch_sizes=(1,)), renew=renew).keys() == {"a"}


@pytest.mark.parametrize(
    ("rounds", "processes", "starts"), [(8, 4, (0, 2, 4, 6)), (7, 3, (0, 2, 4)), (1, 4, (0,)), (5, 5, (0, 1, 2, 3, 4))]
)
def test_rounds_are_shared_by_the_processes(rounds: int, processes: int, starts: tuple[int, ...]) -> None:
    assert Timing(rounds=rounds, processes=processes).starts == starts


def of_processes(*medians: float) -> Speed:
    """A speed of processes of two rounds each, whose medians these are."""
    return Speed({1: [[median] for median in medians for _ in range(2)]}, tuple(range(0, 2 * len(medians), 2)))


def test_p50_is_the_geometric_mean_of_the_processes_so_that_ratios_are_those_of_p50s() -> None:
    parent, child = of_processes(8.0, 2.0, 4.0, 4.0), of_processes(2.0, 1.0, 1.0, 2.0)
    p50 = [speed.against(parent, parent).latency_ms.p50 for speed in (parent, child)]
    assert p50 == pytest.approx([4.0, 2**0.5])
    assert compare(parent, child).value == pytest.approx(p50[0] / p50[1])


@pytest.mark.parametrize("count", [2, 3, 4, 5, 11])
def test_the_interval_of_a_few_processes_is_students(count: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    generator = np.random.default_rng(count)
    a, b = generator.uniform(1, 2, (2, count))
    found = student_ratio(a, b)
    low, high = stats.t.interval(0.95, count - 1, loc=np.mean(np.log(a / b)), scale=stats.sem(np.log(a / b)))
    assert (found.low, found.high) == pytest.approx((math.exp(low), math.exp(high)), rel=2e-3)
    assert found.median == pytest.approx(stats.gmean(a / b))


@pytest.mark.parametrize("spread", [0.01, 0.05, 0.2])
def test_the_interval_covers_the_true_ratio_of_processes_that_differ(spread: float) -> None:
    """95 of 100 where processes differ by chance alone; the parts of a few thousand simulated measurements."""
    generator = np.random.default_rng(5)
    covered = 0
    for _ in range(3000):
        a, b = np.exp(generator.normal(0, spread, (2, 4)))
        found = student_ratio(2 * a, b)
        covered += found.low <= 2 <= found.high
    assert covered / 3000 == pytest.approx(0.95, abs=0.012)


def test_slower_is_said_only_where_the_whole_interval_says_so_and_else_it_is_unclear() -> None:
    parent = of_processes(10.0, 10.0, 10.0, 10.0)
    surely, perhaps = of_processes(12.0, 12.1, 11.9, 12.0), of_processes(12.0, 9.0, 20.0, 11.0)
    assert (compare(parent, surely).slower, compare(parent, surely).unclear) == (True, False)
    assert (compare(parent, perhaps).slower, compare(parent, perhaps).unclear) == (False, True)
    assert not compare(parent, parent).unclear
    one = Speed({1: [[20.0]]})
    assert not compare(Speed({1: [[10.0]]}), one).slower  # of one number there is no interval
    assert statistics.median(one.medians()) == 20.0


def test_the_fastest_is_so_by_the_p50_that_a_report_states() -> None:
    """By the middle of its processes `b` would be faster, and its p50 is not."""
    a, b = of_processes(2.69, 2.69, 2.69, 2.69), of_processes(2.5, 2.5, 2.5, 9.0)
    assert statistics.median(b.medians()) < statistics.median(a.medians())
    assert fastest({"a": a, "b": b}, ["a", "b"]) == "a"
    assert min((a, b), key=lambda speed: speed.against(a, a).latency_ms.p50) is a
