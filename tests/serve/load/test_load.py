"""The load generator against real servers that answer well, late, wrongly, in other people's names, or not at all."""

from __future__ import annotations

import itertools
import json
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.load.answer_check import Checker, Verdict
from serve.load.generator import generate
from serve.load.generator_process import measure
from serve.load.histogram import Histogram, merged
from serve.load.http_connection import stages
from serve.load.plan import Plan, Result, Target
from serve.load.workload import Item, Known, Workload, instances
from serve.runtime.errors import UserError

#: What a server of a test does with a body: status, answer, extra headers; None closes the connection.
Reply = tuple[int, bytes, dict[str, str]] | None


def classes(*probabilities: float) -> bytes:
    best = sorted(enumerate(probabilities), key=lambda pair: -pair[1])
    return json.dumps([{"index": index, "label": str(index), "probability": value} for index, value in best]).encode()


def known(*probabilities: float) -> Known:
    return Known(json.loads(classes(*probabilities)))


ITEMS = (
    Item("one", b"1" * 100_000, known=(known(0.7, 0.2, 0.1),)),
    Item("two", b"2" * 300, known=(known(0.1, 0.8, 0.1),)),
    Item("bad", b"3", known=(Known(status=415),)),
)
WORKLOAD = Workload(ITEMS, "classification")


RIGHT: dict[bytes, tuple[int, bytes]] = {
    b"1": (200, classes(0.7, 0.2, 0.1)),
    b"2": (200, classes(0.1, 0.8, 0.1)),
    b"3": (415, b'{"error": "not an image"}'),
}


