"""Ten thousand damaged images, asked of one service by several threads: each gets its answer, none costs another."""

from __future__ import annotations

import ctypes
import gc
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import psutil
import pytest
from PIL import Image

from benchmarks.hostile import mutations
from serve.runtime.card.budget import SERVING
from serve.runtime.card.card import load_card
from serve.runtime.card.serving import Serving
from serve.runtime.engines.base import chain_for
from serve.runtime.errors import Refusal
from serve.runtime.service.pending_request import Answered
from serve.runtime.service.predictor import Predictor
from serve.runtime.service.protocol import Request, answer
from serve.runtime.service.service import Service
from tests.serve import artifacts
from tests.serve.artifacts import jpeg

IMAGES = 10_000
CLIENTS = 6


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Service:
    artifact = artifacts.torchscript(tmp_path_factory.mktemp("mutated") / "script", device="cpu")
    # What claims more is refused sooner, so that the test is quick; a header may lie up to this.
    serving = Serving(chain_for(load_card(artifact)), budget=replace(SERVING, image_pixels=2_000_000))
    return Service(Predictor(artifact, max_batch=8, budget=serving.allowance), serving)


def requests(client: int) -> list[tuple[Request, list[int]]]:
    """Requests of one to six damaged images, and which of their images are whole ones, by their seeds (else -1)."""
    chance = random.Random(client)
    found, number = [], client
    while number < IMAGES:
        images: list[bytes] = []
        known: list[int] = []
        for _ in range(chance.randint(1, 6)):
            images.append(mutations.mutated(number))
            known.append(-1)
            number += CLIENTS
            if number >= IMAGES:
                break
        for seed in chance.sample(range(8), chance.choice((0, 0, 1, 2))):
            place = chance.randrange(len(images) + 1)
            images.insert(place, jpeg(seed))
            known.insert(place, seed)
        found.append((Request(tuple(images), 2, listed=len(images) > 1), known))
    return found


def held() -> int:
    """Bytes that this process holds, without what the tests before it freed and malloc kept for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


def test_ten_thousand_damaged_images_cost_nothing_but_their_own_answers(service: Service) -> None:
    expected = service.predictor.predict([jpeg(seed) for seed in range(8)], 2)
    prepared = [requests(client) for client in range(CLIENTS)]
    before, threads = held(), threading.active_count()
    process = psutil.Process()
    peak = [before]
    statuses: Counter[int] = Counter()
    lock = threading.Lock()

    def ask(client: int) -> None:
        for request, known in prepared[client]:
            answered = service.submit(request).result(60)
            check(request, known, answered)
            with lock:
                peak[0] = max(peak[0], process.memory_info().rss)

    def check(request: Request, known: list[int], answered: Answered) -> None:
        status, body, _ = answer(service.predictor.task, request, answered.outcomes)
        assert status in (200, 400, 413, 415)
        assert body.isascii()
        for seed, outcome in zip(known, answered.outcomes, strict=True):
            if isinstance(outcome, Refusal):
                assert seed == -1, f"a whole image was refused: {outcome}"
                assert outcome.status in (400, 413, 415), outcome
                assert "\n" not in outcome.message
            elif seed >= 0:
                wanted = expected[seed]
                assert isinstance(wanted, list)
                assert [label.index for label in outcome] == [label.index for label in wanted]
            if seed == -1:
                with lock:
                    statuses[outcome.status if isinstance(outcome, Refusal) else 200] += 1

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(ask, range(CLIENTS)))
    assert statuses.total() == IMAGES
    assert all(statuses[status] > 100 for status in (200, 400, 415)), statuses
    assert service.broken is None
    deadline = time.monotonic() + 10
    while service.waiting or service._queues.decoding:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert (service._queues.backlog._pixels, service._queues.backlog._requests) == (0, 0)
    assert threading.active_count() <= threads
    assert held() - before < 100e6
    assert peak[0] - before < 300e6


def test_the_damage_is_of_every_supported_format_and_the_same_each_time() -> None:
    starts = {b"\xff\xd8\xff": 0, b"\x89PNG": 0, b"RIFF": 0, b"BM": 0, b"II": 0, b"MM": 0, b"GIF8": 0}
    for number in range(2000):
        data = mutations.mutated(number)
        for start in starts:
            starts[start] += data.startswith(start)
    assert min(count for start, count in starts.items() if start != b"MM") > 20
    assert starts[b"MM"] > 0, "one seed of some two hundred"
    assert mutations.mutated(77) == mutations.mutated(77)
    assert len(mutations.seeds()) > 100
    assert set(mutations.MODES) == set(Image.MODES)
