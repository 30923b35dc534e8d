"""A running server is changed while requests go on: models come, change and go, and no request is lost."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from serve.archive.archive_file import with_version
from serve.common import layout
from serve.common.options import ServingOptions
from serve.runtime.card.known_answer import read_known
from serve.runtime.errors import UserError
from serve.torchserve import live_changes, server
from serve.torchserve.archive_builder import build_archive
from serve.torchserve.configuration import HOST
from serve.torchserve.startup_watch import Awaited, Log, StartError, wait_until_ready
from serve.torchserve.state import RunningServer, archives_folder, read_state, state_folder
from tests.programs import Programs
from tests.serve import artifacts
from tests.serve.conftest import by, free_ports
from tests.serve.full_disk import no_file_longer_than
from tests.serve.torchserve.test_server import broken_script, command, invoked, onnx_for_cuda

pytestmark = pytest.mark.slow

SENDERS = 3


def packed(store: Path, run: str, name: str, *, raised: float | None = None, **options: Any) -> Path:
    """A run's artifact with its archive, and with a known answer where it is said how wrong that is."""
    folder = artifacts.torchscript(layout.artifact_folder(store, run, name), name)
    if raised is not None:
        artifacts.know(folder, raised=raised)
    path = layout.archive_path(store, run, name)
    return build_archive(folder, path, model_name=path.stem, options=ServingOptions(batch_size=2, **options))


class Senders:
    """Requests without an end, from several threads, and what became of each."""

    def __init__(self, store: Path, running: RunningServer, model: str) -> None:
        self._url = f"http://{HOST}:{running.ports.inference}/predictions/{model}"
        header = (state_folder(store) / "authorization").read_text().strip()
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

    def until_one_gets(self, status: int) -> None:
        """Wait until a request has been answered so."""
        until = time.monotonic() + 30
        while not self.statuses[status]:
            assert time.monotonic() < until, self.statuses
            time.sleep(0.02)

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
                    time.sleep(0.03)  # or nothing else would get these cores
                except httpx.HTTPError as error:
                    self.statuses[type(error).__name__] += 1


