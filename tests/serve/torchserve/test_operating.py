"""What an operator and an attacker try on the running server: logs, limits, health, odd clients, stop and restart."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import re
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from serve.common import layout
from serve.common.options import ServingOptions
from serve.load.http_connection import stages
from serve.runtime.errors import UserError
from serve.runtime.service.logs import JsonLines
from serve.runtime.service.stages import FRONTEND_STAGE
from serve.torchserve import server
from serve.torchserve.archive_builder import build_archive
from serve.torchserve.configuration import HOST
from serve.torchserve.java import java_executable
from serve.torchserve.launcher import FRONTEND, GROOVY, launcher, torchserve_jar
from serve.torchserve.limits import LOG_FILES_KEPT, Limits
from serve.torchserve.state import RunningServer, state_folder
from tests.programs import Programs
from tests.serve import artifacts
from tests.serve.artifacts import jpeg
from tests.serve.conftest import by, free_ports

MIB = 1 << 20
LIMITS = Limits(queue=24, body_mb=1, held_mb=2, receive_s=3, drain_s=20, connections=200)
QUICK, SLOW = "small-quick", "small-slow"
SLOWNESS_S = 1.0


@dataclass(frozen=True)
class Operated:
    """A server with narrow limits: one model answers each request alone, one waits a second for others to join it."""

    store: Path
    running: RunningServer

    def url(self, path: str) -> str:
        return f"http://{HOST}:{self.running.ports.inference}{path}"

    @property
    def logs(self) -> Path:
        return state_folder(self.store) / "logs"

    @property
    def header(self) -> str:
        return (state_folder(self.store) / "authorization").read_text().strip()

    @property
    def headers(self) -> dict[str, str]:
        name, _, value = self.header.partition(": ")
        return {name: value}

    def post(self, model: str, content: bytes, **headers: str) -> httpx.Response:
        url = self.url(f"/predictions/{model}")
        return httpx.post(url, content=content, headers={**self.headers, **headers}, timeout=60)


def archives_of(store: Path) -> dict[str, Path]:
    folder = artifacts.torchscript(store / "small" / "artifacts" / "quick")
    options = {
        QUICK: ServingOptions(batch_size=1),
        # A lone request waits this long for others, so that there is time to do something meanwhile.
        SLOW: ServingOptions(batch_size=64, max_batch_delay_ms=int(SLOWNESS_S * 1000)),
    }
    return {
        name: build_archive(folder, path, model_name=name, options=options[name])
        for name, path in archives_in(store).items()
    }


def archives_in(store: Path) -> dict[str, Path]:
    return {name: layout.archive_path(store, "small", name.removeprefix("small-")) for name in (QUICK, SLOW)}


@contextmanager
def operating(store: Path, archives: dict[str, Path], limits: Limits = LIMITS) -> Iterator[Operated]:
    running = server.start(store, archives, ports=free_ports(), limits=limits, gpus=0, deadline_s=200)
    try:
        yield Operated(store, running)
    finally:
        server.stop(store)


@pytest.fixture(scope="module")
def operated(torch_begun: Programs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operated]:
    store = tmp_path_factory.mktemp("operated")
    with by(torch_begun.executable), operating(store, archives_of(store)) as found:
        yield found


pytestmark = pytest.mark.slow


# --- logs


def test_requests_write_nothing_into_the_logs(operated: Operated) -> None:
    def sizes() -> dict[str, int]:
        return {path.name: path.stat().st_size for path in operated.logs.iterdir()}

    operated.post(QUICK, b"the first of a kind may say something")
    before: dict[str, int] = {}
    while before != (before := sizes()):  # what is said of the start and of that one has been written
        time.sleep(1)
    for _ in range(30):
        assert operated.post(QUICK, jpeg(1)).status_code == 200
        assert operated.post(QUICK, b"no image").status_code == 415
    time.sleep(1)
    assert sizes() == before
    assert before["console.log"] > 0
    assert before["access_log.log"] == before["request_log.log"] == 0


def test_a_line_is_logged_once(operated: Operated) -> None:
    lines = [
        line for path in operated.logs.iterdir() for line in path.read_text().splitlines() if "State change" in line
    ]
    assert len(lines) >= 4, "two workers were started and have loaded"
    assert len(set(lines)) == len(lines)


def _line_of_a_request() -> str:
    record = logging.LogRecord("serve.requests", logging.INFO, "", 0, "request", None, None)
    record.fields = {"request_id": "a" * 40, "status": 200}
    return JsonLines().format(record)


REQUEST_LINE = _line_of_a_request()


def test_logs_are_put_aside_when_they_are_large_and_forgotten_when_they_are_many(tmp_path: Path) -> None:
    script = tmp_path / "Write.groovy"
    script.write_text(
        "def log = org.slf4j.LoggerFactory.getLogger('org.pytorch.serve.Test')\n"
        "def access = org.slf4j.LoggerFactory.getLogger('serve.access')\n"
        "def workers = org.slf4j.LoggerFactory.getLogger('MODEL_LOG')\n"
        f"def request = '{REQUEST_LINE}'\n"
        "2000.times { log.info('x' * 100); access.info('y' * 100); workers.info('z' * 100); workers.info(request) }\n"
    )
    size = 20_000
    words = [
        *("-Dserve.logs=" + str(tmp_path), f"-Dserve.log_bytes={size}", f"-Dserve.log_files={LOG_FILES_KEPT}"),
        *("-Dserve.access_level=info", f"-Dlog4j2.configurationFile={(FRONTEND / 'log4j2.xml').as_uri()}"),
        *("-cp", str(torchserve_jar()), GROOVY, str(script)),
    ]
    subprocess.run([str(java_executable()), *words], check=True, capture_output=True, timeout=120)
    assert set((tmp_path / "request_log.log").read_text().splitlines()) == {REQUEST_LINE}
    assert "serve.requests" not in (tmp_path / "model_log.log").read_text()
    for name in ("ts_log", "access_log", "model_log", "request_log"):
        kept = list(tmp_path.glob(f"{name}*"))
        assert len(kept) == LOG_FILES_KEPT + 1
        assert sum(path.stat().st_size for path in kept) < (LOG_FILES_KEPT + 1) * (size + 1000)


# --- limits


def test_java_has_the_heap_that_is_stated(operated: Operated) -> None:
    words = psutil.Process(operated.running.pid).cmdline()
    assert f"-Xmx{192 + 4 * LIMITS.held_mb}m" in words
    assert f"-XX:MaxDirectMemorySize={64 + 3 * LIMITS.held_mb}m" in words


def test_java_runs_our_main_as_it_was_compiled_before(operated: Operated) -> None:
    words = psutil.Process(operated.running.pid).cmdline()
    _, compiled = words[words.index("-cp") + 1].split(":")
    assert compiled.endswith("/launch.jar")
    assert words[words.index("-cp") + 2] == "Launch"
    assert launcher(java_executable()).classes == Path(compiled)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"queue": 0}, "--queue must be between 1 and"),
        ({"body_mb": 64, "held_mb": 63}, r"--held-mb must be at least --body-mb \(64\)"),
    ],
)
def test_limits_that_cannot_be_kept_are_refused(given: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Limits(**given)  # type: ignore[arg-type]


def test_a_body_that_is_too_large_is_refused_before_it_is_sent(operated: Operated) -> None:
    with opened(operated) as stream:
        send_head(stream, operated, QUICK, 2_000_000_000)
        answer = http.client.HTTPResponse(stream)
        answer.begin()
        assert answer.status == 413
        assert f"the request has 2000000000 bytes, and {MIB} are allowed" in json.loads(answer.read())["message"]


def test_without_a_token_no_byte_of_a_body_is_held(operated: Operated) -> None:
    with opened(operated) as stream:
        stream.sendall(f"POST /predictions/{QUICK} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n".encode())
        answer = http.client.HTTPResponse(stream)
        answer.begin()
        assert answer.status == 400
        assert "Token Authorization failed" in json.loads(answer.read())["message"]


@pytest.mark.parametrize(
    "length", ["-5", "-9223372036854775807", "-9223372036854775808", "+5", "five", "5 5", "9" * 30]
)
@pytest.mark.parametrize("port", ["inference", "management"])
def test_a_length_that_is_none_is_refused_and_makes_no_room(operated: Operated, length: str, port: str) -> None:
    # Netty takes one below zero for a body that ends with the connection.
    head = f"POST /predictions/{QUICK} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n"
    with socket.create_connection((HOST, getattr(operated.running.ports, port)), timeout=10) as stream:
        stream.sendall(head.encode())
        answer = http.client.HTTPResponse(stream)
        answer.begin()
        assert (answer.status, answer.getheader("Connection")) == (400, "close")
        assert json.loads(answer.read())["message"] == "the Content-Length is no number of bytes"
        with contextlib.suppress(ConnectionError):  # it ends
            stream.sendall(b"x" * 100_000)
            while stream.recv(65536):
                pass
    assert operated.post(QUICK, jpeg(1)).status_code == 200


def test_bodies_are_bounded_together_and_given_back_when_their_clients_are_gone(operated: Operated) -> None:
    # Three of them announce 2.7 MiB, and 2 may be held; what is announced counts, sent or not.
    size = 900 * 1024
    with opened(operated) as first, opened(operated) as second, opened(operated) as third:
        for stream in (first, second):
            send_head(stream, operated, QUICK, size)
            stream.sendall(b"\xff" * 1000)
        time.sleep(0.3)
        send_head(third, operated, QUICK, size)
        answer = http.client.HTTPResponse(third)
        answer.begin()
        assert (answer.status, answer.getheader("Retry-After")) == (503, "1")
        assert "hold all the memory" in json.loads(answer.read())["message"]
        assert operated.post(QUICK, jpeg(1)).status_code == 200, "small ones still fit"
    # They have gone in the middle of their bodies. Now some that go after them, while TorchServe holds them.
    gone = []
    for _ in range(2):
        stream = opened(operated)
        send_head(stream, operated, SLOW, size)
        stream.sendall(jpeg(1).ljust(size, b"\0"))
        gone.append(stream)
    time.sleep(0.3)
    for stream in gone:
        stream.close()
    eventually(lambda: operated.post(QUICK, jpeg(1).ljust(size, b"\0")).status_code == 200)
    eventually(lambda: operated.post(QUICK, jpeg(1).ljust(MIB, b"\0")).status_code == 200)
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: operated.post(SLOW, jpeg(1).ljust(size, b"\0")).status_code, range(2)))
    assert answers == [200, 200]


def grpc_message(image: bytes, model: str = QUICK) -> bytes:
    """PredictionsRequest of TorchServe's inference.proto."""

    def field(number: int, content: bytes) -> bytes:
        length, size = b"", len(content)
        while size > 127:
            length, size = length + bytes([size & 127 | 128]), size >> 7
        return bytes([number << 3 | 2]) + length + bytes([size]) + content

    return field(1, model.encode()) + field(3, field(1, b"data") + field(2, image))


