"""gRPC and metrics of the own server as a process: what it prints, TLS, and that it answers what it accepted."""

from __future__ import annotations

import contextlib
import queue
import signal
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton
from PIL import Image
from tritonclient.utils import InferenceServerException

from benchmarks.hostile.pictures import encoded
from serve.asgi.http.listen_sockets import Listening
from serve.asgi.http.server_settings import Settings
from serve.asgi.protocols.oip_messages import SERVICE, message
from serve.runtime.errors import UserError
from serve.torchserve.archive_builder import build_archive
from tests.serve import artifacts
from tests.serve.certificates import certify
from tests.serve.own_process import HEADERS, TOKEN, Server, running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grpc")
    build_archive(artifacts.torchscript(folder / "artifact"), folder / "m.mar", model_name="m")
    (folder / "tokens").write_text(TOKEN + "\n")
    (folder / "tokens").chmod(0o600)
    return folder


@pytest.fixture(scope="module")
def encrypted(folder: Path) -> Iterator[Server]:
    certificate, key = certify(folder)
    options = ("--grpc-port", "0", "--tls-certificate", str(certificate), "--tls-key", str(key))
    with running(folder, str(folder / "m.mar"), "--token-file", str(folder / "tokens"), *options) as server:
        yield server


BODY_MB, HELD_MB, CONNECTIONS = 8, 16, 40


@pytest.fixture(scope="module")
def narrow(folder: Path) -> Iterator[Server]:
    bounds = ("--body-limit-mb", str(BODY_MB), "--held-limit-mb", str(HELD_MB), "--connections", str(CONNECTIONS))
    words = (str(folder / "m.mar"), "--token-file", str(folder / "tokens"), "--grpc-port", "0", "--body-timeout", "20")
    with running(folder, *words, *bounds) as server:
        yield server


def address(server: Server) -> str:
    return server.await_line("gRPC at ").split(" at ")[1].partition(",")[0].strip()


def infer(client: Any, images: list[bytes]) -> Any:
    tensor = triton.InferInput("image", [len(images)], "BYTES")
    tensor.set_data_from_numpy(np.array(images, dtype=np.object_))
    return client.infer("m", [tensor], headers=dict(HEADERS))


def test_grpc_has_the_certificate_and_the_tokens_of_http(encrypted: Server) -> None:
    assert "with TLS" in encrypted.await_line("gRPC at ")
    authority = str(encrypted.folder / "certificate.pem")
    with triton.InferenceServerClient(address(encrypted), ssl=True, root_certificates=authority) as client:
        assert client.is_server_ready()
        assert infer(client, [artifacts.jpeg(1)]).as_numpy("label").shape == (1, 5)
    with httpx.Client(base_url=encrypted.url, verify=False, headers=HEADERS) as plain:
        told = plain.get("/metrics").text
    assert 'serve_requests_total{model="m",route="grpc/ModelInfer",status="200",version="1.0"} 1.0' in told


def test_renewed_certificates_are_shown_from_sighup_on_and_broken_ones_never(folder: Path, tmp_path: Path) -> None:
    certificate, key = certify(tmp_path)
    (old := tmp_path / "old.pem").write_bytes(certificate.read_bytes())

    def known_by(authority: Path, server: Server) -> list[bool]:
        """Whether HTTP and gRPC show a certificate that this file knows, to who connects now."""
        found = []
        try:
            context = ssl.create_default_context(cafile=authority)
            found.append(httpx.get(f"{server.url}/health/ready", verify=context).status_code == 200)
        except httpx.ConnectError:
            found.append(False)
        with triton.InferenceServerClient(address(server), ssl=True, root_certificates=str(authority)) as client:
            try:
                found.append(client.is_server_ready())
            except InferenceServerException:
                found.append(False)
        return found

    options = ("--no-token", "--grpc-port", "0", "--tls-certificate", str(certificate), "--tls-key", str(key))
    with running(folder, str(folder / "m.mar"), *options) as server:
        assert known_by(old, server) == [True, True]
        with httpx.Client(base_url=server.url, verify=ssl.create_default_context(cafile=old)) as before:
            assert before.get("/health/ready").status_code == 200
            certify(tmp_path)
            server.process.send_signal(signal.SIGHUP)
            server.await_line("changed:")
            assert before.get("/health/ready").status_code == 200, "its connection goes on"
        assert known_by(old, server) == [False, False]
        assert known_by(certificate, server) == [True, True]
        (new := tmp_path / "new.pem").write_bytes(certificate.read_bytes())
        key.write_text("no key")
        server.process.send_signal(signal.SIGHUP)
        assert f"--tls-key {key} cannot be used for TLS" in server.await_line("nothing was changed")
        assert known_by(new, server) == [True, True]