@pytest.fixture(scope="module")
def store(torch_begun: Programs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A store with two runs, and a server that was asked for three models of the first, of which one can be loaded."""
    store = tmp_path_factory.mktemp("fleet")
    first = packed(store, "one", "script", raised=0, workers=2, decoder="nvimgcodec")  # without a GPU: passed over
    packed(store, "two", "script", workers=1)
    left_out = {}
    for name, make in (("broken", broken_script), ("cuda", onnx_for_cuda)):
        path = layout.archive_path(store, "one", name)
        folder = make(layout.artifact_folder(store, "one", name))
        left_out[f"one-{name}"] = build_archive(folder, path, model_name=f"one-{name}")
    told: dict[str, str] = {}
    archives = {**left_out, "one-script": first}
    with by(torch_begun.executable):
        running = server.start(store, archives, ports=free_ports(), gpus=0, on_left_out=told.__setitem__)
    try:
        assert running.models == ("one-script",)
        assert told == running.left_out
        yield store
    finally:
        server.stop(store)


def the(store: Path) -> RunningServer:
    running = server.running(store)
    assert running is not None
    return running


def passed_over(store: Path) -> set[tuple[str, str]]:
    """Models and versions that TorchServe's metrics say something was passed over for."""
    return {(labels["ModelName"], labels["ModelVersion"]) for labels in labels_of(store, "PassedOver")}


def labels_of(store: Path, metric: str) -> list[dict[str, str]]:
    with the(store).client(store) as client:
        families = text_string_to_metric_families(client.metrics())
    return [sample.labels for family in families for sample in family.samples if sample.name == metric]


def children_of(running: RunningServer, expected: int) -> set[int]:
    """Its workers' processes, when there are as many as expected, or 20 s later."""
    until = time.monotonic() + 20
    while True:
        found = {child.pid for child in psutil.Process(running.pid).children()}
        if len(found) == expected or time.monotonic() > until:
            return found
        time.sleep(0.2)


def test_a_model_that_cannot_be_loaded_is_left_out_and_named_and_the_others_are_served(store: Path) -> None:
    running = the(store)
    assert running.default_model == "one-script", "not the one that was named first"
    reason = running.left_out["one-broken"]
    assert reason.startswith("the worker of one-broken died while it was loading (")
    assert "is not a complete zip file" in reason
    assert "onnxruntime-cuda: it needs a GPU, and none was assigned to this worker" in running.left_out["one-cuda"]
    with running.client(store) as client:
        assert client.models() == ["one-script"]
        assert client.ping() == "Healthy"
    told = invoked("status", "--store", store)
    assert told.returncode == 0, told.stderr
    assert f"  left out: one-broken ({reason})" in told.stdout.splitlines()


def test_a_model_of_another_run_is_added_replaced_and_removed_while_requests_go_on(store: Path) -> None:
    before = the(store)
    assert passed_over(store) == {("one-script", "1.0")}
    with Senders(store, before, "one-script") as senders:
        added = command("add", "second=two/script", "--store", store)
        assert added.returncode == 0, added.stderr
        unknown = "known answer not checked: {} (its archive has no known.json)\n"
        assert added.stdout == "ready: second\n" + unknown.format("second")
        replaced = command("replace", "one-script", "two/script", "--k", "2", "--store", store)
        assert replaced.returncode == 0, replaced.stderr
        assert replaced.stdout == "replaced: one-script is now two/script, version 2.0\n" + unknown.format("one-script")
        assert passed_over(store) == set(), "of the version that is gone"
        live_changes.replace(store, "one-script", layout.archive_path(store, "one", "script"))
    assert set(senders.statuses) == {200}, (senders.statuses, senders.errors[:3])
    assert {len(json.loads(body)) for body in senders.bodies} == {2, 5}, "both of them have answered"
    assert passed_over(store) == {("one-script", "3.0")}
    timed = {(labels["model"], labels["version"]) for labels in labels_of(store, "serve_stage_seconds_count")}
    assert timed == {("one-script", "3.0"), ("second", "1.0")}, "of the versions that are gone nothing is told"
    running = the(store)
    assert running.pid == before.pid
    assert [(m.name, m.run, m.artifact, m.version) for m in running.served] == [
        ("one-script", "one", "script", "3.0"),
        ("second", "two", "script", "1.0"),
    ]
    assert running == read_state(store)
    assert [model.unchecked for model in running.served] == ["", "its archive has no known.json"]
    told = command("status", "--store", store).stdout.splitlines()
    assert told.count("    known answer not checked: its archive has no known.json") == 1
    with running.client(store) as client:
        assert client.versions("one-script") == ["3.0"], "the old ones are gone"
        assert len(client.workers("one-script")) == 2
    assert len(children_of(running, 2 + 1)) == 2 + 1
    assert sorted(path.name for path in archives_folder(store).iterdir()) == ["one-script@3.0.mar", "second@1.0.mar"]


def test_what_a_removed_model_had_accepted_is_answered_and_the_server_goes_on(store: Path) -> None:
    second = layout.archive_path(store, "two", "script")
    if "second" not in the(store).models:
        live_changes.add(store, {"second": second})
    before = children_of(the(store), 2 + 1)
    with Senders(store, the(store), "second") as senders:
        senders.until_one_gets(200)
        removed = command("remove", "second", "--store", store)
        assert removed.returncode == 0, removed.stderr
        assert removed.stdout == "removed: second\n"
        senders.until_one_gets(404)
    assert set(senders.statuses) == {200, 404}, (senders.statuses, senders.errors[:3])
    assert the(store).models == ("one-script",)
    with the(store).client(store) as client:
        assert client.models() == ["one-script"]
        assert len(client.predict("one-script", artifacts.jpeg(1))) == 5
    assert {path.name.partition("@")[0] for path in archives_folder(store).iterdir()} == {"one-script"}
    assert children_of(the(store), 2) < before
    last = invoked("remove", "one-script", "--store", store)
    assert last.returncode == 2
    assert "this would remove the last model: stop the server instead" in last.stderr


def test_a_model_that_does_not_come_up_changes_nothing(store: Path) -> None:
    before = the(store)
    packed(store, "wrong", "script", raised=50.0)
    died, known = (
        "died while it was loading",
        "the answer to its known image differs from the one measured with torchscript",
    )
    for words, *said in (
        (["add", "one/broken"], died, "is not a complete zip file"),
        (["replace", "one-script", "one/broken"], died, "is not a complete zip file"),
        (["replace", "one-script", "wrong/script"], died, known),
        (["add", "two/script", "--require-known"], "cannot be checked before serving"),
    ):
        ended = invoked(*words, "--store", store)
        assert ended.returncode == 1
        assert all(part in ended.stderr for part in said), ended.stderr
        assert dataclasses.replace(the(store), versions=before.versions) == before
    with before.client(store) as client:
        assert client.models() == ["one-script"]
        assert len(client.versions("one-script")) == 1
        assert len(client.predict("one-script", artifacts.jpeg(1))) == 5
    assert {path.name.partition("@")[0] for path in archives_folder(store).iterdir()} == {"one-script"}


def test_an_answer_that_is_not_the_known_one_when_it_comes_over_http_is_no_readiness(store: Path) -> None:
    packed(store, "other", "script", raised=50.0)
    known = read_known(layout.artifact_folder(store, "other", "script"))
    running = the(store)
    (model,) = (model for model in running.served if model.name == "one-script")
    log = Log.from_now(state_folder(store) / "logs")
    with (
        running.client(store) as client,
        pytest.raises(StartError, match="is loaded, but the answer to its known image differs"),
    ):
        wait_until_ready(
            psutil.Process(running.pid), client, log, {model.name: Awaited(model.version, known)}, deadline_s=20
        )


@pytest.mark.parametrize("size", [1, 50_000])
@pytest.mark.parametrize("words", [("add", "third=two/script"), ("replace", "one-script", "two/script")])
def test_where_nothing_can_be_written_a_change_is_refused_in_one_line_and_changes_nothing(
    words: tuple[str, ...], size: int, store: Path
) -> None:
    before = the(store)
    files = sorted(archives_folder(store).iterdir())
    with no_file_longer_than(size):
        ended = invoked(*words, "--store", store)
        assert invoked("status", "--store", store).returncode == 0, "what is served is told all the same"
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    named = "/.server/state.json: cannot be written" if size == 1 else "two-script.mar: cannot be copied to "
    assert line.startswith("error: ")
    assert named in line
    assert line.endswith("(File too large)")
    assert dataclasses.replace(the(store), versions=before.versions) == before
    assert sorted(archives_folder(store).iterdir()) == files
    with before.client(store) as client:
        assert client.models() == ["one-script"]
        assert len(client.versions("one-script")) == 1
        assert len(client.predict("one-script", artifacts.jpeg(1))) == 5


def test_a_model_that_cannot_be_recorded_gets_no_request_and_goes_again(store: Path, tmp_path: Path) -> None:
    before = the(store)
    files = sorted(archives_folder(store).iterdir())
    folder, other = layout.artifact_folder(store, "two", "script"), layout.archive_path(tmp_path, "three", "script")
    build_archive(folder, other, model_name=other.stem, options=ServingOptions(k=2))
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fills(fraction: float, message: str) -> None:
        # The archive has been staged, and its worker loads.
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, most))

    with (
        Senders(store, before, "one-script") as senders,
        no_file_longer_than(most),
        pytest.raises(UserError, match=r"state\.json: cannot be written \(File too large\)"),
    ):
        live_changes.replace(store, "one-script", other, progressed=fills)
    assert set(senders.statuses) == {200}, (senders.statuses, senders.errors[:3])
    assert {len(json.loads(body)) for body in senders.bodies} == {5}
    assert dataclasses.replace(the(store), versions=before.versions) == before
    assert sorted(archives_folder(store).iterdir()) == files
    with before.client(store) as client:
        assert client.versions("one-script") == [before.model("one-script").version]