PREDICTIONS = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"


def test_a_grpc_call_that_waits_is_answered_when_another_client_goes_away(operated: Operated) -> None:
    grpc = pytest.importorskip("grpc")
    name, _, token = operated.header.partition(": ")
    with operated.running.client(operated.store) as client:
        worker = psutil.Process(client.workers(QUICK)[0]["pid"])
    with grpc.insecure_channel(f"{HOST}:{operated.running.ports.grpc_inference}") as channel:
        call = channel.unary_unary(PREDICTIONS)
        worker.suspend()  # so that the second waits in the queue
        try:
            calls = [
                call.future(grpc_message(jpeg(1)), metadata=((name.lower(), token),), timeout=20) for _ in range(2)
            ]
            time.sleep(0.5)
            with opened(operated) as gone:
                send_head(gone, operated, QUICK, 300_000)
                gone.sendall(jpeg(1).ljust(300_000, b"\0"))
                time.sleep(0.2)
            time.sleep(0.5)
        finally:
            worker.resume()
        assert all(b'"label"' in one.result() for one in calls)


def test_grpc_is_bounded_with_the_rest(operated: Operated) -> None:
    grpc = pytest.importorskip("grpc")
    name, _, token = operated.header.partition(": ")
    size = 900 * 1024
    with grpc.insecure_channel(f"{HOST}:{operated.running.ports.grpc_inference}") as channel:
        call = channel.unary_unary(PREDICTIONS)

        def predict(image: bytes) -> bytes:
            answer: bytes = call(grpc_message(image), metadata=((name.lower(), token),), timeout=60)
            return answer

        assert b'"label"' in predict(jpeg(1))
        with opened(operated) as first, opened(operated) as second:
            for stream in (first, second):
                send_head(stream, operated, QUICK, size)
            time.sleep(0.3)
            with pytest.raises(grpc.RpcError) as caught:
                predict(jpeg(1).ljust(size, b"\0"))
            assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert b'"label"' in predict(jpeg(1))

        def fits() -> bool:
            try:
                return b'"label"' in predict(jpeg(1).ljust(size, b"\0"))
            except grpc.RpcError:
                return False  # it has not been seen yet that the two have gone

        eventually(fits)
        for _ in range(4):
            assert b'"label"' in predict(jpeg(1).ljust(size, b"\0")), "what was answered is given back"


