"""The search of tuning, on servers that are formulas: what it chooses is the best, and it does not measure the rest."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.runtime.card.execution import Execution
from serve.runtime.card.json_documents import unsealed
from serve.runtime.card.serving import Serving
from serve.runtime.engines.base import unavailable
from serve.runtime.errors import PipelineError
from serve.tune import tuning
from serve.tune.journal import Journal
from serve.tune.search import STEP, Found, Goal, Objective, Point, Search, Trial, confirmed
from serve.tune.servers import end_left, ended_in_order, remember
from serve.tune.space import Stage, certain, describe, runs_here, stages

USUAL = Serving((Execution("openvino"), Execution("onnxruntime")), batch_size=8)


class Formula:
    """A server whose capacity and service time depend on how it is set; p99 as of an M/M/1 queue."""

    def __init__(self, capacities: dict[int, float], service_ms: dict[int, float], memory: dict[int, int]) -> None:
        self.capacities, self.service_ms, self.memory = capacities, service_ms, memory
        self.asked: list[tuple[int, float | None]] = []

    def __call__(self, way: Serving, rate: float | None, effort: float) -> Point:
        size = way.batch_size
        self.asked.append((size, rate))
        capacity, memory = self.capacities[size], self.memory.get(size, 1)
        if rate is None:
            return Point(None, effort, capacity, 10, 50, 0, 0, False, memory)
        if rate >= capacity:
            return Point(rate, effort, 0, math.nan, math.nan, 0, 0, True, memory)
        p99 = self.service_ms[size] + 1000 * math.log(100) / (capacity - rate) / 10
        return Point(rate, effort, rate, p99 / 3, p99, 0, 0, False, memory)


def sizes(*values: int) -> Stage:
    return Stage("batch size", lambda base: [dataclasses.replace(base, batch_size=value) for value in values])


SIZES = (1, 2, 4, 16)


@given(
    capacities=st.lists(st.floats(200, 500), min_size=5, max_size=5),
    service_ms=st.lists(st.floats(1, 15), min_size=5, max_size=5),
)
def test_the_chosen_way_holds_a_rate_within_a_step_of_the_highest(
    capacities: list[float], service_ms: list[float]
) -> None:
    known = (USUAL.batch_size, *SIZES)
    formula = Formula(dict(zip(known, capacities, strict=True)), dict(zip(known, service_ms, strict=True)), {})
    goal = Goal(p99_ms=20)
    found = Search(formula, goal).run(USUAL, [sizes(*SIZES)])
    # p99 = service + 100 ln(100) / (capacity - rate), solved for the rate
    limits = {
        size: formula.capacities[size] - 100 * math.log(100) / (20 - formula.service_ms[size])
        for size in formula.capacities
    }
    best = found.chosen.best(goal)
    assert best is not None
    assert best.rate is not None
    assert max(limits.values()) / STEP**2 * 0.99 <= best.rate <= limits[found.chosen.way.batch_size] + 0.1
    held = [(point.rate, trial.way) for trial in found.trials for point in trial.points if point.holds(20)]
    assert max(held, key=lambda pair: pair[0] or 0)[1] == found.chosen.way


@pytest.mark.parametrize("objective", ["throughput", "latency"])
@pytest.mark.parametrize("by_chance", [True, False])
def test_a_way_that_looked_better_by_chance_is_not_taken(objective: Objective, by_chance: bool) -> None:
    usual = USUAL.batch_size
    found_with = Formula({usual: 300, 1: 400}, {usual: 5, 1: 2}, {})
    goal = Goal(objective, rate=100 if objective == "latency" else None)
    found = Search(found_with, goal).run(USUAL, [sizes(1)])
    assert found.chosen.way.batch_size == 1

    asked_again = Formula({usual: 300, 1: 300}, {usual: 5, 1: 5}, {}) if by_chance else found_with
    asked_again.asked.clear()
    sure = confirmed(found, goal, asked_again)
    assert sure.chosen.way.batch_size == (usual if by_chance else 1)
    assert [turn.won for turn in sure.turns] == [not by_chance] * (2 if by_chance else 7)
    assert asked_again.asked[:4] == [(1, asked_again.asked[0][1]), (usual, asked_again.asked[0][1])] * 2
    assert asked_again.asked[0][1] in {point.rate for point in found.chosen.points if point.holds(20)}
    assert found.chosen.outcome.endswith("better in 0 of 2" if by_chance else "better in 7 of 7")


def test_the_best_way_may_lose_one_turn_of_seven_and_not_two() -> None:
    goal = Goal()

    def after(lost: set[int]) -> Found:
        found = Search(Formula({8: 300, 1: 400}, {8: 5, 1: 5}, {}), goal).run(USUAL, [sizes(1)])
        asked: list[float] = []

        def measure(way: Serving, rate: float | None, effort: float) -> Point:
            turn = len(asked) // 2
            asked.append(way.batch_size)
            p99 = 10 if way == USUAL else 11 if turn in lost else 9
            return Point(rate, effort, 1, 1, p99, 0, 0, False, 1)

        return confirmed(found, goal, measure)

    assert after({0}).chosen.way.batch_size == 1
    assert after({6}).chosen.way.batch_size == 1
    assert after({0, 6}).chosen.way == USUAL
    assert len(after({2, 3}).turns) == 4


def test_where_the_present_way_does_not_hold_the_p99_nothing_is_asked_again() -> None:
    formula = Formula({8: 300, 1: 300}, {8: 25, 1: 2}, {})
    found = Search(formula, Goal()).run(USUAL, [sizes(1)])
    formula.asked.clear()
    assert confirmed(found, Goal(), formula).chosen.way.batch_size == 1
    assert not formula.asked


@pytest.mark.parametrize(
    ("capacities", "usual_ms", "asks"),
    [
        ((300, 400, 120), 5, [14, 14, 14]),  # the second is better: it will be asked again
        ((300, 200, 120), 5, [14, 14, 0]),  # none is: whoever is left at the end has nobody to be compared with
        ((300, 400, 120), 25, [0, 0, 0]),  # the present way does not hold 20 ms
    ],
)
def test_turns_are_expected_until_nobody_can_be_asked_again(
    capacities: tuple[int, int, int], usual_ms: int, asks: list[int]
) -> None:
    formula = Formula(dict(zip((8, 1, 2), capacities, strict=True)), {8: usual_ms, 1: 5, 2: 5}, {})
    expected: list[int] = []

    def tell(trial: Trial, left: int) -> None:
        expected.append(search.asks(left))

    search: Search = Search(formula, Goal(), tell)
    found = search.run(USUAL, [sizes(1, 2)])
    assert expected == asks
    formula.asked.clear()
    confirmed(found, Goal(), formula)
    assert len(formula.asked) == asks[-1], "all turns are won, so that none is left out"


def test_the_time_left_counts_the_turns_each_with_a_server_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter((0.0, 5.0, 10.0, 12.0, 20.0, 29.0))  # 5 s with a fresh server, 2 s with the same; 9 s with another
    monkeypatch.setattr(tuning, "time", SimpleNamespace(monotonic=lambda: next(readings)))
    point = Point(100.0, 1.0, 100.0, 1.0, 2.0, 0, 0, False, 1)
    trial = Trial(USUAL, "any", [point], "holds 100/s")
    said: list[str] = []
    clock = tuning._Clock(said.append, "own", 10.0)
    clock.timed(lambda: point)
    clock.timed(lambda: point)
    clock.tell(trial, 3, 14)  # three ways of 7 s, fourteen measurements of 5 s, 10 s for the curve
    clock.timed(lambda: point)
    clock.tell(trial, 0, 0)
    clock.ask("asking …")  # of (5 + 9) / 2 s each
    assert [line.rpartition("; ")[2] for line in said] == ["about 101 s left", "about 10 s left", "about 108 s left"]


def test_what_saturates_below_the_best_is_not_measured_at_any_rate() -> None:
    formula = Formula({8: 100, 1: 300, 2: 120}, {8: 1, 1: 1, 2: 1}, {})
    told: list[tuple[int, int]] = []
    found = Search(formula, Goal(), lambda trial, left: told.append((trial.way.batch_size, left))).run(
        USUAL, [sizes(1, 2)]
    )
    assert found.chosen.way.batch_size == 1
    assert [rate for size, rate in formula.asked if size == 2] == [None]
    assert "cannot be the best" in found.trials[2].outcome
    assert told == [(8, 2), (1, 1), (2, 0)]


def test_a_rate_that_is_missed_by_far_is_asked_for_once_and_one_that_is_missed_by_little_twice() -> None:
    def asked(p99: float) -> list[float]:
        rates: list[float] = []

        def measure(way: Serving, rate: float | None, effort: float) -> Point:
            if rate is None:
                return Point(None, effort, 100, 10, 50, 0, 0, False, 1)
            rates.append(rate)
            return Point(rate, effort, rate, 1, p99, 0, 0, False, 1)

        with pytest.raises(PipelineError, match="the best is"):
            Search(measure, Goal(p99_ms=20)).run(USUAL, [])
        return rates

    far, near = asked(31.0), asked(29.0)
    assert len(set(far)) == len(far)
    assert near == [rate for rate in far for _ in range(2)]
    assert min(far) < 10


def test_what_needs_too_much_memory_only_at_a_rate_is_not_chosen() -> None:
    def grows(way: Serving, rate: float | None, effort: float) -> Point:
        point = formula(way, rate, effort)
        return dataclasses.replace(point, memory_bytes=30) if way.batch_size == 1 and rate is not None else point

    formula = Formula({USUAL.batch_size: 100, 1: 300}, {USUAL.batch_size: 5, 1: 5}, {})
    goal = Goal(memory_bytes=20)
    found = Search(grows, goal).run(USUAL, [sizes(1)])
    assert found.chosen.way == USUAL
    assert found.chosen.best(goal) is not None
    assert [trial.fits(goal) for trial in found.trials] == [True, False]
    assert found.trials[1].outcome == "needs 0 MB"  # 30 bytes


def test_what_needs_too_much_memory_is_not_chosen() -> None:
    formula = Formula({8: 100, 1: 300}, {8: 1, 1: 1}, {8: 10, 1: 30})
    found = Search(formula, Goal(memory_bytes=20)).run(USUAL, [sizes(1)])
    assert found.chosen is found.usual
    with pytest.raises(PipelineError, match="fits into"):
        Search(formula, Goal(memory_bytes=5)).run(USUAL, [sizes(1)])


def test_a_p99_that_nothing_holds_is_said_with_the_best_that_there_was() -> None:
    formula = Formula({8: 100, 1: 100}, {8: 9, 1: 7}, {})
    with pytest.raises(PipelineError, match=r"reaches a p99 of 5 ms: the best is 1\d\.\d ms"):
        Search(formula, Goal(p99_ms=5)).run(USUAL, [sizes(1)])


@given(st.lists(st.floats(1, 15), min_size=5, max_size=5))
def test_the_lowest_latency_is_found_at_a_stated_rate(service_ms: list[float]) -> None:
    known = (USUAL.batch_size, *SIZES)
    formula = Formula(dict.fromkeys(known, 400.0), dict(zip(known, service_ms, strict=True)), {})
    found = Search(formula, Goal("latency", rate=100)).run(USUAL, [sizes(*SIZES)])
    assert formula.service_ms[found.chosen.way.batch_size] == min(service_ms)
    assert {rate for _, rate in formula.asked} == {100}
    assert found.rate == 100


def test_the_rate_of_the_latency_is_half_of_the_present_saturation_where_none_is_given() -> None:
    formula = Formula({8: 240.0, 1: 240.0}, {8: 2, 1: 1}, {})
    found = Search(formula, Goal("latency")).run(USUAL, [sizes(1)])
    assert found.rate == 120
    assert found.chosen.way.batch_size == 1


def test_later_stages_begin_at_the_best_of_those_before() -> None:
    formula = Formula({8: 100, 1: 300}, {8: 1, 1: 1}, {})
    delays = Stage("delay", lambda base: [dataclasses.replace(base, max_batch_delay_ms=9)])
    found = Search(formula, Goal()).run(USUAL, [sizes(1), delays])
    assert [(trial.way.batch_size, trial.way.max_batch_delay_ms) for trial in found.trials] == [(8, 1), (1, 1), (1, 9)]


def test_fewer_arrivals_than_the_mean_are_no_fault_of_the_servers() -> None:
    by_chance = Point(
        rate=100, seconds=1, throughput=85, p50=5, p99=15, bad=0, rejected=0, gave_up=False, memory_bytes=1
    )
    assert by_chance.holds(20)
    for fault in ({"p99": 20.1}, {"bad": 1}, {"rejected": 1}, {"gave_up": True}, {"p99": math.nan}, {"rate": None}):
        assert not dataclasses.replace(by_chance, **fault).holds(20)


class KilledError(Exception):
    pass


@pytest.mark.parametrize("goal", [Goal(), Goal("latency", rate=50)])
@pytest.mark.parametrize("torn", [False, True])
def test_killed_anywhere_it_goes_on_without_measuring_twice_and_chooses_the_same(
    tmp_path: Path, goal: Goal, torn: bool
) -> None:
    stage = [sizes(*SIZES)]

    def formula() -> Formula:
        known = (8, *SIZES)
        return Formula(
            dict(zip(known, (200, 120, 220, 260, 240), strict=True)),
            dict(zip(known, (5, 2, 3, 6, 7), strict=True)),
            {},
        )

    def run(measured: Formula, most: int) -> Found:
        journal = Journal(tmp_path / "journal", {"content": "a", "goal": 1.5})
        left = iter(range(most))

        def measure(way: Serving, rate: float | None, effort: float) -> Point:
            def really() -> Point:
                if next(left, None) is None:
                    raise KilledError
                return measured(way, rate, effort)

            return journal.point(way, rate, effort, really)

        return Search(measure, goal).run(USUAL, stage)

    whole = formula()
    expected = Search(whole, goal).run(USUAL, stage)
    pieces = formula()
    for _ in range(len(whole.asked)):
        try:
            found = run(pieces, 3)
            break
        except KilledError:
            if torn:
                with (tmp_path / "journal").open("a") as stream:
                    stream.write('{"key": "[')
    assert pieces.asked == whole.asked
    assert found.chosen.way == expected.chosen.way
    assert [trial.outcome for trial in found.trials] == [trial.outcome for trial in expected.trials]


def test_measurements_of_another_subject_are_not_taken(tmp_path: Path) -> None:
    point = Point(None, 1, 1, 1, 1, 0, 0, False, 1)
    one = Journal(tmp_path / "journal", {"content": "a"})
    one.point(USUAL, None, 1.0, lambda: point)
    assert unsealed((tmp_path / "journal").read_text().splitlines()[0]) == {"content": "a"}
    assert Journal(tmp_path / "journal", {"content": "a"}).resumed == 1
    assert Journal(tmp_path / "journal", {"content": "b"}).resumed == 0
    assert not (tmp_path / "journal").exists()


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_in_what_a_killed_tuning_has_measured_is_noticed_and_measured_anew(
    place: float, bit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("tuning") / "journal"
    points = [Point(rate, 1.0, 3.0, 4.0, 5.25, 0, 0, False, 1) for rate in (1.0, 2.0)]

    def measured() -> list[Point]:
        journal = Journal(path, {"content": "a"})
        return [
            journal.point(USUAL, point.rate, 1.0, functools.partial(dataclasses.replace, point)) for point in points
        ]

    assert measured() == points
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1 << bit
    path.write_bytes(content)
    assert measured() == points
    assert Journal(path, {"content": "a"}).resumed == 2


def test_every_setting_is_tried_by_engines_that_are_there_and_threads_that_there_are() -> None:
    found = stages("own", USUAL, most_cores=6)
    names = ["engine and its threads", "workers", "decode threads", "batch size", "batch delay"]
    assert [stage.name for stage in found] == names
    engines = [(way.executions[0].engine, way.executions[0].threads) for way in found[0].variants(USUAL)]
    assert engines == [(name, count) for name in ("openvino", "onnxruntime") for count in (1, 2, 4, None)]
    assert all(len(way.executions) == 2 for way in found[0].variants(USUAL))
    assert [way.workers for way in found[1].variants(USUAL)] == [1, 2, 4, 6]
    assert [way.decode_threads for way in found[2].variants(USUAL)] == [1, 2, 4, None]
    own, other = (stages(kind, USUAL, most_cores=16)[2] for kind in ("own", "torchserve"))
    many = [1, 2, 4, None, 16]  # None is 8: a network on a GPU may want more
    assert [way.decode_threads for way in own.variants(USUAL)] == many
    four = dataclasses.replace(USUAL, workers=4)
    assert [way.decode_threads for way in own.variants(four)] == [1, 2, None, 8, 16], "one for each core of a share"
    assert [way.decode_threads for way in other.variants(four)] == many
    eight = dataclasses.replace(USUAL, executions=(Execution("openvino", threads=8), Execution("onnxruntime")))
    workers = stages("own", eight, most_cores=16)[1].variants(eight)
    assert [(way.workers, way.executions[0].threads) for way in workers] == [(1, 8), (2, 8), (4, 4), (8, 2), (16, 1)]


def test_an_engine_that_is_not_here_is_not_tried_nor_told() -> None:
    here, away = Execution("onnxruntime"), Execution("onnxruntime-cuda", "cuda")
    usual = Serving((away, here))
    if unavailable(away.engine, "cuda") is not None:
        assert runs_here(usual) == here
        assert describe(usual).startswith("onnxruntime ")
        tried = [way.executions[0] for way in stages("own", usual, most_cores=1)[0].variants(usual)]
        assert {entry.device for entry in tried} == {"cpu"}
    assert runs_here(Serving((here, away))) == here


def test_a_way_is_served_as_it_is_told_or_not_at_all_where_the_machine_has_what_it_names() -> None:
    assert certain(USUAL) == dataclasses.replace(USUAL, strict=True)
    assert certain(dataclasses.replace(USUAL, decoder="reduced")).strict
    if unavailable("onnxruntime", "cuda") is not None:
        for named in ({"executions": (Execution("onnxruntime", "cuda"), *USUAL.executions)}, {"decoder": "nvimgcodec"}):
            usual = dataclasses.replace(USUAL, **named)
            assert certain(usual) == usual


def test_more_workers_than_cores_are_told_as_the_cores_that_there_are_at_our_own_server() -> None:
    cores = len(os.sched_getaffinity(0))
    many = dataclasses.replace(USUAL, workers=cores + 1)
    assert ("workers" in describe(many)) == (cores > 1)
    assert f"{cores + 1} workers" not in describe(many)
    assert describe(many, "torchserve").endswith(f", {cores + 1} workers")


def test_a_way_that_does_not_start_is_passed_over_and_the_first_one_ends_the_tuning() -> None:
    formula = Formula({8: 100, 4: 300, 16: 120}, {8: 1, 4: 1, 16: 1}, {})

    def measure(way: Serving, rate: float | None, effort: float) -> Point:
        if way.batch_size == 16 or (way.batch_size == 4 and rate is not None):
            raise PipelineError("the server ended: no memory")
        return formula(way, rate, effort)

    found = Search(measure, Goal()).run(USUAL, [sizes(16, 4, 8)])
    assert found.chosen is found.usual
    outcomes = [trial.outcome for trial in found.trials]
    assert outcomes[1:] == ["does not work: the server ended: no memory"] * 2
    with pytest.raises(PipelineError, match="no memory"):
        Search(measure, Goal()).run(dataclasses.replace(USUAL, batch_size=16), [sizes(8)])


def test_a_way_that_missed_the_p99_when_it_was_asked_for_longer_is_not_judged_by_the_shorter_time() -> None:
    goal = Goal("latency", p99_ms=20, rate=50)
    lucky = Point(50, 4, 50, 5, 10, 0, 0, False, 1)
    later = Point(50, 8, 50, 5, 25, 0, 0, False, 1)
    assert Trial(USUAL, "any", [lucky, later]).best(goal) is None
    assert Trial(USUAL, "any", [later, lucky]).best(goal) is None
    assert Trial(USUAL, "any", [lucky]).best(goal) == lucky


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="each process has a share of the cores")
def test_of_several_workers_each_is_told_with_the_threads_that_it_has() -> None:
    cores = len(os.sched_getaffinity(0))
    one, two = USUAL, dataclasses.replace(USUAL, workers=2)
    assert describe(one) == describe(one, "torchserve")
    assert f"openvino x{cores}, decode x{min(cores, 8)}" in describe(one)
    assert f"openvino x{cores // 2}, decode x{min(cores // 2, 8)}" in describe(two)
    assert f"openvino x{cores}, decode x{min(cores, 8)}" in describe(two, "torchserve")
    assert describe(two).endswith(", 2 workers")
    counted = dataclasses.replace(two, decode_threads=5, executions=(Execution("openvino", "cpu", threads=3),))
    assert " x3, decode x5, " in describe(counted)


def test_a_server_that_a_killed_tuning_left_is_ended_and_nobody_elses(tmp_path: Path) -> None:
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        other = psutil.Process(left.pid).create_time() - 100
        (tmp_path / "server").write_text(json.dumps([left.pid, other]))
        assert not end_left(tmp_path / "server")
        assert left.poll() is None
        remember(left.pid, tmp_path / "server")
        assert end_left(tmp_path / "server")
        assert not psutil.pid_exists(left.pid)
        assert not end_left(tmp_path / "server")
    finally:
        left.kill()
        left.wait()


def test_sigterm_leaves_in_order() -> None:
    stopped: list[str] = []

    def interrupted() -> None:
        with ended_in_order(), contextlib.ExitStack() as stack:
            stack.callback(stopped.append, "server")
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)

    with pytest.raises(SystemExit) as caught:
        interrupted()
    assert caught.value.code == 143
    assert stopped == ["server"]