@contextmanager
def server(reply: Callable[[bytes], Reply]) -> Iterator[Target]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # or head and body are two segments, and the kernel waits 40 ms between them

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            answered = reply(body) if self.headers["X-Token"] == "t" else (401, b"{}", {})
            if answered is None:
                self.close_connection = True
                return
            status, content, headers = answered
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running.daemon_threads = True
    thread = threading.Thread(target=running.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield Target(f"127.0.0.1:{running.server_address[1]}", "/predictions/x", {"X-Token": "t"})
    finally:
        running.shutdown()
        thread.join()
        running.server_close()


def right(body: bytes) -> Reply:
    return *RIGHT[body[:1]], {"Server-Timing": 'queue;dur=1.5, infer;desc="x";dur=4'}


@pytest.mark.parametrize("clients", [1, 3])
def test_every_answer_of_the_closed_loop_is_counted_once_and_checked(clients: int) -> None:
    asked: Counter[bytes] = Counter()
    bodies = {item.body for item in ITEMS}

    def count(body: bytes) -> Reply:
        assert body in bodies
        asked[body[:1]] += 1
        return right(body)

    with server(count) as target:
        found = generate(Plan(target, clients, seconds=0.5, warm_s=0), WORKLOAD)
    assert found.bad == 0
    assert found.faults == ()
    # Those that were under way at the end were asked and not counted.
    assert 0 <= sum(asked.values()) - found.good <= clients
    assert 0 <= asked[b"3"] - found.counts["refused"] <= clients
    assert len(found.latency) == found.good
    assert found.throughput == pytest.approx(found.good / 0.5)
    assert found.stages == {"queue": 1.5, "infer": 4.0}
    assert max(asked.values()) - min(asked.values()) <= 30  # a deck holds each 21 or 22 times


def due(rate: float, seconds: float, seed: int = 0) -> list[float]:
    """When requests are due, in seconds from the beginning: a Poisson process of that seed, which begins with one."""
    gaps, times = random.Random(seed), [0.0]
    while times[-1] < seconds:
        times.append(times[-1] + gaps.expovariate(rate))
    return times[:-1]


def test_the_open_loop_sends_at_its_rate_and_counts_from_when_a_request_was_due() -> None:
    one_at_a_time = threading.Lock()
    arrived: list[float] = []
    woke = 0.0

    def stall(body: bytes) -> Reply:
        nonlocal woke
        with one_at_a_time:
            arrived.append(time.perf_counter())
            if len(arrived) == 60:
                time.sleep(0.5)  # everybody waits
                woke = time.perf_counter()
        return right(body)

    begun = time.perf_counter()
    with server(stall) as target:
        found = generate(Plan(target, 8, rate=200, seconds=1, warm_s=0, seed=3), WORKLOAD)
    ended = time.perf_counter()
    times = due(200, 1, seed=3)
    assert (found.bad, found.good, len(found.latency)) == (0, len(times), len(times))
    # The first was due between `begun` and `arrived[0]`. Whatever was due in the stall, or from then on, cannot have
    # been answered before its end. Eight clients that wait for answers, or times from sending on, would miss most.
    waited = sum(begun + at >= arrived[59] and arrived[0] + at <= woke - 0.051 for at in times)
    late = sum(count for bucket, count in found.latency.counts.items() if Histogram({bucket: 1}).mean > 50)
    assert late >= waited
    assert found.latency.percentile(100) < 1.01e3 * (ended - begun)


@pytest.mark.parametrize("spread", [0, 12])
def test_the_open_loop_opens_as_many_connections_as_it_is_told_before_one_is_used_again(spread: int) -> None:
    asked: Counter[int] = Counter()  # by the server's thread: one for each connection

    def count(body: bytes) -> Reply:
        asked[threading.get_ident()] += 1
        return right(body)

    with server(count) as target:
        found = generate(Plan(target, 64, rate=100, seconds=1, warm_s=0, spread=spread), WORKLOAD)
    assert found.bad == 0
    if spread:
        assert len(asked) >= spread
        assert max(asked.values()) < sum(asked.values()) / 4, "they are used in turns"
    else:
        assert max(asked.values()) > sum(asked.values()) / 4, "what is open and idle is used"


def test_a_rate_counts_what_came_and_not_what_waits_in_a_queue_that_fills() -> None:
    one_at_a_time = threading.Lock()

    def slowly(body: bytes) -> Reply:
        with one_at_a_time:
            time.sleep(0.05)
        return right(body)

    with server(slowly) as target:
        found = generate(Plan(target, 64, rate=40, seconds=1.5, warm_s=0.2), WORKLOAD)
    assert found.good == sum(at >= 0.2 for at in due(40, 1.7))  # all that were due are answered, in the end
    # In 1.5 s such a server gives 30 answers at most, and the one that it is at when they begin.
    assert 0 < found.came <= 31
    assert found.throughput == found.came / 1.5
    assert len(found.latency) == found.good


def test_when_requests_are_due_depends_on_the_seed_alone_and_none_is_left_out_at_the_end() -> None:
    asked: list[bytes] = []

    def answer(body: bytes) -> Reply:
        asked.append(body)
        return right(body)

    for seed, clients, items in ((1, 1, ITEMS), (1, 4, ITEMS[:1]), (2, 4, ITEMS)):
        asked.clear()
        with server(answer) as target:
            found = generate(
                Plan(target, clients, rate=300, seconds=0.2, warm_s=0, seed=seed), Workload(items, "classification")
            )
        assert found.good == len(asked) == len(due(300, 0.2, seed))


def test_requests_that_wait_for_a_connection_are_late_too() -> None:
    def slow(body: bytes) -> Reply:
        time.sleep(0.05)
        return right(body)

    with server(slow) as target:
        found = generate(Plan(target, 1, rate=100, seconds=0.5, warm_s=0, timeout_s=10), WORKLOAD)
    times = due(100, 0.5)
    assert found.good == len(times)
    assert found.latency.percentile(100) > 0.99e3 * (0.05 * len(times) - times[-1])  # the last at 20 a second


def test_a_generator_that_is_kept_from_sending_tells_by_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Checker):
        asked = 0

        def check(self, item: Item, status: int, body: bytes) -> tuple[Verdict, str]:
            Slow.asked += 1
            if Slow.asked == 20:
                time.sleep(0.4)
            return super().check(item, status, body)

    monkeypatch.setattr("serve.load.generator.Checker", Slow)
    begun = time.perf_counter()
    with server(right) as target:
        found = generate(Plan(target, 4, rate=100, seconds=1, warm_s=0), WORKLOAD)
    # From when the first was due that it slept through.
    longest = max(later - sooner for sooner, later in itertools.pairwise(due(100, 1)))
    assert 1e3 * (0.4 - longest) < found.late_ms < 1e3 * (time.perf_counter() - begun)
    assert Result.from_json(json.loads(json.dumps(found.to_json()))).late_ms == found.late_ms