def test_many_large_bodies_at_once_are_answered_or_told_to_try_again(operated: Operated) -> None:
    body = jpeg(1).ljust(MIB - 1, b"\0")
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: operated.post(QUICK, body).status_code, range(64)))
    assert set(answers) <= {200, 503}
    assert answers.count(200) >= 2
    assert operated.post(QUICK, jpeg(1)).status_code == 200


def test_a_full_queue_says_so(operated: Operated) -> None:
    answers = all_at_once(operated, QUICK, 150)
    refused = [(status, retry, text) for status, retry, text in answers if status != 200]
    assert len(refused) < len(answers)
    assert refused, "the queue holds 24"
    message = f"the queue of {QUICK} is full: try again"
    assert {(status, retry, json.loads(text)["message"]) for status, retry, text in refused} == {(503, "1", message)}


def test_a_full_queue_is_told_and_counted_before_the_body_and_the_connection_goes_on(operated: Operated) -> None:
    def counted() -> tuple[float, float]:
        url = f"http://{HOST}:{operated.running.ports.metrics}/metrics"
        values = {"Requests5XX": 0.0, "ts_inference_requests_total": 0.0}
        for line in httpx.get(url).text.splitlines():
            name, _, rest = line.partition("{")
            if name in values and (name == "Requests5XX" or f'model_name="{QUICK}"' in rest):
                values[name] += float(rest.rpartition("}")[2].split()[0])
        return values["Requests5XX"], values["ts_inference_requests_total"]

    def ask(path: str) -> tuple[http.client.HTTPResponse, bytes]:
        send_head(stream, operated, path, 100_000, name="mine")
        answer = http.client.HTTPResponse(stream)
        answer.begin()
        return answer, answer.read()

    with operated.running.client(operated.store) as client, contextlib.ExitStack() as stack:
        (found,) = client.workers(QUICK)
        worker = psutil.Process(found["pid"])
        worker.suspend()
        stack.callback(worker.resume)
        image = jpeg(1)
        asking = [stack.enter_context(opened(operated)) for _ in range(1 + LIMITS.queue + 3)]
        asked = counted()[1]
        sent = time.monotonic()
        send_head(asking[0], operated, QUICK, len(image), image)
        # The worker has it, and no place of the queue: else the queue would be full of one request less.
        eventually(lambda: counted()[1] > asked)
        eventually(lambda: client.registered(QUICK)["jobQueueStatus"]["pendingRequests"] == 0)
        for other in asking[1:]:
            send_head(other, operated, QUICK, len(image), image)
        eventually(lambda: len(select.select(asking, [], [], 0)[0]) == 3)
        refused = select.select(asking, [], [], 0)[0]
        full = time.monotonic()
        stream = stack.enter_context(opened(operated))
        before = counted()
        for path in (QUICK, f"{QUICK}/1.0"):
            answer, body = ask(path)
            assert (answer.status, answer.getheader("Retry-After")) == (503, "1")
            assert json.loads(body)["message"] == f"the queue of {QUICK} is full: try again"
            assert answer.getheader("x-request-id") == "mine"
            stream.sendall(b"x" * 100_000)
        assert [after - count for after, count in zip(counted(), before, strict=True)] == [2, 2]
        at_least_ms = (time.monotonic() - full) * 1e3
        worker.resume()
        told: list[tuple[str, float]] = []
        for other in asking:
            answer = http.client.HTTPResponse(other)
            answer.begin()
            assert answer.status == (503 if other in refused else 200)
            told += stages(answer.getheader("Server-Timing") or "").items()
        waited = [ms for name, ms in told if name == FRONTEND_STAGE]
        assert len(waited) == 1 + LIMITS.queue
        assert sum(ms >= at_least_ms for ms in waited) >= LIMITS.queue, "all but the one that the worker had"
        assert max(waited) <= (time.monotonic() - sent) * 1e3
        send_head(stream, operated, QUICK, len(image), image)
        answer = http.client.HTTPResponse(stream)
        answer.begin()
        assert answer.status == 200


