"""A lone request is done by the thread that asks, where that thread says so: never beside the engine's, and as well."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from PIL import Image

from benchmarks.hostile.pictures import encoded
from serve.runtime.errors import BrokenError, Refusal
from serve.runtime.outputs import Outputs
from serve.runtime.service.pending_request import Answered
from serve.runtime.service.service import Service
from tests.serve import artifacts
from tests.serve.artifacts import jpeg
from tests.serve.runtime.service.test_service import Gate, gated, many, one, statuses, until

LARGE = encoded(Image.new("RGB", (1200, 1000)), "JPEG")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return artifacts.onnx(tmp_path_factory.mktemp("here") / "onnx", device="cpu")


@pytest.fixture
def idle(artifact: Path) -> Iterator[tuple[Service, Gate]]:
    with gated(artifact) as (service, engine):
        engine.threads.clear()
        until(lambda: service._queues._idle)
        yield service, engine


def asked(service: Service, engine: Gate, image: bytes = jpeg(0)) -> tuple[threading.Thread, list[Future[Answered]]]:
    """A thread that asks and is in the shut engine by itself, and what it has got when it ends."""
    engine.open.clear()
    found: list[Future[Answered]] = []
    thread = threading.Thread(target=lambda: found.append(service.submit(one(image), here=True)))
    thread.start()
    assert engine.entered.acquire(timeout=20)
    assert engine.threads == {thread.ident}
    return thread, found


def test_a_lone_image_is_answered_before_its_caller_goes_on_as_it_is_otherwise(idle: tuple[Service, Gate]) -> None:
    service, engine = idle
    for seed in range(3):
        future = service.submit(one(jpeg(seed)), here=True)
        assert future.done()
        assert engine.threads == {threading.get_ident()}
        engine.threads.clear()
        found, other = future.result(), service.submit(one(jpeg(seed))).result(30)
        assert threading.get_ident() not in engine.threads
        assert (found.outcomes, found.batch_size) == (other.outcomes, other.batch_size)
        assert found.stages.infer > 0 < found.stages.decode
        engine.threads.clear()
        until(lambda: service._queues._idle)
    assert service.waiting == 0
    assert (service._queues.backlog._pixels, service._queues.backlog._requests) == (0, 0)


def test_who_waits_for_one_answer_computes_it(idle: tuple[Service, Gate]) -> None:
    service, engine = idle
    assert [statuses(found.outcomes) for found in service.answer_batch([one(jpeg(0))])] == [[200]]
    assert engine.threads == {threading.get_ident()}
    assert [statuses(found.outcomes) for found in service.answer_batch([one(jpeg(0)), one(jpeg(1))])] == [[200]] * 2
    assert len(engine.threads) == 2


def test_what_is_no_image_is_refused_there_and_no_engine_is_asked(idle: tuple[Service, Gate]) -> None:
    service, engine = idle
    (outcome,) = service.submit(one(b"no image"), here=True).result(0).outcomes
    assert isinstance(outcome, Refusal)
    assert outcome.status == 415
    assert engine.threads == set()
    until(lambda: service._queues._idle)
    assert service.submit(one(jpeg(0)), here=True).done()


def test_large_images_and_several_are_left_to_the_services_own_threads(idle: tuple[Service, Gate]) -> None:
    service, engine = idle
    for request in (one(LARGE), many(jpeg(0), jpeg(1))):
        assert set(statuses(service.submit(request, here=True).result(30).outcomes)) == {200}
        assert threading.get_ident() not in engine.threads
        until(lambda: service._queues._idle)


def test_an_engine_that_is_bound_to_its_thread_is_left_to_that(tmp_path: Path) -> None:
    with gated(artifacts.torchscript(tmp_path / "script", device="cpu")) as (service, engine):
        until(lambda: service._queues._idle)
        assert statuses(service.submit(one(jpeg(0)), here=True).result(30).outcomes) == [200]
        assert service.here_s == math.inf
        assert threading.get_ident() not in engine.threads


def test_beside_another_request_it_is_not(idle: tuple[Service, Gate]) -> None:
    service, engine = idle
    engine.open.clear()
    first = service.submit(one(jpeg(0)))
    assert engine.entered.acquire(timeout=20)
    second = service.submit(one(jpeg(1)), here=True)
    assert not second.done()
    engine.open.set()
    assert [statuses(future.result(30).outcomes) for future in (first, second)] == [[200], [200]]
    assert threading.get_ident() not in engine.threads


def test_what_comes_meanwhile_is_decoded_and_waits_for_the_engine(idle: tuple[Service, Gate]) -> None:
    service, engine = idle
    thread, found = asked(service, engine)
    others = [service.submit(one(jpeg(seed)), here=True) for seed in (1, 2)]
    until(lambda: len(service._queues.ready) == 2)
    with service._queues.lock:
        service._queues._to_infer.notify_all()  # whatever wakes the engine's thread
    time.sleep(0.05)
    assert (engine.sizes, service._queues._idle) == ([1], False)
    engine.open.set()
    thread.join(30)
    assert [future.result(30).batch_size for future in (*found, *others)] == [1, 2, 2]
    assert len(engine.threads) == 2, "the others are computed where the engine is at home"
    until(lambda: service._queues._idle)
    assert service.submit(one(jpeg(3)), here=True).done()


def test_a_job_of_the_caller_counts_as_the_engines(idle: tuple[Service, Gate]) -> None:
    service, engine = idle
    before = service.holding
    thread, _ = asked(service, engine)
    held = service.holding
    assert service.holding == held != before
    engine.open.set()
    thread.join(30)
    assert (before, service.holding) == (None, None)


def test_closing_waits_for_the_caller_who_gets_an_answer(idle: tuple[Service, Gate]) -> None:
    service, engine = idle
    thread, found = asked(service, engine)
    with ThreadPoolExecutor(1) as closer:
        closing = closer.submit(service.close)
        until(lambda: not any(decoder.is_alive() for decoder in service._decoders))
        time.sleep(0.05)
        assert not closing.done()
        engine.open.set()
        closing.result(30)
        thread.join(30)
    assert statuses(found[0].result(0).outcomes) == [200]


def test_an_engine_that_fails_is_the_requests_fault_and_the_service_goes_on(idle: tuple[Service, Gate]) -> None:
    service, engine = idle

    def fail(batch: torch.Tensor) -> None:
        raise RuntimeError("out of luck")

    engine.fault = fail
    assert statuses(service.submit(one(jpeg(0)), here=True).result(0).outcomes) == [500]
    engine.fault = lambda batch: None
    until(lambda: service._queues._idle)
    assert statuses(service.submit(one(jpeg(0)), here=True).result(0).outcomes) == [200]


def test_a_device_that_is_lost_there_is_lost_to_the_service(idle: tuple[Service, Gate]) -> None:
    service, engine = idle

    def lose(batch: torch.Tensor) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    engine.fault = lose
    future = service.submit(one(jpeg(0)), here=True)
    with pytest.raises(BrokenError, match="illegal memory access"):
        future.result(0)
    with pytest.raises(BrokenError):
        service.submit(one(jpeg(0)))
    service.close()


def test_many_callers_at_once_are_all_answered_by_one_engine_at_a_time(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gated(artifact) as (service, engine), ThreadPoolExecutor(6) as callers:
        inside, run = threading.Lock(), engine.engine.run

        def alone(batch: torch.Tensor) -> Outputs:
            assert inside.acquire(blocking=False), "two threads are in the engine"
            try:
                return run(batch)
            finally:
                inside.release()

        monkeypatch.setattr(engine.engine, "run", alone)
        known = {seed: service.submit(one(jpeg(seed))).result(30).outcomes for seed in range(4)}

        def ask(number: int) -> bool:
            seed = number % 4
            found = service.submit(one(jpeg(seed)), here=number % 3 > 0).result(30).outcomes
            return [[label.index for label in outcome] for outcome in found if not isinstance(outcome, Refusal)] == [
                [label.index for label in outcome] for outcome in known[seed] if not isinstance(outcome, Refusal)
            ]

        assert all(callers.map(ask, range(600)))
        assert threading.get_ident() not in engine.threads
        assert len(engine.threads) > 1


def test_how_quick_an_engine_is_is_seen_again_where_it_was_opened_on_a_busy_machine(idle: tuple[Service, Gate]) -> None:
    service, _ = idle
    assert 0 < service.here_s < math.inf
    service.here_s = 1000.0
    service.submit(one(jpeg(0))).result(30)
    assert 0 < service.here_s < 100