def test_it_gives_up_when_a_request_has_waited_too_long() -> None:
    def slow(body: bytes) -> Reply:
        time.sleep(0.05)
        return right(body)

    begun = time.monotonic()
    with server(slow) as target:
        found = generate(Plan(target, 1, rate=200, seconds=20, warm_s=0, give_up_ms=300), WORKLOAD)
    assert found.gave_up
    assert found.seconds < 10
    assert time.monotonic() - begun < 10


def swapped(body: bytes) -> Reply:
    other = {b"1": b"2", b"2": b"1"}.get(body[:1], body[:1])
    return *RIGHT[other], {}


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        (swapped, "wrong"),
        (lambda body: (200, classes(0.7, 0.2, 0.1), {}), "wrong"),
        (lambda body: (200, b'[{"index": 0, "probability": NaN}]', {}), "wrong"),
        (lambda body: (400, b"{}", {}), "wrong"),
        (lambda body: (503, b"{}", {}), "rejected"),
        (lambda body: (500, b"{}", {}), "failed"),
        (lambda body: None, "lost"),
        (lambda body: (200, b"[]", {"Content-Length": "3"}), "lost"),
    ],
)
def test_what_goes_wrong_is_told_apart(reply: Callable[[bytes], Reply], verdict: str) -> None:
    with server(reply) as target:
        # Only where nothing comes must it be given up soon; elsewhere a busy machine must not make an answer late.
        timeout_s = 0.5 if verdict == "lost" else 30
        found = generate(
            Plan(target, 2, seconds=0.2, warm_s=0, timeout_s=timeout_s), Workload(ITEMS[:2], "classification")
        )
    assert set(found.counts) - {verdict} <= {"answered"}
    assert found.counts[verdict] > 0
    if verdict != "rejected":
        assert found.faults[0].startswith(f"{verdict}: ")


def test_nobody_listening_is_lost_requests_and_no_exception() -> None:
    with server(right) as target:
        pass
    found = generate(Plan(target, 2, rate=50, seconds=0.3, warm_s=0, timeout_s=0.2), WORKLOAD)
    assert found.good == 0
    assert found.counts["lost"] > 0
    assert "no connection" in found.faults[0]


def test_a_server_that_closes_after_each_answer_loses_nothing() -> None:
    with server(lambda body: (*RIGHT[body[:1]], {"Connection": "close"})) as target:
        found = generate(Plan(target, 3, seconds=0.3, warm_s=0), WORKLOAD)
    assert found.bad == 0
    assert found.good > 3


def test_a_process_of_its_own_finds_the_same_and_tells_its_processor_time(tmp_path: Path) -> None:
    folder = WORKLOAD.save(tmp_path / "workload")
    with server(right) as target:
        found = measure(Plan(target, 2, seconds=0.5, warm_s=0.1), folder)
    assert found.bad == 0
    assert found.good > 10
    assert 0 < found.cpu_s <= 0.6
    assert type(found).from_json(json.loads(json.dumps(found.to_json()))) == found