# --- health


def test_health_is_asked_without_a_token_and_counts_workers_that_have_loaded(operated: Operated) -> None:
    health = httpx.get(operated.url("/ping"))
    assert (health.status_code, health.json()) == (200, {"status": "Healthy"})
    with operated.running.client(operated.store) as client:
        (worker,) = client.workers(QUICK)
        psutil.Process(worker["pid"]).kill()
        eventually(lambda: httpx.get(operated.url("/ping")).status_code == 503)
        assert client.ping() == "Unhealthy"
        eventually(lambda: httpx.get(operated.url("/ping")).status_code == 200, within_s=120)
        assert client.ping() == "Healthy"
        eventually(lambda: operated.post(QUICK, jpeg(1)).status_code == 200)


# --- faults


def test_a_worker_that_is_killed_under_load_costs_what_it_had_and_nothing_hangs(operated: Operated) -> None:
    statuses: list[int] = []
    messages: set[str] = set()
    over = threading.Event()

    def ask() -> None:
        with httpx.Client(headers=operated.headers, timeout=120) as client:
            while not over.is_set():
                answer = client.post(operated.url(f"/predictions/{QUICK}"), content=jpeg(1))
                statuses.append(answer.status_code)
                if answer.status_code != 200:
                    messages.add(answer.json()["message"])
                    time.sleep(0.2)

    asking = [threading.Thread(target=ask) for _ in range(4)]
    for thread in asking:
        thread.start()
    try:
        with operated.running.client(operated.store) as client:
            (worker,) = client.workers(QUICK)
            eventually(lambda: 200 in statuses)
            psutil.Process(worker["pid"]).kill()
            eventually(lambda: any(status != 200 for status in statuses))
            eventually(lambda: httpx.get(operated.url("/ping")).status_code == 200, within_s=120)
            since = len(statuses)
            eventually(lambda: 200 in statuses[since:])
    finally:
        over.set()
        for thread in asking:
            thread.join(60)
            assert not thread.is_alive()
    assert set(statuses) == {200, 503}
    assert messages <= {
        "the worker that had this request has died, and another is being started: try again later",
        f"no worker of {QUICK} is running: try again later",
        f"the queue of {QUICK} is full: try again",
    }


