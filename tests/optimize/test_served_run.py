"""A run's own archives behind the real TorchServe: every kind answers as its artifact does in process."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from optimize.data.formats.base import open_data
from serve.client import Client
from serve.runs import Target, select
from serve.runtime.engines.base import execution_id
from serve.runtime.errors import PipelineError
from serve.runtime.predictor import Predictor
from serve.runtime.serving import read_serving
from serve.torchserve import server
from tests.serve.artifacts import jpeg
from tests.serve.conftest import free_ports

from .runs_fixtures import TinyRun, copied_store, run_recipe, tiny_run, with_stages

__all__ = ["copied_store", "tiny_run"]  # fixtures
pytestmark = pytest.mark.slow

#: One of each kind of file that the default recipe makes; bfloat16 only where the CPU has it.
KINDS = ("fuse", "half-bf16", "dynamic", "ptq", "onnx", "onnx-half", "onnx-int8")


def test_served_answers_equal_those_of_the_artifacts_in_process(tiny_run: TinyRun, copied_store: Path) -> None:
    kinds = [name for name in KINDS if tiny_run.row(name).measured]
    assert set(kinds) >= set(KINDS) - {"half-bf16"}
    folder = copied_store / "tiny"
    archives = {f"tiny-{name}": folder / "archives" / f"tiny-{name}.mar" for name in kinds}
    images = [source for source in open_data("digits").val.sources[:3] if isinstance(source, bytes)]
    images += [jpeg(1), (folder / "sample.png").read_bytes()]
    running = server.start(copied_store, archives, ports=free_ports(), deadline_s=300)
    try:
        with running.client(copied_store) as client:
            for name in kinds:
                serving = read_serving(folder / "artifacts" / name)
                assert serving is not None
                described = client.describe(f"tiny-{name}")
                assert described["execution"] == execution_id(serving.executions[0])
                measured = [
                    pair.measured for pair in tiny_run.row(name).pairs if pair.runs_on == described["execution"]
                ]
                assert measured[0] is not None
                assert described["accuracy"]["top1"] == measured[0].accuracy.top1
                assert described["accuracy"]["images"] == measured[0].accuracy.images
                predictor = Predictor(folder / "artifacts" / name, serving.executions[0])
                for image in images:
                    # One at a time, as it is sent: dynamic quantization takes its scale from the batch.
                    (labels,) = predictor.predict([image], k=10)
                    assert isinstance(labels, list)
                    answer = client.predict(f"tiny-{name}", image, k=10)
                    assert answer[0]["index"] == labels[0].index
                    served = {entry["index"]: entry["probability"] for entry in answer}
                    assert served == pytest.approx({label.index: label.probability for label in labels}, abs=1e-4)
    finally:
        server.stop(copied_store)


def test_a_run_that_is_made_again_while_it_is_served_touches_nothing_that_is_served(copied_store: Path) -> None:
    """Another recipe: one archive goes, one is replaced; the server and workers that it starts anew go on."""
    folder = copied_store / "tiny"
    archives = {f"tiny-{name}": folder / "archives" / f"tiny-{name}.mar" for name in ("fuse", "onnx")}
    image = (folder / "sample.png").read_bytes()
    running = server.start(copied_store, archives, ports=free_ports(), deadline_s=300)
    try:
        with running.client(copied_store) as client:
            before = {model: client.predict(model, image, k=10) for model in archives}
            outcome, _ = run_recipe(copied_store, with_stages({"pass": "fuse", "config": {"tolerance": 0.01}}))
            assert outcome.failed == ()
            left = sorted(path.name for path in (folder / "archives").glob("*.mar"))
            assert left == ["tiny-baseline.mar", "tiny-fuse.mar", "tiny-onnx.mar"]
            selected = select(copied_store, [Target("tiny")], ["all"]).archives.values()
            assert not {"tiny-onnx.mar"} & {path.name for path in selected}
            workers = [worker for worker in psutil.Process(running.pid).children(recursive=True) if worker.is_running()]
            for worker in workers:
                with contextlib.suppress(psutil.NoSuchProcess):
                    worker.kill()  # TorchServe starts others, which open their archives again
            psutil.wait_procs(workers, timeout=30)
            for model in archives:
                assert answered(client, model, image) == before[model]
        stop = [sys.executable, "-m", "serve", "stop", "--store", str(copied_store)]
        subprocess.run(stop, check=True, capture_output=True)
        assert sorted(path.name for path in (folder / "archives").glob("*.mar")) == [
            "tiny-baseline.mar",
            "tiny-fuse.mar",
        ]
    finally:
        server.stop(copied_store)
    run_recipe(copied_store, with_stages({"pass": "fuse"}))
    assert sorted(path.name for path in (folder / "archives").glob("*.mar")) == ["tiny-baseline.mar", "tiny-fuse.mar"]


def answered(client: Client, model: str, image: bytes) -> list[dict[str, Any]]:
    """The answer, as soon as there is a worker again."""
    deadline = time.monotonic() + 120
    while True:
        try:
            return client.predict(model, image, k=10)
        except PipelineError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