def test_a_workload_is_read_back_as_it_was(tmp_path: Path) -> None:
    kept = Workload(
        (*ITEMS, instances("all", ITEMS, weight=0.5), Item("echo", b"\xff", exact=b"\x00")), "classification", 0.3
    )
    assert Workload.load(kept.save(tmp_path)) == kept


def test_instances_are_compared_one_by_one_in_order() -> None:
    item = instances("all", ITEMS)
    assert json.loads(item.body)["instances"][2] == {"b64": "Mw=="}
    one, two, bad = (json.loads(RIGHT[body][1]) for body in (b"1", b"2", b"3"))
    check = Checker("classification", 0.02).check

    def answer(*predictions: object) -> bytes:
        return json.dumps({"predictions": predictions}).encode()

    assert check(item, 200, answer(one, two, bad)) == ("answered", "")
    assert check(item, 200, answer(two, one, bad))[0] == "wrong"
    assert check(item, 200, answer(one, two, two))[0] == "wrong"
    assert check(item, 200, answer(one, two))[0] == "wrong"
    assert check(item, 415, answer(one, two, bad))[0] == "wrong"


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (classes(0.715, 0.19, 0.1), True),
        (classes(0.73, 0.19, 0.1), False),
        (json.dumps(json.loads(classes(0.7, 0.2, 0.1))[:1]).encode(), True),
        (json.dumps(json.loads(classes(0.7, 0.2, 0.1))[1:2]).encode(), False),  # not the best
        (json.dumps(json.loads(classes(0.7, 0.2, 0.1))[:1] * 2).encode(), False),
        (b'{"0": 0.7, "1": 0.2}', True),
        (b"[]", False),
        (b"{", False),
        (b'[{"index": 7, "probability": 0.7}]', False),
    ],
)
def test_an_answer_is_the_best_classes_within_the_tolerance(answer: bytes, right: bool) -> None:
    assert (Checker("classification", 0.02).check(ITEMS[0], 200, answer)[0] == "answered") == right


def test_images_that_answer_alike_are_named_and_can_be_left_out() -> None:
    twin = Item("twin", b"4", known=(known(0.68, 0.21, 0.11),))
    assert Workload((*ITEMS, twin), "classification").confusable() == [("one", "twin")]
    assert Workload((ITEMS[0], twin, ITEMS[1]), "classification").told_apart().items == ITEMS[:2]


@given(st.lists(st.floats(0.01, 1e5), min_size=1, max_size=200), st.floats(0.1, 100))
def test_percentiles_are_those_of_the_values_within_a_quarter_of_a_percent(values: list[float], share: float) -> None:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    exact = sorted(values)[max(1, math.ceil(len(values) * share / 100)) - 1]
    assert histogram.percentile(share) == pytest.approx(exact, rel=0.0025)
    assert histogram.mean == pytest.approx(sum(values) / len(values), rel=0.0025)
    assert Histogram.from_json(json.loads(json.dumps(histogram.to_json()))) == histogram
    assert len(merged([histogram, histogram])) == 2 * len(values)
    assert math.isnan(Histogram().percentile(share))


@pytest.mark.parametrize(
    ("header", "told"),
    [
        ("queue;dur=0.25, decode;dur=1", {"queue": 0.25, "decode": 1.0}),
        ('total;desc="all of it";dur=7.5', {"total": 7.5}),
        ("cache, miss;dur=2e1", {"miss": 20.0}),
        ("", {}),
    ],
)
def test_server_timings_are_read(header: str, told: dict[str, float]) -> None:
    assert stages(header) == told


@pytest.mark.parametrize("wrong", [{"clients": 0}, {"rate": 0.0}, {"rate": math.nan}, {"seconds": 0.0}])
def test_a_plan_that_means_nothing_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError):
        Plan(Target("127.0.0.1:1", "/"), **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("address", ["localhost", "localhost:http", ":80"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(UserError, match="host:port"):
        generate(Plan(Target(address, "/"), seconds=0.1), WORKLOAD)