def test_requests_are_answered_when_nothing_can_be_written_any_more(operated: Operated) -> None:
    # As on a full disk: a write that would make a file longer than one byte fails.
    java = psutil.Process(operated.running.pid)
    before = java.rlimit(psutil.RLIMIT_FSIZE)
    java.rlimit(psutil.RLIMIT_FSIZE, (1, before[1]))
    try:
        assert [operated.post(QUICK, jpeg(1)).status_code for _ in range(10)] == [200] * 10
        assert operated.post(QUICK, b"no image").status_code == 415
        assert operated.post("nobody", jpeg(1)).status_code == 404
        assert httpx.get(operated.url("/ping")).status_code == 200
    finally:
        java.rlimit(psutil.RLIMIT_FSIZE, before)
    assert operated.post(QUICK, jpeg(1)).status_code == 200


# --- odd clients


def test_a_client_that_shuts_its_sending_side_is_answered(operated: Operated) -> None:
    image = jpeg(1)
    with opened(operated) as stream:
        send_head(stream, operated, SLOW, len(image))
        stream.sendall(image)
        stream.shutdown(socket.SHUT_WR)
        answer = http.client.HTTPResponse(stream)
        answer.begin()
        assert answer.status == 200
        assert json.loads(answer.read())[0]["label"]
        assert stream.recv(1) == b"", "and the connection is closed"


