"""An archive of ours behind TorchServe as its own command starts it, with nothing of this project around it."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from benchmarks.stock_torchserve import stock_torchserve
from serve.common.options import ServingOptions
from serve.common.server_processes import process_tree
from serve.runtime.service.predictor import Predictor
from serve.torchserve.archive_builder import build_archive
from tests.serve import artifacts
from tests.serve.conftest import hide_project

pytestmark = pytest.mark.slow

NAME = "small-script"


@dataclass
class Stock:
    """A stock TorchServe, what it serves, and where that is asked."""

    artifact: Path
    pid: int
    url: str

    def post(self, content: bytes, kind: str = "application/octet-stream") -> httpx.Response:
        headers = {"content-type": kind}
        return httpx.post(self.url, content=content, headers=headers, timeout=60, trust_env=False)

    def expected(self, image: bytes) -> list[tuple[object, ...]]:
        """What the runtime answers in this process: label, index and probability, the best first."""
        (labels,) = Predictor(self.artifact).predict([image], len(artifacts.CLASSES))
        assert isinstance(labels, list)
        return [(entry.label, entry.index, pytest.approx(entry.probability, abs=1e-4)) for entry in labels]

    def processes(self) -> set[psutil.Process]:
        """TorchServe itself, and its worker; two of the same process id that started at other times are not equal."""
        return set(process_tree(self.pid))


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stock]:
    root = tmp_path_factory.mktemp("stock")
    artifact = artifacts.torchscript(root / "script", device="cpu")
    options = ServingOptions(batch_size=4, k=len(artifacts.CLASSES))
    build_archive(artifact, root / "archives" / f"{NAME}.mar", model_name=NAME, options=options)
    (root / "hiding").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(hide_project(root / "hiding")))
        with stock_torchserve([NAME], root / "archives", root / "scratch") as live:
            target = live.target
            yield Stock(artifact, live.pid, f"http://{target.address}{target.path}")
            started = process_tree(live.pid)
    assert not [process for process in started if process.is_running()]


def answered(body: list[dict[str, object]]) -> list[tuple[object, ...]]:
    return [(entry["label"], entry["index"], entry["probability"]) for entry in body]


def test_an_image_is_answered_as_the_runtime_answers_it(stock: Stock) -> None:
    image = artifacts.jpeg(1)
    answer = stock.post(image, "image/jpeg")
    assert answer.status_code == 200, answer.text
    assert answered(answer.json()) == stock.expected(image)


def test_what_is_wrong_with_one_item_is_told_of_that_item_and_the_worker_lives(stock: Stock) -> None:
    before = stock.processes()
    assert len(before) > 1
    good, damaged = artifacts.jpeg(2), artifacts.jpeg(2)[:400]
    alone = stock.post(damaged, "image/jpeg")
    assert (alone.status_code, "truncated" in alone.json()["error"]) == (400, True), alone.text
    listed = [{"b64": base64.b64encode(image).decode()} for image in (good, damaged, good)]
    together = httpx.post(stock.url, json={"instances": listed}, timeout=60, trust_env=False)
    assert together.status_code == 200, together.text
    first, second, third = together.json()["predictions"]
    assert answered(first) == answered(third) == stock.expected(good)
    assert "truncated" in second["error"]
    assert stock.processes() == before


@pytest.mark.parametrize("body", [b'"\\ud800"', b'{"instances": ["\\ud800"]}', b'{"\\udfff": 1}'])
def test_text_with_an_unpaired_surrogate_is_a_400_and_the_worker_lives(body: bytes, stock: Stock) -> None:
    before = stock.processes()
    answer = stock.post(body, "application/json")
    assert answer.status_code == 400, answer.text
    assert answer.json().keys() >= {"error"}
    image = artifacts.jpeg(3)
    assert answered(stock.post(image, "image/jpeg").json()) == stock.expected(image)
    assert stock.processes() == before
