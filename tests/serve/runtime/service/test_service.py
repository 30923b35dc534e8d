"""Many threads ask one artifact: what is computed together, what is not computed at all, and who pays for whom."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from benchmarks.hostile import bombs
from benchmarks.hostile.pictures import encoded
from serve.common.options import ServingOptions
from serve.runtime.card.budget import SERVING, Backlog, Budget
from serve.runtime.card.card import load_card
from serve.runtime.card.execution import Execution
from serve.runtime.card.serving import Serving
from serve.runtime.device.device_turns import turn_at
from serve.runtime.engines.base import Engine, chain_for
from serve.runtime.errors import BrokenError, Refusal
from serve.runtime.outputs import Outputs
from serve.runtime.service.decoding import load
from serve.runtime.service.image_loading import Loaded, load_items
from serve.runtime.service.pending_request import Answered
from serve.runtime.service.predictor import Predictor
from serve.runtime.service.protocol import Request
from serve.runtime.service.service import QueueFull, Service, open_service
from serve.runtime.tasks.base import Outcome
from serve.torchserve.archive_builder import build_archive
from tests.serve import artifacts
from tests.serve.artifacts import jpeg
from tests.serve.torchserve.test_handler import context_of


class Gate:
    """An engine that lets nothing through while it is shut, and remembers who came."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.device, self.provider = engine, engine.device, engine.provider
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Semaphore(0)
        self.sizes: list[int] = []
        self.threads: set[int] = set()
        self.fault: Callable[[torch.Tensor], None] = lambda batch: None

    def run(self, batch: torch.Tensor) -> Outputs:
        self.sizes.append(len(batch))
        self.threads.add(threading.get_ident())
        self.entered.release()
        assert self.open.wait(30)
        self.fault(batch)
        return self.engine.run(batch)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return artifacts.torchscript(tmp_path_factory.mktemp("service") / "script", device="cpu")


@pytest.fixture
def gate(artifact: Path) -> Iterator[tuple[Service, Gate]]:
    with gated(artifact) as both:
        yield both


@contextmanager
def gated(artifact: Path) -> Iterator[tuple[Service, Gate]]:
    """A service and its engine, which is open at the end whatever was shut."""
    with service_of(artifact) as service:
        engine = service.predictor.engine
        assert isinstance(engine, Gate)
        yield service, engine
        engine.open.set()


def service_of(
    artifact: Path,
    budget: Budget = SERVING,
    *,
    max_batch: int = 8,
    delay_ms: int = 1,
    queue_limit: int = 300,
) -> Service:
    serving = Serving(chain_for(load_card(artifact)), budget=budget, max_batch_delay_ms=delay_ms)
    predictor = Predictor(artifact, max_batch=max_batch, budget=serving.allowance)
    predictor.engine = Gate(predictor.engine)
    service = Service(predictor, serving, decode_threads=2, queue_limit=queue_limit)
    predictor.engine.sizes.clear()
    while predictor.engine.entered.acquire(blocking=False):
        pass
    return service


def one(image: bytes, k: int = 2) -> Request:
    return Request((image,), k, listed=False)


def many(*images: bytes | Refusal, k: int = 2) -> Request:
    return Request(images, k, listed=True)


def statuses(outcomes: tuple[Outcome, ...] | list[Outcome]) -> list[int]:
    return [outcome.status if isinstance(outcome, Refusal) else 200 for outcome in outcomes]


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def shut(service: Service, gate: Gate) -> Future[Answered]:
    """A request that is in the engine and stays there."""
    gate.open.clear()
    future = service.submit(one(jpeg(0)))
    assert gate.entered.acquire(timeout=20)
    return future


_LARGE_IMAGES = """
import sys
from pathlib import Path
from benchmarks.hostile.pictures import encoded
from PIL import Image
from tests.serve.runtime.service.test_service import many, service_of
import torch

torch.set_num_threads(3)
with service_of(Path(sys.argv[1])) as service:
    def threads(): return len([*Path("/proc/self/task").iterdir()])
    before = threads()
    large = encoded(Image.linear_gradient("L").convert("RGB").resize((3000, 3000)), "PNG")
    assert [len(found.outcomes[0]) for found in service.answer_batch([many(large, large, k=2)])] == [2]
    print(before, threads())
"""


