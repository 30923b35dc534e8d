"""Tasks with one vector for an image, by every protocol and from both servers: one picture, one answer."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import tritonclient.grpc as triton
from ts.context import RequestProcessor

from serve.runtime.card.card import read_card
from serve.runtime.images.image_preprocessing import load
from serve.runtime.tasks.base import Task, open_task
from tests.serve import artifacts
from tests.serve.own_server import Running, bearer, run_server
from tests.serve.torchserve.test_handler import context_of, opened

PICTURES = artifacts.jpeg(5, (48, 40)), artifacts.jpeg(6, (20, 24))
#: What the card of each task says beside its name.
TASKS: dict[str, dict[str, Any]] = {"multilabel": {"probabilities": "sigmoid"}, "regression": {}, "embeddings": {}}


@pytest.fixture(scope="module", params=TASKS)
def artifact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return artifacts.vectors(tmp_path_factory.mktemp("task") / "artifact", request.param, **TASKS[request.param])


@pytest.fixture(scope="module")
def server(artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with run_server(tmp_path_factory.mktemp("server"), artifact, "torchscript") as running:
        yield running


def post(server: Running, path: str, **sent: Any) -> httpx.Response:
    return httpx.post(f"http://{server.http}{path}", headers=bearer(), **sent)


def task_of(artifact: Path) -> Task:
    return open_task(read_card(artifact))


def expected(artifact: Path) -> list[Any]:
    """The answers of the network itself to both pictures, alone."""
    network = torch.jit.load(str(artifact / "model.pt"))
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    preprocessing, task = read_card(artifact).preprocessing, task_of(artifact)
    batches = [(load(picture, preprocessing)[None].float() / 255 - mean) / std for picture in PICTURES]
    # None of these tasks looks at the placement.
    found = [task.answers((network(batch),), [task.options({})], [None])[0] for batch in batches]  # type: ignore[list-item]
    return [json.loads(task.json(answer)) for answer in found]


def numbers(document: Any) -> list[float]:
    """All numbers of a document."""
    if isinstance(document, dict | list):
        inner = document.values() if isinstance(document, dict) else document
        return [number for value in inner for number in numbers(value)]
    return [document] if isinstance(document, int | float) else []


def assert_same(found: Any, wanted: Any) -> None:
    assert numbers(found) == pytest.approx(numbers(wanted), rel=1e-4, abs=1e-5)


def test_one_picture_and_several_get_the_answers_of_the_network(server: Running, artifact: Path) -> None:
    wanted = expected(artifact)
    assert numbers(wanted[0])
    found = post(server, "/predictions/small", content=PICTURES[0])
    assert found.headers["content-type"] == "application/json"
    assert_same(found.json(), wanted[0])
    sent = {"instances": [{"b64": base64.b64encode(picture).decode()} for picture in PICTURES]}
    for path in ("/predictions/small", "/v1/models/small:predict"):
        assert_same(post(server, path, json=sent).json()["predictions"], wanted)
    lines = type(task_of(artifact)).lines(found.json())
    assert lines
    assert all(isinstance(line, str) for line in lines)


def test_the_open_inference_protocol_has_the_same_over_rest_and_grpc(server: Running, artifact: Path) -> None:
    texts = [base64.b64encode(picture).decode() for picture in PICTURES]
    tensor = {"name": "image", "datatype": "BYTES", "shape": [2], "data": texts}
    outputs = post(server, "/v2/models/small/infer", json={"inputs": [tensor]}).json()["outputs"]
    assert {output["name"] for output in outputs} == set(task_of(artifact).tensors)
    client = triton.InferenceServerClient(server.grpc)
    sent = triton.InferInput("image", [2], "BYTES")
    sent.set_data_from_numpy(np.array(PICTURES, dtype=object))
    found = client.infer("small", [sent], headers=bearer())
    for output in outputs:
        assert output["shape"][0] == 2
        same = found.as_numpy(output["name"])
        assert list(same.shape) == output["shape"]
        np.testing.assert_allclose(same.ravel(), output["data"], rtol=1e-5)
    client.close()


def test_both_servers_answer_with_the_same_bytes(server: Running, artifact: Path, tmp_path: Path) -> None:
    context = context_of(artifact, tmp_path, None, batch_size=1)
    handler = opened(context)
    context.request_processor = [RequestProcessor({})]
    (body,) = handler.handle([{"body": PICTURES[0]}], context)
    assert body == post(server, "/predictions/small", content=PICTURES[0]).content
