"""No request goes unanswered: workers are killed, models replaced and removed, with hundreds of requests in flight."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from serve import layout
from serve.options import ServingOptions
from serve.torchserve import live, server
from serve.torchserve.archive import build_archive
from serve.torchserve.configuration import HOST
from serve.torchserve.limits import Limits
from serve.torchserve.state import RunningServer, state_folder
from tests.programs import Programs
from tests.serve import artifacts
from tests.serve.artifacts import jpeg
from tests.serve.conftest import by, free_ports

pytestmark = pytest.mark.slow

#: One worker that gathers a batch for three seconds; and two that are gathering one for most of the time.
ALONE, PAIR = "small-alone", "small-pair"
KILLS = 3
IN_FLIGHT = 300
#: Of a client: less than `Serving.response_timeout_s`, so that who waits for a time to be up is not answered.
PATIENCE_S = 30.0


@dataclass(frozen=True)
class Served:
    """A running server with both models."""

    store: Path
    running: RunningServer

    @property
    def header(self) -> str:
        return (state_folder(self.store) / "authorization").read_text().strip()

    def post(self, model: str, path: str = "/predictions/{}") -> httpx.Response:
        name, _, value = self.header.partition(": ")
        url = f"http://{HOST}:{self.running.ports.inference}{path.format(model)}"
        return httpx.post(url, content=jpeg(1), headers={name: value}, timeout=PATIENCE_S, trust_env=False)

    def kill_a_worker(self, model: str) -> None:
        with self.running.client(self.store) as client:
            ready = [worker["pid"] for worker in client.workers(model) if worker["status"] == "READY"]
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(random.choice(ready)).kill()

    def wait_for(self, model: str, workers: int) -> None:
        until = time.monotonic() + 60
        with self.running.client(self.store) as client:
            while sum(worker["status"] == "READY" for worker in client.workers(model)) < workers:
                assert time.monotonic() < until
                time.sleep(0.1)


def archive(store: Path, name: str, options: ServingOptions) -> Path:
    folder = layout.artifact_folder(store, "small", "script")
    if not folder.is_dir():
        artifacts.torchscript(folder)
    path = layout.archive_path(store, "small", name.removeprefix("small-"))
    return build_archive(folder, path, model_name=name, options=options)


@pytest.fixture(scope="module")
def served(torch_begun: Programs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    store = tmp_path_factory.mktemp("answered")
    archives = {
        ALONE: archive(store, ALONE, ServingOptions(batch_size=64, max_batch_delay_ms=3000)),
        PAIR: archive(store, PAIR, ServingOptions(batch_size=8, max_batch_delay_ms=60, workers=2)),
    }
    with by(torch_begun.executable):
        running = server.start(store, archives, ports=free_ports(), limits=Limits(queue=600), gpus=0, deadline_s=200)
    try:
        yield Served(store, running)
    finally:
        server.stop(store)


def test_a_request_for_which_others_are_awaited_is_answered_at_once_when_its_worker_dies(served: Served) -> None:
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(served.post, ALONE) for _ in range(3)]
        time.sleep(0.5)
        begun = time.monotonic()
        served.kill_a_worker(ALONE)
        # Sooner than their patience, which is shorter than any time that the server could wait for; and not by the next
        # worker, whose answers would be others.
        answers = [one.result() for one in waiting]
        assert time.monotonic() - begun < 5
    message = f"no worker of {ALONE} is running: try again later"
    assert {(one.status_code, one.headers["Retry-After"], one.json()["message"]) for one in answers} == {
        (503, "1", message)
    }
    again = served.post(ALONE)
    assert (again.status_code, again.json()["message"]) == (503, message), "nor does a later one wait for another"
    served.wait_for(ALONE, 1)
    assert served.post(ALONE).status_code == 200


def test_workers_are_killed_again_and_again_and_every_request_is_answered(served: Served) -> None:
    outcomes: Counter[int | str] = Counter()
    messages: set[str] = set()
    over = threading.Event()
    slowest = 0.0

    def ask() -> None:
        nonlocal slowest
        while not over.is_set():
            begun = time.monotonic()
            try:
                answer = served.post(PAIR)
            except httpx.HTTPError as error:
                outcomes[type(error).__name__] += 1  # as one that waited for a time to be up: see `PATIENCE_S`
                continue
            slowest = max(slowest, time.monotonic() - begun)
            outcomes[answer.status_code] += 1
            if answer.status_code != 200:
                messages.add(answer.json()["message"])

    asking = [threading.Thread(target=ask) for _ in range(6)]
    for thread in asking:
        thread.start()
    try:
        for _ in range(KILLS):
            served.wait_for(PAIR, 2)
            time.sleep(random.uniform(0.2, 0.5))
            served.kill_a_worker(PAIR)
            time.sleep(0.3)
    finally:
        over.set()
        for thread in asking:
            thread.join()
    assert set(outcomes) <= {200, 503}, outcomes
    assert slowest < 10, "nobody waits for a time to be up"
    assert outcomes[200] > 10 * KILLS
    # The other worker takes what was not computed; so only what the dead one had in its hand may fail.
    assert outcomes[503] <= 8 * KILLS
    assert messages <= {"the worker that had this request has died, and another is being started: try again later"}
    served.wait_for(PAIR, 2)


def test_a_model_is_replaced_and_removed_with_hundreds_of_requests_in_flight(served: Served) -> None:
    extra = "small-extra"
    path = archive(served.store, extra, ServingOptions(batch_size=8, max_batch_delay_ms=20))
    live.add(served.store, {extra: path})
    assert set(in_flight_while(served, extra, lambda: live.replace(served.store, extra, path))) == {200}
    with served.running.client(served.store) as client:
        worker = psutil.Process(client.workers(extra)[0]["pid"])

        def unregister() -> None:
            # As anybody may who has the key; `serve remove` does the same, and writes it down.
            resumed = threading.Timer(0.5, worker.resume)
            resumed.start()
            client.unregister(extra)
            resumed.join()

        def all_wait() -> bool:
            return int(client.registered(extra)["jobQueueStatus"]["pendingRequests"]) >= IN_FLIGHT - 8

        worker.suspend()
        found = in_flight_while(served, extra, unregister, all_wait)
        assert extra not in client.models()
    assert set(found) == {200, 404}, found
    assert found[200] >= IN_FLIGHT, "what was accepted is answered"
    assert served.post(extra).status_code == 404
    assert extra not in live.remove(served.store, [extra]).models


def in_flight_while(
    served: Served, model: str, change: Callable[[], object], all_wait: Callable[[], bool] = lambda: True
) -> Counter[int | str]:
    """Outcomes of hundreds of requests that are under way when a change begins, and of those that come meanwhile."""
    image = jpeg(1)
    head = f"POST /predictions/{model} HTTP/1.1\r\nHost: x\r\n{served.header}\r\nContent-Type: image/jpeg\r\n"
    request = f"{head}Content-Length: {len(image)}\r\n\r\n".encode() + image
    outcomes: Counter[int | str] = Counter()
    said: set[str] = set()
    over = threading.Event()

    def answer_of(stream: socket.socket) -> None:
        answer = http.client.HTTPResponse(stream)
        try:
            answer.begin()
            outcomes[answer.status] += 1
            body = answer.read()
            if answer.status != 200:
                said.add(json.loads(body)["message"])
        except (OSError, http.client.HTTPException) as error:
            outcomes[repr(error)] += 1

    def ask() -> None:
        while not over.is_set():
            with connected(served) as stream:
                stream.sendall(request)
                answer_of(stream)

    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(connected(served)) for _ in range(IN_FLIGHT)]
        for stream in streams:
            stream.sendall(request)
        until = time.monotonic() + PATIENCE_S
        while not all_wait():
            assert time.monotonic() < until
            time.sleep(0.05)
        asking = [threading.Thread(target=ask) for _ in range(8)]
        for thread in asking:
            thread.start()
        try:
            change()
        finally:
            over.set()
            for thread in asking:
                thread.join()
        for stream in streams:
            answer_of(stream)
    assert said <= {f"Model not found: {model} has been removed", f"Model not found: {model}"}
    return outcomes


def connected(served: Served) -> socket.socket:
    return socket.create_connection((HOST, served.running.ports.inference), timeout=PATIENCE_S)