def test_a_large_image_makes_no_threads_that_would_contend_with_the_engines(artifact: Path) -> None:
    # Once more threads compute than there are cores, libgomp's wait no longer as they were measured to.
    found = subprocess.run(
        [sys.executable, "-c", _LARGE_IMAGES, artifact], capture_output=True, text=True, check=True, timeout=120
    )
    before, after = map(int, found.stdout.split())
    assert after == before


def test_every_answer_is_that_of_its_own_image_whoever_asks_beside_it(artifact: Path) -> None:
    images = [jpeg(seed, (40 + seed, 45)) for seed in range(24)]
    expected = Predictor(artifact).predict(images, 3)
    with service_of(artifact) as service:
        found: dict[int, Answered] = {}

        def ask(start: int) -> None:
            for turn in range(24):
                index = (start + turn) % 24
                found[start * 24 + turn] = service.submit(one(images[index], 3)).result(30)

        threads = [threading.Thread(target=ask, args=(start,)) for start in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert len(found) == 12 * 24
    for key, answered in found.items():
        (labels,) = answered.outcomes
        wanted = expected[sum(divmod(key, 24)) % 24]
        assert isinstance(labels, list)
        assert isinstance(wanted, list)
        assert [label.label for label in labels] == [label.label for label in wanted]
        assert [label.probability for label in labels] == pytest.approx(
            [label.probability for label in wanted], abs=1e-5
        )


def test_threads_that_share_a_predictor_take_turns_at_its_engine_and_get_their_own_answers(artifact: Path) -> None:
    predictor = Predictor(artifact, max_batch=2)
    images = [jpeg(seed, (40 + seed, 45)) for seed in range(8)]
    expected = predictor.predict(images, 2)
    engine, inside, most = predictor.engine, [0], [0]

    class Watched:
        device, provider = engine.device, engine.provider

        def run(self, batch: torch.Tensor) -> Outputs:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            time.sleep(0.001)
            inside[0] -= 1
            return engine.run(batch)

    predictor.engine = Watched()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda image: predictor.predict([image], 2)[0], images * 5))
    assert most == [1]
    for mine, wanted in zip(found, expected * 5, strict=True):
        assert isinstance(mine, list)
        assert isinstance(wanted, list)
        assert [label.index for label in mine] == [label.index for label in wanted]


def test_a_lone_request_does_not_wait_for_others(artifact: Path) -> None:
    with service_of(artifact, delay_ms=1_000_000) as service:
        answered = service.submit(one(jpeg(1))).result(60)
    assert answered.batch_size == 1
    stages = answered.stages
    assert min(stages.decode, stages.preprocess, stages.infer, stages.postprocess) > 0
    assert stages.queue >= 0


