"""Several processes that serve at one port: what each takes, what all tell, and how they are started again and end."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from serve.asgi.http.listen_sockets import Listening
from serve.asgi.http.server_settings import Settings
from serve.asgi.process import process_group
from serve.asgi.process.group_member import Change, Changed
from serve.common.options import ServingOptions
from serve.torchserve.archive_builder import build_archive
from tests.serve import artifacts
from tests.serve.certificates import certify
from tests.serve.own_process import IMAGE, Server, assert_ends_in_order, make_archives, running, write_models

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="each process needs a core")


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_archives(tmp_path_factory.mktemp("archives"))


@pytest.fixture(scope="module")
def server(archives: Path) -> Iterator[Server]:
    words = ("--models", str(archives / "models.yaml"), "--token-file", str(archives / "tokens"))
    with running(archives, *words, "--processes", "2", "--grpc-port", "0", "--held-limit-mb", "512") as started:
        yield started


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[socket.socket]:
    """Where systemd would be told how the service stands."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as opened:
        opened.bind(str(tmp_path_factory.mktemp("systemd") / "notify"))
        opened.settimeout(30)
        yield opened


@pytest.fixture(scope="module")
def service(archives: Path, told: socket.socket, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """As systemd runs it; the temporary folder's path is longer than a unix socket's may be."""
    folder = tmp_path_factory.mktemp("t" * 120)
    before = ("env", f"NOTIFY_SOCKET={told.getsockname()}", f"TMPDIR={folder}")
    words = (str(archives / "v1.mar"), "--no-token", "--processes", "2")
    limits = ("--body-limit-mb", "16", "--held-limit-mb", "32")
    with running(archives, *words, *limits, before=before) as started:
        yield started


@contextlib.contextmanager
def starting(archives: Path, folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A server with a group of its own, as a shell starts it, whose processes have begun and hear nothing yet."""
    command = [sys.executable, "-m", "serve", "run", str(archives / "v1.mar"), "--store", str(archives)]
    process = subprocess.Popen(
        [*command, "--no-token", "--port", "0", "--processes", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"TMPDIR": str(folder)},
        start_new_session=True,
    )
    members: list[psutil.Process] = []
    try:
        while len(members) < 2:
            assert process.poll() is None
            time.sleep(0.01)
            with contextlib.suppress(psutil.Error):  # another child of a moment
                children = psutil.Process(process.pid).children()
                members = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
        yield process, members
    finally:
        for member in members:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        process.kill()
        process.communicate()


def pids(server: Server, model: str = "m") -> Counter[int]:
    """Who answers, of 24 connections one after the other."""
    found: Counter[int] = Counter()
    for _ in range(24):
        with server.client() as client:
            found[client.get(f"/models/{model}").json()["pid"]] += 1
    return found


def values(server: Server, name: str) -> dict[str, float]:
    """A metric's values by process, those of other labels added up."""
    found: dict[str, float] = defaultdict(float)
    with server.client() as client:
        families = list(text_string_to_metric_families(client.get("/metrics").text))
    for sample in (sample for family in families for sample in family.samples if sample.name == name):
        found[sample.labels["process"]] += sample.value
    return dict(found)


def refused(archives: Path, archive: str, *words: str) -> tuple[int, str]:
    """The exit status of a server that does not come up, and what it says."""
    what = (str(archives / archive), "--store", str(archives), "--no-token")
    command = [sys.executable, "-m", "serve", "run", *what, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stderr


def test_connections_are_dealt_out_and_each_process_has_its_cores(server: Server) -> None:
    assert server.await_line("ready:").endswith(" (2 processes)\n")
    found = pids(server)
    assert len(found) == 2
    assert min(found.values()) >= 3, "of 24; by chance once in 20,000"
    shares = [frozenset(os.sched_getaffinity(pid)) for pid in found]
    assert shares[0].isdisjoint(shares[1])
    assert shares[0] | shares[1] == os.sched_getaffinity(0)
    assert {psutil.Process(pid).ppid() for pid in found} == {server.process.pid}


def test_the_one_that_starts_them_has_nothing_loaded_to_compute_with(server: Server) -> None:
    def computes(number: int) -> bool:
        return any("libtorch" in each.path for each in psutil.Process(number).memory_maps())

    assert all(computes(number) for number in pids(server))
    assert not computes(server.process.pid)


def test_whoever_is_scraped_tells_of_all(server: Server) -> None:
    before = values(server, "serve_requests_total")
    statuses = []
    for _ in range(24):
        with server.client() as client:
            statuses.append(client.post("/predictions/m", content=IMAGE).status_code)
    assert set(statuses) == {200}
    for _ in range(4):  # of several connections: it must not matter which
        seen = values(server, "serve_requests_total")
        assert sum(seen.values()) >= sum(before.values()) + 24
        assert all(seen[process] > before[process] for process in ("0", "1"))
        assert values(server, "serve_process_up") == {"0": 1, "1": 1}
    assert values(server, "serve_held_limit_bytes") == {"0": 256 << 20, "1": 256 << 20}


def test_grpc_is_shared_as_well(server: Server) -> None:
    address = server.await_line("gRPC at").split("gRPC at ")[1].strip()
    for _ in range(6):
        with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            live = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
            assert live(b"", timeout=30) == b"\x08\x01"


def test_all_change_what_they_serve(server: Server) -> None:
    write_models(server.folder, {"2.0": ("v2.mar", 1)})
    server.process.send_signal(signal.SIGHUP)
    ends = time.monotonic() + 60
    found: set[tuple[int, int]] = set()
    while time.monotonic() < ends and sum("changed: serving m 2.0" in line for line in server.lines) < 2:
        time.sleep(0.05)
    for _ in range(24):
        with server.client() as client:
            answer = client.post("/predictions/m", content=IMAGE)
            found.add((client.get("/models/m").json()["pid"], len(answer.json())))
    assert {count for _, count in found} == {4}, "v2 answers four classes"
    assert len({pid for pid, _ in found}) == 2


def test_a_process_that_is_killed_costs_only_its_own_connections_and_comes_back(server: Server) -> None:
    (killed, _), (other, _) = pids(server).most_common(2)
    stop, lost, answered = threading.Event(), Counter[str](), Counter[int]()

    def ask() -> None:
        while not stop.is_set():
            try:
                with server.client() as client:
                    for _ in range(5):
                        answered[client.post("/predictions/m", content=IMAGE).status_code] += 1
            except httpx.TransportError as error:
                lost[type(error).__name__] += 1
                time.sleep(0.05)  # the kernel takes some ms to close what a killed process listens at

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    os.kill(killed, signal.SIGKILL)
    server.await_line(": ready again")
    assert "was ended by SIGKILL; starting another" in server.await_line("SIGKILL")
    stop.set()
    for thread in threads:
        thread.join()
    assert set(answered) == {200}
    assert answered[200] > 50
    assert lost.total() <= len(threads), lost  # what was on its way to it; who came later met the other
    now = pids(server)
    assert other in now
    assert killed not in now
    assert len(now) == 2
    assert values(server, "serve_process_up") == {"0": 1, "1": 1}


def test_told_to_end_all_answer_what_they_accepted_and_the_status_is_0(server: Server) -> None:
    # The last test of this server.
    assert_ends_in_order(server, "m", server.process.pid)


@pytest.mark.slow
def test_a_process_that_is_stopped_is_replaced_and_does_not_keep_the_server_from_its_end(archives: Path) -> None:
    """Of two servers, one of which is told to end: they wait for 30 s together."""
    arguments = (str(archives / "v1.mar"), "--no-token", "--processes", "2")
    with running(archives, *arguments) as server, running(archives, *arguments) as ending:
        (stopped, _), (other, _) = pids(server, "v1").most_common(2)
        for number in (stopped, pids(ending, "v1").most_common()[0][0]):
            os.kill(number, signal.SIGSTOP)
        ending.process.send_signal(signal.SIGTERM)
        assert "starting another in 1 s" in server.await_line("did not answer for 30 s; it was killed")
        server.await_line(": ready again")
        now = pids(server, "v1")
        assert len(now) == 2
        assert other in now
        assert stopped not in now
        assert ending.process.wait(60) == 128 + signal.SIGKILL
        assert sum("did not answer for 30 s; it was killed" in line for line in ending.lines) == 1


def test_where_the_first_process_is_killed_the_others_end(archives: Path) -> None:
    with running(archives, str(archives / "v1.mar"), "--no-token", "--processes", "2") as server:
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert len(children) >= 2
        server.process.kill()
        assert not psutil.wait_procs(children, timeout=20)[1]


def test_a_second_server_does_not_get_a_share_of_the_port(archives: Path) -> None:
    with running(archives, str(archives / "v1.mar"), "--no-token", "--processes", "2") as server:
        port = server.url.rpartition(":")[2]
        for more in ((), ("--processes", "2")):
            status, said = refused(archives, "v1.mar", "--port", port, *more)
            assert (status, said.count("\n")) == (2, 1), said
            assert f"127.0.0.1:{port} cannot be used (Address already in use)" in said
        assert len(pids(server, "v1")) == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--processes", "4096"), "--processes must be at most the number of cores, "),
        (("--processes", "2", "--socket", "s"), "--processes needs a port"),
        (("--processes", "0"), "--processes"),
        (("--processes", "2", "--connections", "1"), "--connections must be at least the number of --processes, 2"),
        (("--processes", "2", "--held-limit-mb", "127"), "--held-limit-mb must be at least 128"),
        (("--processes", "2", "--body-limit-mb", "300", "--held-limit-mb", "512"), "--body-limit-mb 300"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(words: tuple[str, ...], says: str, archives: Path) -> None:
    status, said = refused(archives, "v1.mar", *words)
    assert (status, said.count("\n")) == (2, 1), said
    assert says in said


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Archives whose ``serving.json`` asks for 2 workers and for more than there are cores."""
    folder = tmp_path_factory.mktemp("many")
    artifact = artifacts.torchscript(folder / "artifact")
    for name, workers in (("two", 2), ("most", 4096)):
        build_archive(artifact, folder / f"{name}.mar", model_name=name, options=ServingOptions(workers=workers))
    return folder


@pytest.mark.parametrize(
    ("words", "count"),
    [
        (("two.mar",), 2),
        (("v1.mar", "two.mar"), 2),
        (("two.mar", "--processes", "1"), 1),
        (("most.mar",), len(os.sched_getaffinity(0))),
        (("two.mar", "--connections", "1"), 1),
        (("two.mar", "--held-limit-mb", "100"), 1),
    ],
)
def test_as_many_serve_as_an_archive_asks_for_workers(
    words: tuple[str, ...], count: int, archives: Path, many: Path
) -> None:
    places = [str((archives if word == "v1.mar" else many) / word) if word.endswith(".mar") else word for word in words]
    with running(archives, *places, "--no-token") as started:
        serving = psutil.Process(started.process.pid).children(recursive=True)
        serving = [process for process in serving if "spawn_main" in " ".join(process.cmdline())]
        assert len(serving) == (count if count > 1 else 0)
        told = [line for line in started.lines if "workers" in line]
        cores = len(os.sched_getaffinity(0))
        asks = "its serving.json asks for"
        capped = {
            "most.mar": f"most: {asks} 4096 workers, but this machine has {cores} cores: starting {cores}\n",
            "--connections": f"two: {asks} 2 workers, but --connections are 1: starting 1\n",
            "--held-limit-mb": f"two: {asks} 2 workers, but --held-limit-mb is 100: starting 1\n",
        }
        assert told == [line for word, line in capped.items() if word in words]


def test_at_a_socket_one_process_serves_whatever_an_archive_asks_for(many: Path) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="s") as short,
        running(many, str(many / "two.mar"), "--no-token", "--socket", f"{short}/s") as started,
    ):
        assert (
            "two: its serving.json asks for 2 workers, but a --socket allows one process: starting 1\n" in started.lines
        )
        others = psutil.Process(started.process.pid).children(recursive=True)
        assert not [other for other in others if "library_output" not in " ".join(other.cmdline())]


def test_what_cannot_be_served_ends_all_with_one_line(archives: Path) -> None:
    (archives / "cut.mar").write_bytes((archives / "v1.mar").read_bytes()[:-100])
    status, said = refused(archives, "cut.mar", "--port", "0", "--processes", "2")
    assert status != 0
    assert sum(line.startswith("error: ") and "cut.mar" in line for line in said.splitlines()) == 1, said
    assert "Traceback" not in said


def test_tls_is_spoken_by_all(archives: Path, tmp_path: Path) -> None:
    certificate, key = certify(tmp_path)
    words = ("--tls-certificate", str(certificate), "--tls-key", str(key))
    with running(archives, str(archives / "v1.mar"), "--no-token", "--processes", "2", *words) as server:
        trusts = ssl.create_default_context(cafile=str(certificate))
        found = set()
        for _ in range(24):
            with httpx.Client(base_url=server.url, verify=trusts, timeout=30, trust_env=False) as client:
                found.add(client.get("/models/v1").json()["pid"])
        assert len(found) == 2


def test_together_they_hold_no_more_than_one_may(service: Server) -> None:
    assert values(service, "serve_held_limit_bytes") == {"0": 16 << 20, "1": 16 << 20}
    assert values(service, "serve_process_up") == {"0": 1, "1": 1}


def test_a_scrape_does_not_wait_for_a_process_that_is_stopped_nor_does_that_one_complain(service: Server) -> None:
    (stopped, _), (other, _) = pids(service, "v1").most_common(2)
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(service.client())
        while client.get("/models/v1").json()["pid"] != other:
            client = stack.enter_context(service.client())
        os.kill(stopped, signal.SIGSTOP)
        try:
            before = time.monotonic()
            said = client.get("/metrics").text
            assert time.monotonic() - before < 5
        finally:
            os.kill(stopped, signal.SIGCONT)
    assert said.count("serve_process_up{") == 2
    assert sum(line.startswith("serve_process_up{") and line.endswith(" 0.0") for line in said.splitlines()) == 1
    assert values(service, "serve_process_up") == {"0": 1, "1": 1}
    assert not [line for line in service.lines if "Unhandled exception" in line]


def test_a_process_that_cannot_be_started_again_is_tried_later(service: Server) -> None:
    allowed = resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE, (3, allowed[1]))
    os.kill(min(pids(service, "v1")), signal.SIGKILL)
    service.await_line("cannot be started (Too many open files); starting another in 2 s")
    resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE, allowed)
    service.await_line(": ready again")
    assert len(pids(service, "v1")) == 2


def test_as_systemd_ends_a_service_each_is_told_to_and_all_is_answered(service: Server, told: socket.socket) -> None:
    # The last test of this server.
    everyone = [service.process.pid, *(child.pid for child in psutil.Process(service.process.pid).children())]
    service.process.send_signal(signal.SIGHUP)
    service.await_line("changed: serving v1")
    states = [told.recv(1000).decode().partition("\n")[0] for _ in range(3)]
    assert states == ["READY=1", "RELOADING=1", "READY=1"]
    service.process.send_signal(signal.SIGHUP)  # what it has to do when it ends is no reason to be ready
    assert_ends_in_order(service, "v1", *everyone)
    states = []
    told.settimeout(0)
    with contextlib.suppress(BlockingIOError):
        while True:
            states.append(told.recv(1000).decode().partition("\n")[0])
    assert states[0] == "RELOADING=1"
    assert states[-1] == "STOPPING=1"


def test_told_twice_to_change_it_is_ready_when_all_have_for_the_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[str] = []
    monkeypatch.setattr(process_group, "notify", lambda state: states.append(state.partition("\n")[0]))
    together = process_group._Group(Settings(listening=Listening(port=0)), list, lambda _: None, [[0], [1]], tmp_path)
    process: Any = None
    pipes = [multiprocessing.Pipe() for _ in range(2)]
    together._members = {number: process_group._Started(process, ours) for number, (ours, _) in enumerate(pipes)}
    together._was_ready = True
    together._change()
    together._change()
    for number, (_, theirs) in enumerate(pipes):
        assert [theirs.recv() for _ in range(2)] == [Change(1), Change(2)]
        theirs.send(Changed(1))
        together._read_messages(number, together._members[number])
    assert states == ["RELOADING=1", "RELOADING=1"]
    for number, (ours, theirs) in enumerate(pipes):
        theirs.send(Changed(2))
        together._read_messages(number, together._members[number])
        theirs.close()
        ours.close()
    assert states == ["RELOADING=1", "RELOADING=1", "READY=1"]


def test_ctrl_c_while_it_starts_ends_it_in_order(archives: Path, tmp_path: Path) -> None:
    with starting(archives, tmp_path) as (process, members):
        os.killpg(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=60)
        assert process.returncode == 0, said
        assert "Traceback" not in said
        assert not psutil.wait_procs(members, timeout=10)[1]
        assert not list(tmp_path.iterdir())


def test_a_second_signal_ends_one_that_is_stopped_as_well(archives: Path, tmp_path: Path) -> None:
    with starting(archives, tmp_path) as (process, members):
        members[1].suspend()
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        assert any(line.startswith("SIGTERM: ") for line in process.stdout)
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=20)
        assert process.returncode == 128 + signal.SIGTERM, said
        assert not psutil.wait_procs(members, timeout=10)[1]
        assert not list(tmp_path.iterdir())
