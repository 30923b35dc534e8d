"""No request goes unanswered: workers are killed, models replaced and removed, with hundreds of requests in flight."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import random
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from serve.common import layout
from serve.common.options import ServingOptions
from serve.load.http_connection import stages
from serve.torchserve import live_changes, server
from serve.torchserve.archive_builder import build_archive
from serve.torchserve.configuration import HOST
from serve.torchserve.limits import MIB, Limits
from serve.torchserve.state import RunningServer, state_folder
from tests.programs import Programs
from tests.serve import artifacts
from tests.serve.artifacts import jpeg
from tests.serve.conftest import by, free_ports
from tests.serve.torchserve.test_operating import PREDICTIONS, grpc_message

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

    def post(self, model: str, path: str = "/predictions/{}", **asked: Any) -> httpx.Response:
        name, _, value = self.header.partition(": ")
        url = f"http://{HOST}:{self.running.ports.inference}{path.format(model)}"
        headers = {name: value, **asked.pop("headers", {})}
        content = asked or {"content": jpeg(1)}
        return httpx.post(url, headers=headers, timeout=PATIENCE_S, trust_env=False, **content)

    def log(self, name: str) -> str:
        return (state_folder(self.store) / "logs" / name).read_text(encoding="utf-8")

    def log_lines(self, name: str) -> list[str]:
        return self.log(name).splitlines(keepends=True)

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
        limits = Limits(queue=600, access_log=True)
        running = server.start(store, archives, ports=free_ports(), limits=limits, gpus=0, deadline_s=200)
    try:
        yield Served(store, running)
    finally:
        server.stop(store)


def test_each_request_that_a_worker_answers_has_one_line_of_json_with_where_its_time_went(served: Served) -> None:
    whole, broken = base64.b64encode(jpeg(1)).decode(), base64.b64encode(b"no image").decode()
    listed = {"instances": [{"b64": whole}, {"b64": broken}, {"b64": whole}]}
    asked: dict[str, dict[str, Any]] = {
        "one-${java:version}-{}": {},
        "refused": {"content": b"no image"},
        "unread": {"headers": {"x-top-k": "none"}},
        "several": {"json": listed},
    }
    before = served.log("request_log.log").count("\n")
    answers = {}
    for name, content in asked.items():
        headers = {"x-request-id": name, **content.pop("headers", {})}
        answers[name] = served.post(PAIR, headers=headers, **content)
    unnamed = served.post(PAIR)
    answers[unnamed.headers["x-request-id"]] = unnamed
    assert served.post("absent", headers={"x-request-id": "nobody"}).status_code == 404
    until = time.monotonic() + PATIENCE_S
    while served.log("request_log.log").count("\n") < before + len(answers):
        assert time.monotonic() < until
        time.sleep(0.1)
    lines = [json.loads(line) for line in served.log("request_log.log").splitlines()[before:]]
    assert [line["request_id"] for line in lines] == list(answers)
    told = [(line["status"], line["images"], line["refusals"]) for line in lines]
    one: tuple[int, int, list[str]] = (200, 1, [])
    assert told == [one, (415, 1, ["item-415"]), (400, 0, ["request-400"]), (200, 3, ["item-415"]), one]
    for line, answer in zip(lines, answers.values(), strict=True):
        assert line["status"] == answer.status_code
        assert (line["logger"], line["level"], line["event"]) == ("serve.requests", "info", "request")
        assert (line["route"], line["model"], line["version"]) == ("predict", PAIR, "1.0")
        assert datetime.fromisoformat(line["time"]).tzinfo is not None
        told_ms = line["stages_ms"]
        assert told_ms == stages(answer.headers["Server-Timing"])
        # Two threads decode: of two images that they have at once, the time of both is told.
        at_once = line.get("batch_size") or 1
        spent = sum(ms / at_once if stage in ("decode", "preprocess") else ms for stage, ms in told_ms.items())
        assert line["ms"] >= spent - 0.1  # each is rounded
    assert lines[3]["batch_size"] == 2
    assert "serve.requests" not in served.log("model_log.log")


def test_the_frontends_log_says_of_each_request_what_its_client_was_told_whoever_answered_it(served: Served) -> None:
    before = served.log("access_log.log").count("\n")
    path, form = f"/predictions/{PAIR}", {"Content-Type": "application/x-www-form-urlencoded"}
    answers = [
        ("/predictions/absent", 404, served.post("absent", headers={"x-request-id": "nobody"})),
        (path, 400, served.post(PAIR, headers={"Authorization": "Bearer none", "x-request-id": "stranger"})),
        (path, 413, served.post(PAIR, content=b"\0" * (served.running.limits.body_mb * MIB + 1))),
        (path, 400, served.post(PAIR, headers=form, content=b"%zz=" + jpeg(1))),  # TorchServe itself says 500
        (path, 415, served.post(PAIR, headers={"x-request-id": "one-${java:version}-{}"}, content=b"no image")),
        (path, 200, served.post(PAIR)),
    ]
    assert [answer.status_code for _, _, answer in answers] == [status for _, status, _ in answers]
    told = re.findall(r'"POST (\S+) HTTP/1.1" (\d+) \d+ (\S+)\n', "".join(served.log_lines("access_log.log")[before:]))
    assert told == [(where, str(status), answer.headers["x-request-id"]) for where, status, answer in answers]


def test_the_frontends_log_has_who_went_before_an_answer_and_calls_of_grpc(served: Served) -> None:
    grpc = pytest.importorskip("grpc")
    name, _, token = served.header.partition(": ")
    with socket.create_connection((HOST, served.running.ports.inference)) as gone:
        head = f"POST /predictions/{ALONE} HTTP/1.1\r\nHost: {HOST}\r\n{served.header}\r\nX-Request-Id: gone\r\n"
        gone.sendall(f"{head}Content-Type: image/jpeg\r\nContent-Length: {len(jpeg(1))}\r\n\r\n".encode() + jpeg(1))
        time.sleep(0.5)  # it is waiting for others
        gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets the connection
    with grpc.insecure_channel(f"{HOST}:{served.running.ports.grpc_inference}") as channel:
        channel.unary_unary(PREDICTIONS)(grpc_message(jpeg(1), PAIR), metadata=((name.lower(), token),), timeout=20)
    expected = (rf'"POST /predictions/{ALONE} HTTP/1.1" 499 \d+ gone\n', r'"gRPC \S+/Predictions HTTP/2.0" 0 \d+\n')
    until = time.monotonic() + PATIENCE_S
    while not all(re.search(line, served.log("access_log.log")) for line in expected):
        assert time.monotonic() < until, served.log("access_log.log")[-2000:]
        time.sleep(0.1)
    time.sleep(4)  # by then its answer would have been there
    assert served.log("access_log.log").count(" gone\n") == 1


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
    live_changes.add(served.store, {extra: path})
    assert set(in_flight_while(served, extra, lambda: live_changes.replace(served.store, extra, path))) == {200}
    with served.running.client(served.store) as client:
        worker = psutil.Process(client.workers(extra)[0]["pid"])

        def unregister() -> None:
            # As anybody may who has the key; `serve remove` does the same, and writes it down.
            resumed = threading.Timer(0.5, worker.resume)
            resumed.start()
            client.unregister(extra)
            resumed.join()

        def all_wait() -> bool:
            # A batch is with the worker: one of the network's, or two where the requests came before it was taken.
            return int(client.registered(extra)["jobQueueStatus"]["pendingRequests"]) >= IN_FLIGHT - 2 * 8

        worker.suspend()
        found = in_flight_while(served, extra, unregister, all_wait)
        assert extra not in client.models()
    assert set(found) == {200, 404}, found
    assert found[200] >= IN_FLIGHT, "what was accepted is answered"
    assert served.post(extra).status_code == 404
    assert extra not in live_changes.remove(served.store, [extra]).models


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