def test_a_lone_small_image_is_decoded_where_it_is_run_and_a_large_one_is_not(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def watched(*arguments: Any) -> list[Loaded]:
        threads.append(threading.get_ident())
        return load(*arguments)

    monkeypatch.setattr("serve.runtime.service.service.load", watched)
    with service_of(artifact) as service:
        for image in (jpeg(1), encoded(Image.new("RGB", (1200, 1000)), "JPEG"), jpeg(2)):
            until(lambda: service._queues._idle)
            assert statuses(service.submit(one(image)).result(30).outcomes) == [200]
        (owner,) = service.predictor.engine.threads  # type: ignore[attr-defined]
        assert [thread == owner for thread in threads] == [True, False, True]
        until(lambda: service._queues.decoding == 0)
        assert (service._queues.backlog._pixels, service._queues.backlog._requests) == (0, 0)


def test_a_lone_small_image_wakes_no_decode_thread_which_would_take_a_core_from_it(artifact: Path) -> None:
    with service_of(artifact) as service:

        def asleep() -> list[object]:
            # A thread that was woken, and has found nothing to do, waits by another lock.
            return list(service._queues._to_decode._waiters)  # type: ignore[attr-defined]

        until(lambda: service._queues._idle and len(asleep()) == service.decode_threads)
        before = asleep()
        assert statuses(service.submit(one(jpeg(1))).result(30).outcomes) == [200]
        until(lambda: service._queues._idle)
        assert asleep() == before


def test_what_comes_while_the_engine_is_busy_goes_through_it_together(gate: tuple[Service, Gate]) -> None:
    service, engine = gate
    first = shut(service, engine)
    others = [service.submit(one(jpeg(seed))) for seed in range(5)]
    until(lambda: len(service._queues.ready) == 5)
    engine.open.set()
    assert [future.result(30).batch_size for future in (first, *others)] == [1, 5, 5, 5, 5, 5]
    assert engine.sizes == [1, 5]


def test_an_engine_that_is_at_a_batch_for_much_longer_than_any_takes_stalls_until_it_goes_on(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.runtime.service.service._STALLS_S", 0.3)
    with service_of(artifact) as service:
        engine = service.predictor.engine
        assert isinstance(engine, Gate)
        assert service._stalls_s >= 10 * service.predictor.seconds[8]
        service._stalls_s = 0.3
        first = shut(service, engine)
        assert not service.stalls
        until(lambda: service.stalls)
        engine.open.set()
        first.result(30)
        until(lambda: not service.stalls)


def test_decode_threads_that_are_all_at_an_image_for_seconds_stall_until_one_goes_on(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.runtime.service.service._STALLS_S", 0.3)
    held = [threading.Event(), threading.Event()]
    begun = []

    def hold(jobs: Any, *arguments: Any) -> list[Loaded]:
        begun.append(time.monotonic())
        held[len(begun) - 1].wait(30)
        return load(jobs, *arguments)

    with service_of(artifact) as service, monkeypatch.context() as patched:
        patched.setattr("serve.runtime.service.service.load", hold)
        pair = service.submit(
            Request((jpeg(1), jpeg(2)), 2, listed=True)
        )  # more than one image is for the decode threads
        until(lambda: len(begun) == 2)
        assert not service.stalls
        until(lambda: service.stalls)
        assert time.monotonic() - max(begun) > 0.3
        held[0].set()
        until(lambda: not service.stalls)
        held[1].set()
        assert statuses(pair.result(30).outcomes) == [200, 200]


def test_what_is_answered_together_goes_through_the_engine_together(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last, held = jpeg(3), threading.Event()

    def one_late(jobs: Any, *arguments: Any) -> list[Loaded]:
        if any(work.request.images[index] == last for work, index in jobs):
            assert held.wait(30)
        return load(jobs, *arguments)

    monkeypatch.setattr("serve.runtime.service.service.load", one_late)
    with service_of(artifact) as service, ThreadPoolExecutor(1) as asking:
        service._batching_pays = True
        service.predictor.seconds[8] = 30.0  # a batch is awaited for as long as one takes
        asked = asking.submit(service.answer_batch, [one(image) for image in (jpeg(0), last, jpeg(1), jpeg(2))])
        until(lambda: len(service._queues.ready) == 3)
        time.sleep(0.05)
        assert service.predictor.engine.sizes == [], "nobody is answered before the last is"  # type: ignore[attr-defined]
        held.set()
        assert [answered.batch_size for answered in asked.result(30)] == [4] * 4
        assert service.submit(one(jpeg(4))).result(30).batch_size == 1


def test_more_images_than_go_through_at_once_are_split_and_not_all_held_decoded(artifact: Path) -> None:
    with service_of(artifact, max_batch=3) as service:
        engine = service.predictor.engine
        assert isinstance(engine, Gate)
        first = shut(service, engine)
        large = service.submit(many(*[jpeg(1)] * 40))
        until(lambda: len(service._queues.ready) >= 6)
        time.sleep(0.05)
        assert len(service._queues.ready) <= 8, "decoding goes no further than the engine will soon need"
        engine.open.set()
        assert statuses(large.result(30).outcomes) == [200] * 40
        assert first.result(30).batch_size == 1
        assert max(engine.sizes) == 3


def test_one_thread_owns_the_engine_from_its_opening_on(artifact: Path, tmp_path: Path) -> None:
    context = context_of(artifact, tmp_path, None, batch_size=2)
    with open_service(Path(context.system_properties["model_dir"]), None) as service:
        engine = Gate(service.predictor.engine)
        service.predictor.engine = engine
        for seed in range(6):
            service.submit(one(jpeg(seed))).result(30)
    assert len(engine.threads) == 1
    assert threading.get_ident() not in engine.threads


def test_a_cancelled_request_is_not_computed_and_leaves_its_place_at_once(gate: tuple[Service, Gate]) -> None:
    service, engine = gate
    first = shut(service, engine)
    dropped, kept = service.submit(one(jpeg(1))), service.submit(one(jpeg(2)))
    until(lambda: len(service._queues.ready) == 2)
    assert service.waiting == 3
    assert dropped.cancel()
    assert service.waiting == 2
    engine.open.set()
    assert kept.result(30).batch_size == 1
    assert first.result(30).batch_size == 1
    assert engine.sizes == [1, 1]
    with pytest.raises(CancelledError):
        dropped.result(1)


def test_what_waits_to_be_decoded_and_is_cancelled_is_not_kept(gate: tuple[Service, Gate]) -> None:
    """Its bytes are counted no more where they were received."""
    service, engine = gate
    first = shut(service, engine)
    others = [service.submit(one(jpeg(1))) for _ in range(service._queues._ready_limit + 5)]
    until(lambda: len(service._queues.ready) >= service._queues._ready_limit and service._queues.decoding == 0)
    waiting = [work.future for work in service._queues.works]
    assert len(waiting) >= 3
    for future in waiting:
        assert future.cancel()
    assert not service._queues.works
    engine.open.set()
    assert {
        status
        for future in (first, *others)
        if future not in waiting
        for status in statuses(future.result(30).outcomes)
    } == {200}
    assert (service._queues.backlog._pixels, service._queues.backlog._requests) == (0, 0)


def test_a_request_whose_deadline_passed_is_not_computed(gate: tuple[Service, Gate]) -> None:
    service, engine = gate
    first = shut(service, engine)
    late = service.submit(one(jpeg(1)), deadline=time.monotonic() + 600)
    never = service.submit(one(jpeg(1)), deadline=time.monotonic() - 1)
    in_time = service.submit(one(jpeg(2)), deadline=time.monotonic() + 60)
    assert statuses(never.result(30).outcomes) == [504]
    until(lambda: len(service._queues.ready) == 2)
    # Decoded in time, and then time passes; in truth the deadline moves, or a busy machine might pass it before.
    (waits,) = (ready.work for ready in service._queues.ready if ready.work.future is late)
    waits.deadline = time.monotonic()
    engine.open.set()
    assert statuses(late.result(30).outcomes) == [504]
    assert statuses(in_time.result(30).outcomes) == statuses(first.result(30).outcomes) == [200]
    assert engine.sizes == [1, 1]


def test_more_requests_than_may_wait_are_refused_at_once(artifact: Path) -> None:
    with service_of(artifact, queue_limit=3) as service:
        engine = service.predictor.engine
        assert isinstance(engine, Gate)
        accepted = [shut(service, engine), service.submit(one(jpeg(1)))]
        room = service.full
        accepted.append(service.submit(one(jpeg(1))))
        assert room is None
        assert service.full == "3 requests are already waiting: try again later"
        with pytest.raises(QueueFull, match="3 requests are already waiting"):
            service.submit(one(jpeg(1)))
        accepted[2].cancel()
        again = service.submit(one(jpeg(1)))
        engine.open.set()
        assert [statuses(future.result(30).outcomes) for future in (*accepted[:2], again)] == [[200]] * 3


def test_a_request_of_many_images_does_not_keep_a_single_one_waiting(gate: tuple[Service, Gate]) -> None:
    service, _ = gate
    slow = encoded(Image.effect_noise((1500, 1500), 50), "PNG")
    order: list[str] = []
    large = service.submit(many(*[slow] * 20))
    large.add_done_callback(lambda future: order.append("large"))
    single = service.submit(one(jpeg(1)))
    single.add_done_callback(lambda future: order.append("single"))
    assert statuses(large.result(60).outcomes) == [200] * 20
    assert order == ["single", "large"]
    assert service.waiting == 0


def test_the_budget_of_one_request_holds_and_its_neighbour_is_answered(artifact: Path) -> None:
    budget = replace(SERVING, request_pixels=10_000, image_pixels=20_000)
    with service_of(artifact, budget) as service:
        good = jpeg(1, (60, 45))  # 2,700 pixels
        futures = [
            service.submit(request)
            for request in (many(*[good] * 4), many(good, b"no image", bombs.webp(7000), b""), one(good))
        ]
        found = [statuses(future.result(30).outcomes) for future in futures]
    assert found == [[413] * 4, [200, 415, 413, 400], [200]]


def test_a_slow_request_is_cut_off_between_its_images(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = jpeg(2)

    def decode(items: list[bytes], *arguments: Any) -> list[Loaded]:
        time.sleep(2 if slow in items else 0)
        return load_items(items, *arguments)

    monkeypatch.setattr("serve.runtime.service.decoding.load_items", decode)
    with service_of(artifact, replace(SERVING, request_seconds=1.5)) as service:
        late, good = service.submit(many(*[slow] * 6)), service.submit(one(jpeg(1)))
        found = statuses(late.result(60).outcomes)
        assert statuses(good.result(30).outcomes) == [200]
    assert set(found) == {200, 503}
    assert found.count(200) <= 2  # each thread had begun one


def test_what_has_waited_for_longer_than_a_batch_may_take_is_not_decoded(artifact: Path) -> None:
    with service_of(artifact, replace(SERVING, batch_seconds=1e-6)) as service:
        (outcome,) = service.submit(one(jpeg(1))).result(30).outcomes
    assert isinstance(outcome, Refusal)
    assert outcome.status == 503
    assert "try again later" in outcome.message


def test_pixels_that_wait_are_bounded_and_no_large_request_takes_a_small_ones_share() -> None:
    backlog = Backlog(Budget(batch_pixels=100, request_pixels=90))
    too_large = backlog.admit([50, 50])
    assert too_large is not None
    assert too_large.status == 413
    assert backlog.admit([60]) is None
    refused = backlog.admit([60])
    assert refused is not None
    assert refused.status == 503
    assert backlog.admit([50]) is None, "an equal share of two"
    assert backlog.admit([30]) is None, "an equal share of three"
    backlog.leave(60)
    backlog.leave(50)
    assert backlog.admit([60]) is None


def test_refused_requests_leave_no_pixels_behind(artifact: Path) -> None:
    budget = replace(SERVING, batch_pixels=30_000)
    with service_of(artifact, budget) as service:
        for _ in range(50):
            service.submit(many(jpeg(1), b"broken", jpeg(2)[:200])).result(30)
            service.submit(many(jpeg(1), jpeg(1)), deadline=time.monotonic() - 1).result(30)
            service.submit(many(*[jpeg(1)] * 4)).cancel()
        until(lambda: service.waiting == 0 and not service._queues.works and not service._queues.decoding)
        assert (service._queues.backlog._pixels, service._queues.backlog._requests) == (0, 0)


def test_where_memory_is_too_short_for_a_batch_it_goes_in_halves(gate: tuple[Service, Gate]) -> None:
    service, engine = gate

    def short(batch: torch.Tensor) -> None:
        if len(batch) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    first = shut(service, engine)
    others = [service.submit(one(jpeg(seed))) for seed in range(5)]
    until(lambda: len(service._queues.ready) == 5)
    engine.fault = short
    engine.open.set()
    answers = [future.result(30) for future in others]
    expected = service.predictor.predict([jpeg(seed) for seed in range(5)], 2)
    for answered, wanted in zip(answers, expected, strict=True):
        (found,) = answered.outcomes
        assert isinstance(found, list)
        assert isinstance(wanted, list)
        assert [label.index for label in found] == [label.index for label in wanted]
    assert statuses(first.result(30).outcomes) == [200]
    assert engine.sizes[:5] == [1, 5, 2, 3, 1]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (MemoryError(), 503),
        (torch.OutOfMemoryError("CUDA out of memory"), 503),
        (RuntimeError("[ONNXRuntimeError] : Failed to allocate memory for requested buffer of size 1024"), 503),
        (RuntimeError("shape mismatch"), 500),
    ],
)
def test_an_engine_that_fails_on_one_image_answers_the_others_and_the_next(
    gate: tuple[Service, Gate], error: Exception, status: int
) -> None:
    service, engine = gate
    black = encoded(Image.new("RGB", (40, 40)), "PNG")

    def fault(batch: torch.Tensor) -> None:
        if (batch.flatten(1).std(dim=1) < 0.3).any():
            raise error

    engine.fault = fault
    found = service.submit(many(jpeg(1), black, jpeg(2), jpeg(3))).result(30)
    assert statuses(found.outcomes) == [200, status, 200, 200]
    assert statuses(service.submit(one(jpeg(1))).result(30).outcomes) == [200]
    assert service.broken is None


def test_a_lost_device_is_told_to_all_who_wait_and_to_all_who_come(gate: tuple[Service, Gate]) -> None:
    service, engine = gate

    def fault(batch: torch.Tensor) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be …")

    first = shut(service, engine)
    others = [service.submit(many(jpeg(seed), jpeg(seed))) for seed in range(20)]
    engine.fault = fault
    engine.open.set()
    for future in (first, *others):
        with pytest.raises(BrokenError, match="illegal memory access"):
            future.result(30)
    with pytest.raises(BrokenError, match="can no longer be used by this process"):
        service.submit(one(jpeg(1)))
    assert service.broken is not None
    assert service.waiting == 0
    assert engine.sizes == [1]


def test_what_an_engine_is_at_holds_the_others_whatever_is_refused_beside_it(gate: tuple[Service, Gate]) -> None:
    service, engine = gate
    until(lambda: service.holding is None)
    first = shut(service, engine)
    held = service.holding
    assert held is not None
    for image in (b"no image", b"none either"):
        assert statuses(service.submit(one(image)).result(30).outcomes) == [415]
        assert service.holding == held
    second = service.submit(one(jpeg(1)))
    engine.open.set()
    assert engine.entered.acquire(timeout=20)
    assert statuses(first.result(30).outcomes + second.result(30).outcomes) == [200, 200]
    until(lambda: service.holding is None)


def test_images_that_are_decoded_hold_the_others_where_every_thread_has_one(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other they are not the same job, however late they are answered."""
    tickets, entered = threading.Semaphore(0), threading.Semaphore(0)

    def slow(*arguments: Any) -> list[Loaded]:
        entered.release()
        assert tickets.acquire(timeout=30)
        return load(*arguments)

    monkeypatch.setattr("serve.runtime.service.service.load", slow)
    large = encoded(Image.new("RGB", (1200, 1000)), "JPEG")
    with service_of(artifact) as service:
        futures = [service.submit(one(large))]
        assert entered.acquire(timeout=20)
        until(lambda: service.holding is None)  # the other thread would take the next
        futures += [service.submit(one(large)) for _ in range(4)]
        assert entered.acquire(timeout=20)
        seen: list[int | None] = []
        for _ in range(3):
            until(lambda: service.holding not in (None, *seen))
            seen.append(service.holding)
            tickets.release()
            assert entered.acquire(timeout=20)
        tickets.release(len(futures))
        assert [statuses(future.result(30).outcomes) for future in futures] == [[200]] * 5
        until(lambda: service.holding is None)


def test_draining_answers_what_was_accepted_and_takes_no_more(gate: tuple[Service, Gate]) -> None:
    service, engine = gate
    futures = [shut(service, engine), *(service.submit(one(jpeg(seed))) for seed in range(10))]
    assert not service.drain(0.05)
    with pytest.raises(QueueFull, match="shutting down"):
        service.submit(one(jpeg(1)))
    engine.open.set()
    assert service.drain(30)
    assert all(statuses(future.result(0).outcomes) == [200] for future in futures)


def test_closing_leaves_nobody_waiting_and_no_thread(artifact: Path) -> None:
    before = threading.active_count()
    service = service_of(artifact)
    engine = service.predictor.engine
    assert isinstance(engine, Gate)
    futures = [shut(service, engine), *(service.submit(many(*[jpeg(1)] * 30)) for _ in range(10))]
    threading.Timer(0.1, engine.open.set).start()
    service.close()
    assert {status for future in futures for status in statuses(future.result(0).outcomes)} <= {200, 503}
    until(lambda: threading.active_count() == before)


def test_an_empty_or_wholly_refused_request_is_answered(gate: tuple[Service, Gate]) -> None:
    service, engine = gate
    refusal = Refusal(400, "instance 0: no")
    assert service.submit(many()).result(30).outcomes == ()
    answered = service.submit(many(refusal, refusal)).result(30)
    assert (answered.outcomes, answered.batch_size) == ((refusal, refusal), 0)
    assert engine.sizes == []


def test_a_gpu_has_one_turn_for_all_and_the_cpu_one_for_each() -> None:
    first = turn_at(torch.device("cuda:0"))
    assert turn_at(torch.device("cuda", 0)) is first
    assert turn_at(torch.device("cuda")) is first  # the current one
    assert turn_at(torch.device("cuda:1")) is not first
    assert turn_at(torch.device("cpu")) is not turn_at(torch.device("cpu"))
    with first, first:  # who is in it may enter it again
        pass


@pytest.mark.parametrize("device", ["cpu", "cuda:7"])
def test_models_on_one_gpu_run_in_turns_and_those_on_the_cpu_beside_each_other(
    device: str, artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The networks run here, on the CPU; only whose turn it is goes by the other device.
    monkeypatch.setattr("serve.runtime.service.predictor.turn_at", lambda _: turn_at(torch.device(device)))
    with service_of(artifact) as one_model, service_of(artifact) as other_model:
        (first, second) = engines = one_model.predictor.engine, other_model.predictor.engine
        assert isinstance(first, Gate)
        assert isinstance(second, Gate)
        assert len({id(engine) for engine in engines}) == 2
        inside = shut(one_model, first)
        waiting = other_model.submit(one(jpeg(1)))
        assert second.entered.acquire(timeout=0.5 if device != "cpu" else 20) == (device == "cpu")
        first.open.set()
        assert statuses(inside.result(20).outcomes) == statuses(waiting.result(20).outcomes) == [200]


def test_an_archive_opens_as_its_serving_json_says(artifact: Path, tmp_path: Path) -> None:
    build_archive(artifact, tmp_path / "x.mar", model_name="x", options=ServingOptions())
    context = context_of(artifact, tmp_path, None, batch_size=3)
    with open_service(Path(context.system_properties["model_dir"]), None, decode_threads=1) as service:
        assert service.predictor.max_batch == 3
        assert sorted(service.predictor.seconds) == [1, 2, 3]
        assert statuses(service.submit(many(jpeg(1), jpeg(2))).result(30).outcomes) == [200, 200]


def test_kept_answers_count_in_the_budget_until_their_request_is_answered(tmp_path: Path) -> None:
    """Eight images of 480 pixels, each with a map of 1,024 bytes: together 12,032."""
    folder = artifacts.segmenter(tmp_path / "maps")
    pictures = tuple(jpeg(number, (20, 24)) for number in range(8))
    execution = Execution("torchscript")

    def answered(pixels: int, requests: int) -> list[int]:
        rules = Serving((execution,), budget=replace(SERVING, batch_pixels=pixels), batch_size=4)
        with Service(Predictor(folder, execution, max_batch=4), rules) as service:
            request = Request(pictures, "png", listed=True)
            cancelled = service.submit(request)
            cancelled.cancel()
            found = [service.submit(request).result(30) for _ in range(requests)]
            until(lambda: service._queues.backlog._pixels == 0)  # what was cancelled leaves when it is decoded
            assert service._queues.backlog._requests == 0
        return [status for each in found for status in statuses(each.outcomes)]

    assert answered(12_031, 1) == [503] * 8
    assert answered(30_000, 4) == [200] * 32