def test_clients_that_do_not_go_on_are_let_go(operated: Operated) -> None:
    begun = time.monotonic()
    with opened(operated) as silent, opened(operated) as half_a_header, opened(operated) as half_a_body:
        half_a_header.sendall(b"POST /predictions/x HTTP/1.1\r\nHost:")
        send_head(half_a_body, operated, QUICK, 1000)
        half_a_body.sendall(b"\xff" * 500)
        for stream in (silent, half_a_header, half_a_body):
            stream.settimeout(LIMITS.receive_s + 10)
            assert stream.recv(1) == b""
            assert time.monotonic() - begun > LIMITS.receive_s - 1


def test_a_client_that_asks_on_without_reading_its_answers_is_let_go(operated: Operated) -> None:
    ping = b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n"
    with socket.socket() as stream:
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stream.settimeout(30)
        stream.connect((HOST, operated.running.ports.inference))
        with pytest.raises(ConnectionError):
            stream.sendall(ping * 500_000)  # whose answers are 50 MB and more
    # One that reads may ask for as many at once.
    with opened(operated) as stream:
        stream.sendall(ping * 200)
        reading, found = stream.makefile("rb"), 0
        while found < 200:
            found += reading.readline().startswith(b"HTTP/1.1 200")


def test_a_client_that_has_been_answered_and_asks_nothing_more_is_let_go(operated: Operated) -> None:
    with opened(operated) as stream:
        for _ in range(2):
            time.sleep(LIMITS.receive_s / 2)
            send_head(stream, operated, QUICK, len(jpeg(1)), jpeg(1))
            answer = http.client.HTTPResponse(stream)
            answer.begin()
            assert answer.status == 200
            answer.read()
        # Half a header of the next does not keep the connection.
        begun = time.monotonic()
        stream.sendall(b"POST /predictions/x HTTP/1.1\r\nHost:")
        stream.settimeout(LIMITS.receive_s + 10)
        assert stream.recv(1) == b""
        assert time.monotonic() - begun > LIMITS.receive_s - 1


def test_a_connection_too_many_is_told_to_try_again_until_another_one_goes(operated: Operated) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(LIMITS.connections):
            stack.enter_context(opened(operated))
        with opened(operated) as one_more:
            answer = http.client.HTTPResponse(one_more)
            answer.begin()
            assert (answer.status, answer.getheader("Retry-After")) == (503, "1")
            assert json.loads(answer.read())["message"] == "too many connections are open: try again"
            assert one_more.recv(1) == b""
    eventually(lambda: operated.post(QUICK, jpeg(1)).status_code == 200)


def test_a_client_that_sends_slowly_is_answered(operated: Operated) -> None:
    image = jpeg(1)
    with opened(operated) as stream:
        send_head(stream, operated, QUICK, len(image))
        for piece in (image[:10], image[10:200], image[200:]):
            time.sleep(0.4)
            stream.sendall(piece)
        answer = http.client.HTTPResponse(stream)
        answer.begin()
        assert answer.status == 200


# --- what clients send


