"""Class maps by every protocol and from both servers: one picture, one map."""

from __future__ import annotations

import base64
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import tritonclient.grpc as triton
from PIL import Image
from ts.context import RequestProcessor

from serve.common.options import ServingOptions
from serve.runtime.card.card import read_card
from serve.runtime.card.execution import Execution
from serve.runtime.card.serving import Serving
from serve.runtime.errors import CardError, UserError
from serve.runtime.images.image_preprocessing import load
from serve.runtime.service.service import open_service
from serve.torchserve.archive_builder import build_archive
from tests.serve import artifacts
from tests.serve.own_server import Running, bearer, run_server
from tests.serve.torchserve.test_handler import context_of, opened

PICTURE = artifacts.jpeg(5, (48, 40))
SMALL = artifacts.jpeg(6, (20, 24))


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return artifacts.segmenter(tmp_path_factory.mktemp("maps") / "artifact")


@pytest.fixture(scope="module")
def server(artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with run_server(tmp_path_factory.mktemp("server"), artifact, "torchscript") as running:
        yield running


def post(server: Running, path: str, **sent: Any) -> httpx.Response:
    headers = bearer() | sent.pop("headers", {})
    return httpx.post(f"http://{server.http}{path}", headers=headers, **sent)


def expected(artifact: Path, picture: bytes) -> Any:
    """The map of the network itself, each pixel of the picture taking the class at its centre."""
    network = torch.jit.load(str(artifact / "model.pt"))
    pixels = load(picture, read_card(artifact).preprocessing)[None].float() / 255
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    classes = network((pixels - mean) / std)[0].argmax(0).numpy()
    with Image.open(io.BytesIO(picture)) as image:
        width, height = image.size
    rows, columns = ((np.arange(size) * 2 + 1) * 32 // (2 * size) for size in (height, width))
    return classes[np.ix_(rows, columns)]


def in_png(data: bytes) -> Any:
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image)


def test_a_picture_gets_the_classes_of_its_own_pixels(server: Running, artifact: Path) -> None:
    found = post(server, "/predictions/small", content=PICTURE)
    assert found.headers["content-type"] == "application/json"
    document = found.json()
    wanted = expected(artifact, PICTURE)
    assert wanted.shape == (document["height"], document["width"])
    np.testing.assert_array_equal(in_png(base64.b64decode(document["mask"])), wanted)
    assert {entry["index"] for entry in document["classes"]} == set(wanted.ravel().tolist())
    assert len(document["classes"]) > 1
    alone = post(server, "/predictions/small", content=PICTURE, headers={"accept": "image/png"})
    assert alone.headers["content-type"] == "image/png"
    np.testing.assert_array_equal(in_png(alone.content), wanted)
    refused = post(server, "/predictions/small", content=b"no picture", headers={"accept": "image/png"})
    assert (refused.status_code, refused.headers["content-type"]) == (415, "application/json")


@pytest.mark.parametrize("path", ["/predictions/small", "/v1/models/small:predict"])
def test_several_pictures_are_answered_in_json_each_of_its_size(server: Running, artifact: Path, path: str) -> None:
    pictures = [PICTURE, SMALL]
    sent = {"instances": [{"b64": base64.b64encode(picture).decode()} for picture in pictures]}
    found = post(server, path, json=sent, headers={"accept": "image/png"}).json()["predictions"]
    for answer, picture in zip(found, pictures, strict=True):
        np.testing.assert_array_equal(in_png(base64.b64decode(answer["mask"])), expected(artifact, picture))


@pytest.mark.parametrize("path", ["/predictions/small", "/v1/models/small:predict"])
def test_instances_are_answered_in_the_form_that_the_header_or_the_query_asks_for(server: Running, path: str) -> None:
    sent = {"instances": [{"b64": base64.b64encode(PICTURE).decode()}]}
    form = "application/json; rle=1"
    for asked in ({"headers": {"accept": form}}, {"params": {"accept": form}}):
        (answer,) = post(server, path, json=sent, **asked).json()["predictions"]
        assert "mask" not in answer
        assert all(entry["rle"]["size"] == [40, 48] for entry in answer["classes"])
    refused = post(server, path, json=sent, headers={"accept": "application/json; rle=2"})
    assert (refused.status_code, list(refused.json())) == (400, ["error"])


def test_the_open_inference_protocol_has_one_tensor_of_a_request(server: Running, artifact: Path) -> None:
    wanted = np.stack([expected(artifact, PICTURE)] * 2)
    texts = [base64.b64encode(PICTURE).decode()] * 2
    tensor = {"name": "image", "datatype": "BYTES", "shape": [2], "data": texts}
    (output,) = post(server, "/v2/models/small/infer", json={"inputs": [tensor]}).json()["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("mask", "UINT8", list(wanted.shape))
    assert output["data"] == wanted.ravel().tolist()
    client = triton.InferenceServerClient(server.grpc)
    sent = triton.InferInput("image", [2], "BYTES")
    sent.set_data_from_numpy(np.array([PICTURE] * 2, dtype=object))
    np.testing.assert_array_equal(client.infer("small", [sent], headers=bearer()).as_numpy("mask"), wanted)
    client.close()
    mixed = tensor | {"data": [texts[0], base64.b64encode(SMALL).decode()]}
    refused = post(server, "/v2/models/small/infer", json={"inputs": [mixed]})
    assert refused.status_code == 400
    assert "the pictures have different sizes" in refused.json()["error"]


LISTS = "application/json; lists=1"


def as_stock(artifact: Path, picture: bytes) -> Any:
    """What TorchServe's image_segmenter makes of the network's output: class and probability of each of its pixels."""
    network = torch.jit.load(str(artifact / "model.pt"))
    pixels = load(picture, read_card(artifact).preprocessing)[None].float() / 255
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    with torch.inference_mode():
        best = torch.max(torch.softmax(network((pixels - mean) / std), dim=1), dim=1)
    return torch.stack([best.indices.float(), best.values], dim=3)[0].numpy()


def test_an_archive_may_answer_as_the_stock_segmenter_and_both_servers_alike(artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    context = context_of(artifact, tmp_path, None, batch_size=1, accept=LISTS)
    handler = opened(context)
    context.request_processor = [RequestProcessor({})]
    (body,) = handler.handle([{"body": PICTURE}], context)
    assert context.get_response_content_type(0) == "application/json"
    wanted = as_stock(artifact, PICTURE)
    assert wanted.shape == (32, 32, 2)
    with run_server(tmp_path / "own", artifact, "torchscript", accept=LISTS) as server:
        own = post(server, "/predictions/small", content=PICTURE)
        # Torch has another number of threads there, so probabilities may differ in their last bits.
        np.testing.assert_allclose(own.json(), json.loads(body), rtol=0, atol=1e-6)
        np.testing.assert_array_equal(np.array(own.json())[..., 0], np.array(json.loads(body))[..., 0])
        np.testing.assert_allclose(own.json(), wanted, atol=1e-6)
        sent = {"instances": [{"b64": base64.b64encode(PICTURE).decode()}] * 2}
        found = post(server, "/v1/models/small:predict", json=sent).json()["predictions"]
        np.testing.assert_allclose(found, [own.json()] * 2, atol=1e-6)
        for accept, field in (("application/json; rle=0", "mask"), ("application/json; rle=1", "height")):
            assert field in post(server, "/predictions/small", content=PICTURE, headers={"accept": accept}).json()
        alone = post(server, "/predictions/small", content=PICTURE, headers={"accept": "image/png"})
        np.testing.assert_array_equal(in_png(alone.content), expected(artifact, PICTURE))
        server.application.held.limit = 100_000
        refused = post(server, "/predictions/small", content=PICTURE)
        assert refused.status_code == 413


def test_lists_are_refused_where_the_archive_does_not_say_so(server: Running) -> None:
    refused = post(server, "/predictions/small", content=PICTURE, headers={"accept": LISTS})
    assert refused.status_code == 400
    assert refused.json()["error"] == "Accept: lists=1 is only for an archive whose serving setting accept says so"


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("segmentation", {"accept": "image/png;q=2"}, "Accept: the quality q must be a number from 0 to 1"),
        ("segmentation", {"k": 3}, "k: an answer of segmentation does not depend on it; it has accept"),
        (
            "classification",
            {"accept": "*/*"},
            "accept: an answer of classification does not depend on it; it has k",
        ),
        ("segmentation", {"accept": "image/png\n"}, "printable characters of ASCII"),
    ],
)
def test_settings_that_the_task_does_not_have_are_refused(
    artifact: Path, tmp_path: Path, task: str, options: dict[str, Any], message: str
) -> None:
    folder = artifact if task == "segmentation" else artifacts.torchscript(tmp_path / "classifier")
    with pytest.raises(UserError, match=message) as caught:
        build_archive(folder, tmp_path / "x.mar", model_name="x", options=ServingOptions(**options))
    assert "\n" not in str(caught.value)


def test_a_packed_value_that_means_nothing_fails_when_the_archive_is_opened(artifact: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(artifact, folder)
    (folder / "serving.json").write_text(Serving((Execution("torchscript"),), accept="image/png;q=x").text)
    with pytest.raises(CardError, match=r"serving\.json: Accept: the quality q must be"):
        open_service(folder, None)


LARGE = artifacts.jpeg(5, (1100, 1000))


def infer(server: Running, picture: bytes, *, binary: bool) -> httpx.Response:
    tensor = {"name": "image", "datatype": "BYTES", "shape": [1], "data": [base64.b64encode(picture).decode()]}
    output = {"name": "mask", "parameters": {"binary_data": binary}}
    return post(server, "/v2/models/small/infer", json={"inputs": [tensor], "outputs": [output]})


def test_more_values_than_json_may_have_are_refused_and_answered_in_binary(server: Running, artifact: Path) -> None:
    refused = infer(server, LARGE, binary=False)
    assert refused.status_code == 413
    assert refused.json()["error"].startswith(
        "the output 'mask' has 1100000 values, more than the 1048576 that may be sent one by one: ask for binary data"
    )
    found = infer(server, LARGE, binary=True)
    mask = np.frombuffer(found.content[-1_100_000:], np.uint8).reshape(1000, 1100)
    np.testing.assert_array_equal(mask, expected(artifact, LARGE))


def test_a_long_answer_counts_as_memory_while_it_is_written(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    held = server.application.held
    client = triton.InferenceServerClient(server.grpc)
    sent = triton.InferInput("image", [1], "BYTES")
    sent.set_data_from_numpy(np.array([LARGE], dtype=object))

    def statuses() -> tuple[int, str]:
        try:
            client.infer("small", [sent], headers=bearer())
        except triton.InferenceServerException as error:
            return infer(server, LARGE, binary=True).status_code, str(error.status())
        return infer(server, LARGE, binary=True).status_code, ""

    assert statuses() == (200, "")
    monkeypatch.setattr(held, "limit", 2_100_000)  # the tensor and the answer have 1,100,000 bytes each
    assert statuses() == (413, "StatusCode.INVALID_ARGUMENT")
    monkeypatch.setattr(held, "limit", 2_300_000 + len(LARGE))
    assert statuses()[0] == 200
    held.unread += 1_000_000  # others do not read their answers
    try:
        assert statuses() == (503, "StatusCode.RESOURCE_EXHAUSTED")
    finally:
        held.unread -= 1_000_000
    assert (held.bytes, held.unread) == (0, 0)
    client.close()


@pytest.mark.parametrize("accept", ["*/*", "application/json; rle=1", "image/png"])
def test_both_servers_answer_with_the_same_bytes(server: Running, artifact: Path, tmp_path: Path, accept: str) -> None:
    context = context_of(artifact, tmp_path, None, batch_size=1)
    handler = opened(context)
    context.request_processor = [RequestProcessor({"Accept": accept})]
    (body,) = handler.handle([{"body": PICTURE}], context)
    own = post(server, "/predictions/small", content=PICTURE, headers={"accept": accept})
    assert body == own.content
    assert context.get_response_content_type(0) == own.headers["content-type"]
    if accept != "image/png":
        assert json.loads(body)["width"] == 48
