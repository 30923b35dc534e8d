"""The own server as a process: what it prints, broken clients, versions that change places, and how it ends."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from benchmarks.hostile import mutations
from serve.runtime.card.execution import ENVIRONMENT
from tests.serve.damaged import asked
from tests.serve.own_process import IMAGE, TOKEN, Server, assert_ends_in_order, make_archives, running, write_models


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_archives(tmp_path_factory.mktemp("archives"))


@pytest.fixture(scope="module")
def server(archives: Path) -> Iterator[Server]:
    arguments = ("--models", "models.yaml", "--token-file", "tokens", "--body-timeout", "1", "--body-limit-mb", "1")
    words = [str(archives / word) if word.islower() and not word.startswith("-") else word for word in arguments]
    with running(archives, *words) as started:
        yield started


def test_its_first_line_says_what_is_served_where(server: Server) -> None:
    line = next(line for line in server.lines if not line.startswith("{"))
    assert line.startswith("serving m 1.0 at http://127.0.0.1:")
    assert "float32 with torchscript" in server.await_line("loaded m 1.0")


def test_photos_are_answered_on_one_connection_and_by_many_at_once(server: Server) -> None:
    with server.client() as client:
        alone = client.post("/predictions/m", content=IMAGE)
        assert alone.status_code == 200
        answers: list[httpx.Response] = []

        def post() -> None:
            with server.client() as other:
                answers.extend(other.post("/predictions/m", content=IMAGE) for _ in range(10))

        threads = [threading.Thread(target=post) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert Counter(answer.status_code for answer in answers) == {200: 80}
        best = {(answer.json()[0]["label"], round(answer.json()[0]["probability"], 4)) for answer in answers}
        assert best == {(alone.json()[0]["label"], round(alone.json()[0]["probability"], 4))}


def test_no_damaged_image_of_any_format_is_a_fault_of_the_server(server: Server) -> None:
    statuses: Counter[int] = Counter()
    with server.client() as client:
        for number, image in enumerate(mutations.sample()):
            answer = client.post("/predictions/m", content=image)
            assert answer.status_code in (200, 400, 413, 415), (number, answer.status_code, answer.text)
            statuses[answer.status_code] += 1
        assert all(statuses[status] > 20 for status in (200, 400, 415)), statuses
        assert client.post("/predictions/m", content=IMAGE).status_code == 200


def test_thousands_of_damaged_images_among_whole_ones_cost_nobody_else_an_answer(server: Server) -> None:
    begun = len(server.lines)

    def ask(first: int) -> Counter[str]:
        with server.client() as client:
            return asked(client, "/predictions/m", range(first, 16_000, 4), IMAGE)

    with ThreadPoolExecutor(4) as pool:
        seen = sum(pool.map(ask, range(10_000, 10_004)), Counter())
    assert seen.total() == 6000
    assert min(seen["answered"], seen["refused"]) > 500, seen
    assert server.process.poll() is None
    said = server.lines[begun:]
    assert not [line for line in said if "Traceback" in line or '"logger": "PIL' in line], "a client would fill the log"


def test_a_broken_form_is_told_to_its_client_and_not_to_the_log(server: Server) -> None:
    begun = len(server.lines)
    with server.client() as client:
        for _ in range(20):
            kind = {"content-type": "multipart/form-data; boundary=xyz"}
            answer = client.post("/predictions/m", content=b"--abc\r\n\r\n", headers=kind)
            assert answer.status_code == 400
            assert "the multipart form cannot be read" in answer.json()["error"]
    assert not [line for line in server.lines[begun:] if "multipart" in line]


def test_a_body_beyond_the_limit_is_told_while_it_is_sent(server: Server) -> None:
    with server.socket() as opened:
        head = f"POST /predictions/m HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
        opened.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
        with contextlib.suppress(OSError):
            for _ in range(17):
                opened.sendall(chunk)
        assert opened.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_a_client_that_stalls_in_its_body_is_told_408(server: Server) -> None:
    with server.socket() as opened:
        head = f"POST /predictions/m HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
        opened.sendall(f"{head}Content-Length: 1000\r\n\r\nabc".encode())
        assert opened.recv(4096).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("sent", [b"", b"\r\n", b"GET /pi", b"not http at all\r\n\r\n"])
def test_half_a_request_and_then_silence_leaves_nothing_behind(sent: bytes, server: Server) -> None:
    with server.socket() as opened:
        opened.sendall(sent)
        opened.shutdown(socket.SHUT_WR)
        opened.settimeout(10)
        while opened.recv(4096):
            pass
    with server.client() as client:
        assert client.get("/ping").status_code == 200


def test_headers_without_end_are_cut(server: Server) -> None:
    with server.socket() as opened:
        with contextlib.suppress(OSError):
            opened.sendall(b"GET /ping HTTP/1.1\r\nX: ")
            for _ in range(40):
                opened.sendall(b"x" * 8192)
        answer = b""
        with contextlib.suppress(ConnectionError):
            answer = opened.recv(4096)
        # What still lies unread when a connection is closed may take the answer with it.
        assert answer[:13] in (b"", b"HTTP/1.1 431 ")
    with server.client() as client:
        assert client.get("/ping").status_code == 200


def test_versions_change_places_under_load_without_a_lost_request(server: Server) -> None:
    stop = threading.Event()
    answers: list[tuple[int, str]] = []

    def load() -> None:
        with server.client() as client:
            while not stop.is_set():
                answer = client.post("/predictions/m", content=IMAGE)
                answers.append((answer.status_code, answer.headers["x-model-version"]))

    def changed(versions: dict[str, tuple[str, int]], says: str) -> None:
        server.lines[:] = [line for line in server.lines if "changed:" not in line]
        write_models(server.folder, versions)
        server.process.send_signal(signal.SIGHUP)
        assert says in server.await_line("changed:")

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        changed({"1.0": ("v1.mar", 3), "2.0": ("v2.mar", 1)}, "m 1.0 (weight 3), m 2.0 (weight 1)")
        answers.clear()
        while len(answers) < 80:
            time.sleep(0.01)
        shares = Counter(version for _, version in answers[:80])
        changed({"2.0": ("v2.mar", 1)}, "serving m 2.0 (weight 1)")
        with server.client() as client:
            later = {client.post("/predictions/m", content=IMAGE).headers["x-model-version"] for _ in range(8)}
            assert client.post("/predictions/m/1.0", content=IMAGE).status_code == 404
        server.await_line('"event": "closed"')
        changed({"1.0": ("v1.mar", 1)}, "serving m 1.0 (weight 1)")
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert {status for status, _ in answers} == {200}
    assert 55 <= shares["1.0"] <= 65  # 3 of 4, but that requests are counted as they are answered
    assert later == {"2.0"}


def test_what_cannot_be_served_changes_nothing(server: Server) -> None:
    (server.folder / "broken.mar").write_bytes((server.folder / "v1.mar").read_bytes()[:-100])
    write_models(server.folder, {"1.0": ("v1.mar", 1), "3.0": ("broken.mar", 1)})
    server.process.send_signal(signal.SIGHUP)
    assert "broken.mar" in server.await_line("nothing was changed")
    with server.client() as client:
        assert client.get("/health/ready").status_code == 200
        assert client.post("/predictions/m", content=IMAGE).status_code == 200
    write_models(server.folder, {"1.0": ("v1.mar", 1)})


def test_where_a_private_copy_cannot_be_written_nothing_is_changed(server: Server) -> None:
    server.lines.clear()
    write_models(server.folder, {"1.0": ("v2.mar", 1)})
    before = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        server.process.send_signal(signal.SIGHUP)
        line = server.await_line("nothing was changed")
        assert "v2.mar: cannot be copied to " in line
        assert "(File too large)" in line
        with server.client() as client:
            assert client.get("/health/ready").status_code == 200
            assert len(client.post("/predictions/m", content=IMAGE).json()) == 5
    finally:
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, before)
    write_models(server.folder, {"1.0": ("v1.mar", 1)})


def test_told_to_end_it_answers_what_it_accepted_and_exits_with_0(server: Server) -> None:
    # The last test of this process.
    assert_ends_in_order(server, "m", server.process.pid)


def test_a_second_signal_ends_at_once(archives: Path, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with running(archives, str(archives / "v1.mar"), "--no-token", "--socket", str(path), "--drain-delay", "60") as it:
        assert it.url == f"unix:{path}"
        it.await_line("no token: the server answers this user")
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://x") as client:
            assert client.post("/predictions/v1", content=IMAGE).status_code == 200
            it.process.send_signal(signal.SIGINT)
            it.await_line("SIGINT")
            assert client.get("/health/ready").status_code == 503
            assert client.get("/health/live").status_code == 200
            assert client.post("/predictions/v1", content=IMAGE).status_code == 200
        it.process.send_signal(signal.SIGTERM)
        assert it.process.wait(30) == 128 + signal.SIGTERM  # half of --drain-delay


@pytest.mark.parametrize("gone", ["closed", "full"])
def test_it_ends_in_order_where_nobody_can_read_what_it_prints(gone: str, archives: Path, tmp_path: Path) -> None:
    printed, errors = tmp_path / "out", tmp_path / "err"
    command = [sys.executable, "-m", "serve", "run", str(archives / "v1.mar"), "--no-token", "--port", "0"]
    environment = {name: value for name, value in os.environ.items() if name != "NOTIFY_SOCKET"}
    with printed.open("w") as out, errors.open("w") as err:
        process = subprocess.Popen(
            [*command, "--store", str(tmp_path)],
            stdout=subprocess.PIPE if gone == "closed" else out,
            stderr=err,
            text=True,
            env=environment,
        )
    try:
        if process.stdout is not None:
            assert any(line.startswith("ready:") for line in process.stdout), errors.read_text()
            process.stdout.close()
        else:
            until = time.monotonic() + 60
            while "ready:" not in printed.read_text():
                assert process.poll() is None, errors.read_text()
                assert time.monotonic() < until
                time.sleep(0.05)
            # Python ignores SIGXFSZ: a write beyond it fails as on a full disk.
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0, errors.read_text()
        assert "Traceback" not in errors.read_text()
        assert "Exception ignored" not in errors.read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(30)


def test_torchs_threads_read_the_environment_that_executions_are_measured_in(tmp_path: Path) -> None:
    # libgomp tells what it has read, when torch loads it; that this is no archive comes later, where nobody has to look
    # into it for how many processes there are to be.
    (tmp_path / "none.mar").write_bytes(b"nothing")
    environment = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
    words = [sys.executable, "-m", "serve", "run", "--store", str(tmp_path), "--processes", "1", "--port", "0"]
    words += ["--no-token", str(tmp_path / "none.mar")]
    for own, read in ({}, "10000"), ({"GOMP_SPINCOUNT": "77"}, "77"):
        told = subprocess.run(
            words,
            env={**environment, "OMP_DISPLAY_ENV": "verbose", **own},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert told.returncode == 1
        assert "not an archive of this project" in told.stderr
        assert f"GOMP_SPINCOUNT = '{read}'" in told.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "name what to serve"),
        (("none.mar",), "there is no such archive"),
        (("none", "--processes", "2"), "there is no run 'none'"),
        (("v1.mar", "--host", "0.0.0.0"), "--expose"),
        (("v1.mar", "--no-token", "--token-file", "x"), "cannot be used together"),
        (("v1.mar", "--socket", "s", "--port", "8080"), "--socket and --port cannot be used together"),
        (("v1.mar", "--socket", "s", "--host", "127.0.0.1"), "--host together with --socket applies to gRPC only"),
        (("v1.mar", "--tls-key", "x"), "--tls-certificate"),
        (("v1.mar", "--port", "18080", "--grpc-port", "18080"), "both 18080: gRPC needs a port of its own"),
        (("v1.mar", "--drain-timeout", "inf"), "--drain-timeout must be at most 86400 seconds, got inf"),
        (("v1.mar", "--drain-timeout", "nan"), "--drain-timeout"),
        (("v1.mar", "--drain-delay", "1e300"), "--drain-delay must be at most 86400 seconds"),
        (("v1.mar", "--body-timeout", "inf"), "--body-timeout must be at most 86400 seconds"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2_and_nothing_is_made(
    arguments: tuple[str, ...], says: str, archives: Path, tmp_path: Path
) -> None:
    from typer.testing import CliRunner

    from serve.cli import app

    words = [str(archives / word) if word == "v1.mar" else word for word in arguments]
    result = CliRunner().invoke(app, ["run", "--store", str(tmp_path), *words])
    assert result.exit_code == 2
    assert [*tmp_path.iterdir()] == []
    assert says in result.output


def test_a_server_that_takes_the_socket_of_one_that_ends_keeps_it(archives: Path, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    words = (str(archives / "v1.mar"), "--no-token", "--socket", str(path))
    with running(archives, *words) as first, socket.socket(socket.AF_UNIX) as slow:
        slow.connect(str(path))
        slow.sendall(b"POST /predictions/v1 HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n")
        time.sleep(0.2)
        first.process.send_signal(signal.SIGTERM)
        first.await_line("SIGTERM")
        while path.exists():
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
                probe.connect(str(path))
                time.sleep(0.05)
                continue
            break
        with running(archives, *words) as second:
            slow.sendall(b"ab")
            assert slow.recv(100).startswith(b"HTTP/1.1 415")
            assert first.process.wait(30) == 0
            with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://x") as client:
                assert client.get("/health/ready").status_code == 200
            assert second.process.poll() is None