@pytest.mark.parametrize(
    ("content_type", "body", "status", "said"),
    [
        ("application/x-www-form-urlencoded", "image", 400, "Content-Type: image/jpeg"),
        ("application/x-www-form-urlencoded; charset=utf-8", "image", 400, "Content-Type: image/jpeg"),
        ("multipart/form-data", "image", 200, ""),
        ("multipart/form-data; boundary=b", "image", 400, "data"),
        ("multipart/form-data; boundary=b", "part of another name", 400, "data"),
        ("text/plain", "image", 200, ""),
        ("application/octet-stream", "image", 200, ""),
        ("image/jpeg", "image", 200, ""),
        ("no content type at all", "image", 200, ""),
        ("application/json", "image", 400, "JSON"),
    ],
)
def test_what_a_content_type_makes_of_an_image_is_said(
    operated: Operated, content_type: str, body: str, status: int, said: str
) -> None:
    sent = jpeg(1)
    if body == "part of another name":
        disposition = b'--b\r\nContent-Disposition: form-data; name="picture"; filename="a.jpg"\r\n\r\n'
        sent = disposition + sent + b"\r\n--b--\r\n"
    answer = operated.post(QUICK, sent, **{"Content-Type": content_type})
    told = answer.json()
    assert answer.status_code == status, told
    if status == 200:
        assert told[0]["label"]
    else:
        assert said in (told.get("error") or told["message"])


DOCUMENTS = Path(__file__).parents[3] / "docs"


def example(operated: Operated, language: str, image: Path) -> str:
    """The guide's example of a client, with this server's address and files."""
    blocks = re.findall(
        rf"```{language}\n(.*?)```", (DOCUMENTS / "guides" / "serve.md").read_text(encoding="utf-8"), re.DOTALL
    )
    (text,) = [block for block in blocks if "URL" in block]
    (model,) = set(re.findall(r"/predictions/([\w.-]+)", text))  # the one that the table recommends
    assert f"★ {model.removeprefix('resnet18-')} " in (DOCUMENTS / "get-started.md").read_text(encoding="utf-8")
    for written, meant in {
        f"http://127.0.0.1:8080/predictions/{model}": operated.url(f"/predictions/{QUICK}"),
        "model_store": str(operated.store),
        "image.jpg": str(image),
    }.items():
        assert written in text
        text = text.replace(written, meant)
    return str(text)