def test_what_grpc_accepted_is_answered_before_the_server_ends(encrypted: Server) -> None:
    authority = str(encrypted.folder / "certificate.pem")
    large = encoded(Image.new("RGB", (3000, 3000)), quality=50)
    with (
        httpx.Client(base_url=encrypted.url, verify=False, headers=HEADERS) as plain,
        triton.InferenceServerClient(address(encrypted), ssl=True, root_certificates=authority) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        answer = pool.submit(infer, client, [large] * 16)
        until = time.monotonic() + 30
        while 'serve_queue_requests{model="m",version="1.0"} 1.0' not in plain.get("/metrics").text:
            assert time.monotonic() < until
        encrypted.process.send_signal(signal.SIGTERM)
        assert answer.result(60).as_numpy("label").shape == (16, 5)
    assert encrypted.process.wait(30) == 0


def test_messages_that_come_together_take_no_more_memory_than_is_held(narrow: Server) -> None:
    request = message("ModelInferRequest")(model_name="m")
    request.inputs.add(name="image", datatype="BYTES", shape=[1])
    size = (BODY_MB << 20) - 1000
    request.raw_input_contents.append((size - 4).to_bytes(4, "little") + bytes(size - 4))
    data, clients = request.SerializeToString(), 30
    process = psutil.Process(narrow.process.pid)
    before, over = process.memory_info().rss, threading.Event()
    peak = [before]

    def watch() -> None:
        while not over.wait(0.005):
            peak[0] = max(peak[0], process.memory_info().rss)

    def ask(_: int) -> str:
        with grpc.insecure_channel(address(narrow), [("grpc.use_local_subchannel_pool", 1)]) as channel:
            try:
                channel.unary_unary(f"/{SERVICE}/ModelInfer")(data, timeout=60, metadata=tuple(HEADERS.items()))
            except grpc.RpcError as error:
                return str(error.code().name)
        return "OK"

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        with ThreadPoolExecutor(clients) as pool:
            told = set(pool.map(ask, range(clients)))
    finally:
        over.set()
        watching.join()
    # These bytes are no image; whom there is no room for is told to try again.
    assert told <= {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}
    assert "INVALID_ARGUMENT" in told
    # What is held and as much that is being read, each up to four times: as grpc has it, as bytes, parsed, unpacked.
    assert peak[0] - before < 10 * (HELD_MB << 20) < clients * size


def test_whoever_sends_slowly_gives_way_to_those_who_wait(narrow: Server) -> None:
    ended, gave_way = threading.Event(), queue.Queue[Any]()

    def never() -> Iterator[bytes]:
        ended.wait(60)
        yield from ()

    def stall(channel: Any) -> Any:
        call = channel.stream_unary(f"/{SERVICE}/ModelInfer").future(never(), metadata=tuple(HEADERS.items()))
        call.add_done_callback(gave_way.put)
        return call

    try:
        with (
            grpc.insecure_channel(address(narrow)) as channel,
            triton.InferenceServerClient(address(narrow)) as client,
        ):
            stalled = [stall(channel) for _ in range(HELD_MB // BODY_MB)]
            time.sleep(1.5)
            started = time.monotonic()
            assert infer(client, [artifacts.jpeg(1)]).as_numpy("label").shape == (1, 5)
            assert time.monotonic() - started < 10  # long before the 20 s of --body-timeout
            gone = gave_way.get(timeout=10)  # either of the two: which call began first is not ours to say
            assert gone.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            assert "others waited" in gone.details()
            assert [call.done() for call in stalled].count(False) == len(stalled) - 1
    finally:
        ended.set()


def test_connections_to_grpc_are_bounded_and_take_none_of_those_of_http(narrow: Server) -> None:
    host, _, port = address(narrow).rpartition(":")
    process = psutil.Process(narrow.process.pid)
    before = process.num_fds()
    with contextlib.ExitStack() as opened:
        for _ in range(4 * CONNECTIONS):
            opened.enter_context(socket.create_connection((host, int(port)), timeout=10))
        time.sleep(0.5)
        assert process.num_fds() - before <= CONNECTIONS + 5
        with narrow.client() as client:
            assert client.get("/health/live").status_code == 200
            assert client.post("/predictions/m", content=artifacts.jpeg(1)).status_code == 200
    with triton.InferenceServerClient(address(narrow)) as client:
        until = time.monotonic() + 10
        while True:
            try:
                assert client.is_server_live()
                break
            except InferenceServerException:
                assert time.monotonic() < until
                time.sleep(0.1)


def test_grpc_and_a_socket_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--grpc-port needs an address"):
        Settings(listening=Listening(path=tmp_path / "s"), grpc_port=0)
    with pytest.raises(UserError, match="between 0 and 65535, got 65536"):
        Settings(grpc_port=65536)
