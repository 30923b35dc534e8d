"""A running server is changed while requests go on: models come, change and go, and no request is lost."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from serve import layout
from serve.options import ServingOptions
from serve.torchserve import server
from serve.torchserve.archive import build_archive
from serve.torchserve.configuration import HOST
from serve.torchserve.state import archives_folder, read_state
from tests.serve import artifacts
from tests.serve.conftest import free_ports
from tests.serve.test_server import command

pytestmark = pytest.mark.slow

SENDERS = 4


def packed(store: Path, run: str, name: str, seed: int = 0) -> Path:
    """A run's artifact with its archive."""
    folder = artifacts.torchscript(layout.artifact_folder(store, run, name), name)
    path = layout.archive_path(store, run, name)
    return build_archive(folder, path, model_name=path.stem, options=ServingOptions(batch_size=2, workers=2))


class Senders:
    """Requests without an end, from several threads, and what became of each."""

    def __init__(self, store: Path, running: server.RunningServer, model: str) -> None:
        self._url = f"http://{HOST}:{running.ports.inference}/predictions/{model}"
        header = (server.state_folder(store) / "authorization").read_text().strip()
        self._headers = dict([header.split(": ", 1)])
        self._ending = threading.Event()
        self._threads = [threading.Thread(target=self._send) for _ in range(SENDERS)]
        self.statuses: Counter[int | str] = Counter()
        self.bodies: set[str] = set()
        self.errors: list[str] = []

    def __enter__(self) -> Senders:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join()

    def _send(self) -> None:
        image = artifacts.jpeg(1)
        with httpx.Client(headers=self._headers, timeout=60, trust_env=False) as client:
            while not self._ending.is_set():
                try:
                    answer = client.post(self._url, content=image)
                    self.statuses[answer.status_code] += 1
                    if answer.status_code == 200:
                        self.bodies.add(json.dumps(answer.json()))
                    else:
                        self.errors.append(answer.text)
                except httpx.HTTPError as error:
                    self.statuses[type(error).__name__] += 1


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A store with two runs, and a server of one artifact of the first."""
    store = tmp_path_factory.mktemp("fleet")
    first = packed(store, "one", "script")
    packed(store, "two", "script")
    server.start(store, {"one-script": first}, ports=free_ports(), gpus=0)
    try:
        yield store
    finally:
        server.stop(store)


def the(store: Path) -> server.RunningServer:
    running = server.running(store)
    assert running is not None
    return running


def test_a_model_of_another_run_is_added_replaced_and_removed_while_requests_go_on(store: Path) -> None:
    before = the(store)
    with Senders(store, before, "one-script") as senders:
        added = command("add", "second=two/script", "--store", store)
        assert added.returncode == 0, added.stderr
        assert added.stdout == "ready: second\n"
        replaced = command("replace", "one-script", "two/script", "--k", "2", "--store", store)
        assert replaced.returncode == 0, replaced.stderr
        assert replaced.stdout == "replaced: one-script is two/script, version 2.0\n"
        again = command("replace", "one-script", "one/script", "--store", store)
        assert again.returncode == 0, again.stderr
    assert set(senders.statuses) == {200}, (senders.statuses, senders.errors[:3])
    assert {len(json.loads(body)) for body in senders.bodies} == {2, 5}, "both of them have answered"
    running = the(store)
    assert running.pid == before.pid
    assert [(m.name, m.run, m.artifact, m.version) for m in running.served] == [
        ("one-script", "one", "script", "3.0"),
        ("second", "two", "script", "1.0"),
    ]
    assert running == read_state(store)
    with running.client(store) as client:
        assert client.versions("one-script") == ["3.0"], "the old ones are gone"
        assert len(client.workers("one-script")) == 2
    children = [child for child in psutil.Process(running.pid).children() if "python" in child.name()]
    assert len(children) == 2 + 2
    assert sorted(path.name for path in archives_folder(store).iterdir()) == ["one-script@3.0.mar", "second@1.0.mar"]