def test_the_guides_python_works(operated: Operated, tmp_path: Path) -> None:
    pytest.importorskip("requests")
    image = tmp_path / "picture.jpg"
    image.write_bytes(jpeg(1))
    lines = example(operated, "python", image).splitlines()
    answers = ("httpx.post", "requests.post", "json.load")
    shown = [f"print({line})" if line.startswith(answers) else line for line in lines]
    ended = subprocess.run(
        [sys.executable, "-c", "\n".join(shown)], capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    printed = ended.stdout.splitlines()
    assert len(printed) == len(answers)
    assert "'label'" in printed[0]
    assert len(set(printed)) == 1, "whoever asks, the answer is the same"


def test_the_guides_curl_works(operated: Operated, tmp_path: Path) -> None:
    image = tmp_path / "picture.jpg"
    image.write_bytes(jpeg(1))
    script = example(operated, "console", image)
    ways = script.count("curl ")
    script = re.sub(r"^curl .*?(?= *#|$)", r"\g<0> -sS; echo", script, flags=re.MULTILINE)
    ended = subprocess.run(["bash", "-ec", script], capture_output=True, text=True, check=True, timeout=60)
    answers = [json.loads(line) for line in ended.stdout.splitlines() if line]
    assert len(answers) == ways == 3
    assert all(answer == answers[0] and answer[0]["label"] for answer in answers)
    url = operated.url(f"/predictions/{QUICK}")
    header = f"@{state_folder(operated.store) / 'authorization'}"
    words = ["curl", "-sS", "-H", header, "--data-binary", f"@{image}", url]
    assert "-T FILE" in subprocess.run(words, capture_output=True, check=True, timeout=60).stdout.decode()


# --- stop and restart


def test_keys_are_replaced_when_that_is_asked_for(operated: Operated) -> None:
    first = json.loads((state_folder(operated.store) / "key_file.json").read_text())
    assert {len(entry["key"]) for entry in first.values()} == {32}
    old = operated.headers
    words = [sys.executable, "-m", "serve", "renew-keys", "--store", str(operated.store)]
    ended = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert operated.headers != old
    url = operated.url(f"/predictions/{QUICK}")
    assert httpx.post(url, content=jpeg(1), headers=old, timeout=60).status_code == 400
    assert operated.post(QUICK, jpeg(1)).status_code == 200


def test_without_a_server_its_keys_are_forgotten(tmp_path: Path) -> None:
    folder = state_folder(tmp_path)
    folder.mkdir()
    (folder / "key_file.json").write_text("{}")
    words = [sys.executable, "-m", "serve", "renew-keys", "--store", str(tmp_path)]
    subprocess.run(words, check=True, capture_output=True, timeout=60)
    assert not (folder / "key_file.json").exists()


def test_stop_answers_what_was_accepted_and_a_restart_keeps_the_keys(operated: Operated) -> None:
    """The last of this file: it stops the server that the others share, and starts one in its place."""
    first, store = operated, operated.store
    header = first.header
    keys = (state_folder(store) / "key_file.json").read_text()
    lost: list[str] = []
    statuses: list[int] = []

    def ask_again_and_again() -> None:
        # On one connection: what was sent on it is answered, and the last answer says that it closes.
        kept = http.client.HTTPConnection(HOST, first.running.ports.inference, timeout=60)
        headers = {**first.headers, "Content-Type": "image/jpeg"}
        with contextlib.closing(kept):
            while True:
                try:
                    kept.request("POST", f"/predictions/{QUICK}", jpeg(1), headers)
                    answer = kept.getresponse()
                    answer.read()
                except ConnectionRefusedError:
                    return
                except (http.client.HTTPException, OSError) as error:
                    lost.append(repr(error))
                    return
                statuses.append(answer.status)
                if answer.status != 200:
                    return

    asking = [threading.Thread(target=ask_again_and_again) for _ in range(4)]
    for thread in asking:
        thread.start()
    answers: list[tuple[int, str | None, bytes]] = []
    sent = threading.Event()
    slow = threading.Thread(target=lambda: answers.extend(all_at_once(first, SLOW, 12, sent.set)))
    slow.start()
    assert sent.wait(30)
    time.sleep(SLOWNESS_S / 4)
    assert not answers
    server.stop(store)
    for thread in (slow, *asking):
        thread.join(60)
    assert [status for status, *_ in answers] == [200] * 12
    assert not lost
    assert 200 in statuses
    assert set(statuses) <= {200, 503}
    console = (state_folder(store) / "logs.previous" / "console.log").read_text()
    assert "all that was accepted is answered" in console
    with operating(store, archives_in(store)) as second:
        assert second.header == header
        written = (state_folder(store) / "key_file.json").read_text()
        old, new = ({kind: entry["key"] for kind, entry in json.loads(text).items()} for text in (keys, written))
        assert new == old
        name, _, value = header.partition(": ")
        answer = httpx.post(second.url(f"/predictions/{QUICK}"), content=jpeg(1), headers={name: value}, timeout=60)
        assert answer.status_code == 200
        assert re.search(r"State change \S+ -> WORKER_MODEL_LOADED", (second.logs / "ts_log.log").read_text())


# ---


def opened(operated: Operated) -> socket.socket:
    return socket.create_connection((HOST, operated.running.ports.inference), timeout=30)


def send_head(
    stream: socket.socket, operated: Operated, model: str, length: int, body: bytes = b"", *, name: str = ""
) -> None:
    head = f"POST /predictions/{model} HTTP/1.1\r\nHost: x\r\n{operated.header}\r\nContent-Type: image/jpeg\r\n"
    head += f"X-Request-Id: {name}\r\n" if name else ""
    stream.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode() + body)


def all_at_once(
    operated: Operated, model: str, count: int, then: Callable[[], object] = lambda: None
) -> list[tuple[int, str | None, bytes]]:
    """Send so many requests on connections that are open already, and only then read: status, Retry-After, body."""
    image = jpeg(1)
    with contextlib.ExitStack() as stack:
        streams = [stack.enter_context(opened(operated)) for _ in range(count)]
        for stream in streams:
            send_head(stream, operated, model, len(image), image)
        then()
        answers = []
        for stream in streams:
            answer = http.client.HTTPResponse(stream)
            answer.begin()
            answers.append((answer.status, answer.getheader("Retry-After"), answer.read()))
        return answers


def eventually(holds: Callable[[], bool], within_s: float = 20.0) -> None:
    until = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.1)