def test_what_a_change_that_was_killed_has_left_goes_with_the_next_one(store: Path) -> None:
    recorded = the(store).model("one-script").version
    source = layout.archive_path(store, "one", "script")
    with the(store).client(store) as client:
        for name in ("one-script", "stray"):
            file = f"{name}@99.0.mar"
            with_version(source, "99.0", archives_folder(store) / file)
            client.register(name, file, workers=1)
            client.set_default(name, "99.0")
        with pytest.raises(UserError, match="no model 'third' is served"):
            live_changes.remove(store, ["third"])
        assert client.models() == ["one-script"]
        assert client.versions("one-script") == [recorded]
        assert len(client.predict("one-script", artifacts.jpeg(1))) == 5
    assert [path.name for path in archives_folder(store).iterdir()] == [f"one-script@{recorded}.mar"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("add", "one-script=two/script"), "a model is already served as one-script: replace it with"),
        (("replace", "third"), "no model 'third' is served; the models are one-script"),
        (("remove", "third"), "no model 'third' is served; the models are one-script"),
        (("add", "two/scrip"), "there is no such archive; the archives of two are script"),
    ],
)
def test_a_mistake_is_one_line_and_changes_nothing(words: tuple[str, ...], message: str, store: Path) -> None:
    before = the(store)
    ended = invoked(*words, "--store", store)
    assert ended.returncode == 2
    assert message in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert the(store) == before


def test_status_fails_and_does_not_say_healthy_while_a_model_has_no_ready_worker(store: Path) -> None:
    running = the(store)
    with running.client(store) as client:
        for worker in client.workers("one-script"):
            os.kill(worker["pid"], signal.SIGKILL)
    until = time.monotonic() + 20
    while (told := invoked("status", "--json", "--store", store)).returncode == 0 and time.monotonic() < until:
        time.sleep(0.02)  # TorchServe has not seen it yet
    assert told.returncode == 1
    body = json.loads(told.stdout)
    assert body["status"] == "Unhealthy"
    (model,) = body["models"]
    assert body["left_out"].keys() == {"one-broken", "one-cuda"}
    assert model["workers"]["ready"] == 0
    assert (model["name"], model["run"], model["artifact"]) == ("one-script", "one", "script")
    deadline = time.monotonic() + 90
    while (again := invoked("status", "--store", store)).returncode != 0:
        assert again.stdout.startswith("Unhealthy: run one, pid ")
        assert time.monotonic() < deadline, "the workers did not come back"
        time.sleep(0.2)
    assert again.stdout.startswith(("Healthy: ", "Partial Healthy: "))
