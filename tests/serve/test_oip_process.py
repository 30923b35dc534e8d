"""gRPC and metrics of the own server as a process: what it prints, TLS, and that it answers what it accepted."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from PIL import Image

from serve.asgi.listening import Listening
from serve.asgi.process import Settings
from serve.runtime.errors import UserError
from serve.torchserve.archive import build_archive
from tests.serve import artifacts
from tests.serve.test_asgi_process import HEADERS, TOKEN, Server, running

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grpc")
    build_archive(artifacts.torchscript(folder / "artifact"), folder / "m.mar", model_name="m")
    (folder / "tokens").write_text(TOKEN + "\n")
    (folder / "tokens").chmod(0o600)
    return folder


@pytest.fixture(scope="module")
def encrypted(folder: Path) -> Iterator[Server]:
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    told = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
    made = ("-newkey", "rsa:2048", "-nodes", "-days", "2", "-out", certificate, "-keyout", key)
    subprocess.run(["openssl", "req", "-x509", *told, *made], check=True, capture_output=True)
    options = ("--grpc-port", "0", "--tls-certificate", str(certificate), "--tls-key", str(key))
    with running(folder, str(folder / "m.mar"), "--token-file", str(folder / "tokens"), *options) as server:
        yield server


def address(server: Server) -> str:
    return server.await_line("gRPC at ").split(" at ")[1].partition(",")[0].strip()


def infer(client: Any, images: list[bytes]) -> Any:
    tensor = triton.InferInput("image", [len(images)], "BYTES")
    tensor.set_data_from_numpy(np.array(images, dtype=np.object_))
    return client.infer("m", [tensor], headers=dict(HEADERS))


@needs_openssl
def test_grpc_has_the_certificate_and_the_tokens_of_http(encrypted: Server) -> None:
    assert "with TLS" in encrypted.await_line("gRPC at ")
    authority = str(encrypted.folder / "certificate.pem")
    with triton.InferenceServerClient(address(encrypted), ssl=True, root_certificates=authority) as client:
        assert client.is_server_ready()
        assert infer(client, [artifacts.jpeg(1)]).as_numpy("label").shape == (1, 5)
    with httpx.Client(base_url=encrypted.url, verify=False, headers=HEADERS) as plain:
        told = plain.get("/metrics").text
    assert 'serve_requests_total{model="m",route="grpc/ModelInfer",status="200",version="1.0"} 1.0' in told


@needs_openssl
def test_what_grpc_accepted_is_answered_before_the_server_ends(encrypted: Server) -> None:
    authority = str(encrypted.folder / "certificate.pem")
    large = artifacts.encoded(Image.new("RGB", (3000, 3000)), quality=50)
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


def test_grpc_and_a_socket_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--grpc-port needs an address"):
        Settings(listening=Listening(path=tmp_path / "s"), grpc_port=0)
    with pytest.raises(UserError, match="between 0 and 65535, got 65536"):
        Settings(grpc_port=65536)
