"""A run's own archives behind the real TorchServe: every kind answers as its artifact does in process."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from optimize.data.formats.base import open_data
from serve.runs.stored_runs import Target, select
from serve.runtime.card.serving import read_serving
from serve.runtime.engines.base import execution_id
from serve.runtime.errors import PipelineError
from serve.runtime.service.predictor import Predictor
from serve.torchserve import server
from serve.torchserve.client import Client
from serve.torchserve.state import RunningServer
from tests.optimize.runs_fixtures import TinyRun, made_run, run_recipe, shared_folder, tiny_run, with_stages
from tests.programs import Programs
from tests.serve.artifacts import jpeg
from tests.serve.conftest import by, free_ports, torch_begun

__all__ = ["tiny_run", "torch_begun"]  # fixtures
pytestmark = pytest.mark.slow

#: One of each kind of file that the default recipe makes; bfloat16 only where the CPU has it.
KINDS = ("fuse", "half-bf16", "dynamic", "ptq", "onnx", "onnx-half", "onnx-int8")


@dataclass(frozen=True)
class Served:
    """A copy of the run's store, and the server of its archives."""

    store: Path
    running: RunningServer
    kinds: tuple[str, ...]

    @property
    def folder(self) -> Path:
        return self.store / "tiny"


@pytest.fixture(scope="module")
def served(torch_begun: Programs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = made_run(shared_folder(tmp_path_factory))
    kinds = tuple(name for name in KINDS if made.row(name).measured)
    assert set(kinds) >= set(KINDS) - {"half-bf16"}
    store = tmp_path_factory.mktemp("served") / "model_store"
    shutil.copytree(made.store, store)
    archives = {f"tiny-{name}": store / "tiny" / "archives" / f"tiny-{name}.mar" for name in kinds}
    with by(torch_begun.executable):
        running = server.start(store, archives, ports=free_ports(), deadline_s=300)
    try:
        yield Served(store, running, kinds)
    finally:
        server.stop(store)


def test_served_answers_equal_those_of_the_artifacts_in_process(tiny_run: TinyRun, served: Served) -> None:
    folder = served.folder
    images = [source for source in open_data("digits").val.sources[:3] if isinstance(source, bytes)]
    images += [jpeg(1), (folder / "sample.png").read_bytes()]
    with served.running.client(served.store) as client:
        for name in served.kinds:
            serving = read_serving(folder / "artifacts" / name)
            assert serving is not None
            described = client.describe(f"tiny-{name}")
            assert described["execution"] == execution_id(serving.executions[0])
            measured = [pair.measured for pair in tiny_run.row(name).pairs if pair.runs_on == described["execution"]]
            assert measured[0] is not None
            assert described["accuracy"]["top1"] == measured[0].accuracy.score
            assert described["accuracy"]["images"] == measured[0].accuracy.images
            predictor = Predictor(folder / "artifacts" / name, serving.executions[0])
            for image in images:
                # One at a time, as it is sent: dynamic quantization takes its scale from the batch.
                (labels,) = predictor.predict([image], 10)
                assert isinstance(labels, list)
                answer = client.predict(f"tiny-{name}", image, headers={"X-Top-K": "10"})
                assert answer[0]["index"] == labels[0].index
                found = {entry["index"]: entry["probability"] for entry in answer}
                assert found == pytest.approx({label.index: label.probability for label in labels}, abs=1e-4)


def test_a_run_that_is_made_again_while_it_is_served_touches_nothing_that_is_served(served: Served) -> None:
    """Another recipe: archives go, one is replaced; the server and workers that it starts anew go on.

    The last of this file: it stops the server that both share.
    """
    store, folder = served.store, served.folder
    models = ("tiny-fuse", "tiny-onnx")
    image = (folder / "sample.png").read_bytes()
    with served.running.client(store) as client:
        before = {model: client.predict(model, image, headers={"X-Top-K": "10"}) for model in models}
        outcome, _ = run_recipe(store, with_stages({"pass": "fuse", "config": {"tolerance": 0.01}}))
        assert outcome.failed == ()
        left = {path.name for path in (folder / "archives").glob("*.mar")}
        assert left == {f"tiny-{name}.mar" for name in ("baseline", *served.kinds)}, "what is not served has gone"
        selected = select(store, [Target("tiny")], ["all"]).archives.values()
        assert {path.name for path in selected} == {"tiny-baseline.mar", "tiny-fuse.mar"}
        workers = [psutil.Process(worker["pid"]) for model in models for worker in client.workers(model)]
        assert len(workers) == len(models)
        for worker in workers:
            worker.kill()  # TorchServe starts others, which open their archives again
        psutil.wait_procs(workers, timeout=30)
        for model in models:
            assert answered(client, model, image) == before[model]
    stop = [sys.executable, "-m", "serve", "stop", "--store", str(store)]
    subprocess.run(stop, check=True, capture_output=True)
    remaining = ["tiny-baseline.mar", "tiny-fuse.mar"]
    assert sorted(path.name for path in (folder / "archives").glob("*.mar")) == remaining
    run_recipe(store, with_stages({"pass": "fuse"}))
    assert sorted(path.name for path in (folder / "archives").glob("*.mar")) == remaining


def answered(client: Client, model: str, image: bytes) -> list[dict[str, Any]]:
    """The answer, as soon as there is a worker again."""
    deadline = time.monotonic() + 120
    while True:
        try:
            return client.predict(model, image, headers={"X-Top-K": "10"})
        except PipelineError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
