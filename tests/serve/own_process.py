"""The own server as a process of its own, over small archives."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from serve.common.options import ServingOptions
from serve.torchserve.archive_builder import build_archive
from tests.serve import artifacts

TOKEN = "t" * 32
HEADERS = {"authorization": f"Bearer {TOKEN}"}
IMAGE = artifacts.jpeg(1)


@dataclass
class Server:
    """A running server, its folder, and the lines that it printed."""

    folder: Path
    process: subprocess.Popen[str]
    lines: list[str]
    url: str

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers=HEADERS, timeout=30, trust_env=False)

    def socket(self) -> socket.socket:
        host, port = self.url.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), timeout=30)

    def await_line(self, words: str, timeout_s: float = 60) -> str:
        ends = time.monotonic() + timeout_s
        while time.monotonic() < ends:
            for line in list(self.lines):
                if words in line:
                    return line
            assert self.process.poll() is None, "".join(self.lines)
            time.sleep(0.02)
        raise AssertionError(f"no line with {words!r} in {self.lines}")


@contextlib.contextmanager
def running(folder: Path, *arguments: str, before: Sequence[str] = ()) -> Iterator[Server]:
    """The server as a process; ``before`` runs it."""
    environment = {name: value for name, value in os.environ.items() if name != "NOTIFY_SOCKET"}
    place = () if "--socket" in arguments else ("--port", "0")
    process = subprocess.Popen(
        [*before, sys.executable, "-m", "serve", "run", "--store", str(folder), *place, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment | {"OMP_NUM_THREADS": "2"},
    )
    server = Server(folder, process, [], "")
    reader = threading.Thread(target=lambda: server.lines.extend(process.stdout or ()), daemon=True)
    reader.start()
    try:
        server.url = server.await_line("serving ").split(" at ")[1].split(": loading")[0]
        server.await_line("ready:")
        yield server
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(30)
        reader.join(10)
        assert process.stdout is not None
        process.stdout.close()


def make_archives(folder: Path) -> Path:
    """``v1.mar`` and ``v2.mar``, a file of tokens, and one of models."""
    artifact = artifacts.torchscript(folder / "artifact")
    for name, k in (("v1", 5), ("v2", 4)):
        options = ServingOptions(batch_size=4, k=k)
        build_archive(artifact, folder / f"{name}.mar", model_name=name, options=options)
    (folder / "tokens").write_text(TOKEN + "\n")
    (folder / "tokens").chmod(0o600)
    write_models(folder, {"1.0": ("v1.mar", 1)})
    return folder


def write_models(folder: Path, versions: dict[str, tuple[str, int]]) -> None:
    body = [{"archive": archive, "version": name, "weight": weight} for name, (archive, weight) in versions.items()]
    (folder / "models.yaml").write_text(json.dumps({"models": {"m": body}}))


def assert_ends_in_order(server: Server, model: str, *told: int) -> None:
    """Under load, SIGTERM to some of a server's processes has it answer what it accepted; the status is 0."""
    statuses: list[int] = []
    lost: list[str] = []
    begun = threading.Barrier(9)
    children = psutil.Process(server.process.pid).children(recursive=True)

    def load() -> None:
        with server.client() as client:
            client.get("/ping")
            begun.wait()
            for _ in range(400):
                try:
                    statuses.append(client.post(f"/predictions/{model}", content=IMAGE).status_code)
                except httpx.ConnectError:
                    return
                except httpx.HTTPError as error:
                    lost.append(repr(error))
                    return

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    begun.wait()
    time.sleep(0.3)
    for pid in told:
        os.kill(pid, signal.SIGTERM)
    for thread in threads:
        thread.join()
    assert server.process.wait(30) == 0, "".join(server.lines)
    assert set(statuses) == {200}
    assert not lost
    assert not psutil.wait_procs(children, timeout=10)[1]
