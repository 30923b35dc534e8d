"""The Open Inference Protocol and KServe's version 1 on a running server, asked by the protocol's own clients."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import io
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from google.protobuf.json_format import MessageToDict
from PIL import Image
from tritonclient.utils import InferenceServerException

from benchmarks.hostile.pictures import encoded, picture
from serve.asgi.protocols import oip
from serve.asgi.protocols.grpc_server import GrpcServer
from serve.asgi.protocols.oip_messages import SERVICE, message
from serve.runtime.errors import UserError
from serve.runtime.service.observation import Observation
from tests.serve import artifacts, kserve_client
from tests.serve.own_server import BODY_LIMIT, BODY_SECONDS, TOKEN, Running, bearer

JPEGS = [artifacts.jpeg(seed) for seed in range(3)]


@pytest.fixture(scope="module")
def rest(own_server: Running) -> Iterator[Any]:
    with triton_http.InferenceServerClient(own_server.http) as client:
        yield client


@pytest.fixture(scope="module")
def remote(own_server: Running) -> Iterator[Any]:
    with triton_grpc.InferenceServerClient(own_server.grpc) as client:
        yield client


@pytest.fixture(scope="module")
def plain(own_server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{own_server.http}", headers=bearer()) as client:
        yield client


def image_tensor(module: Any, images: list[bytes]) -> Any:
    tensor = module.InferInput(oip.INPUT, [len(images)], "BYTES")
    tensor.set_data_from_numpy(np.array(images, dtype=np.object_))
    return tensor


@dataclass
class Carrier:
    client: Any
    module: Any
    url: str

    def infer(self, images: list[bytes], model: str = "small", **options: Any) -> Any:
        return self.client.infer(model, [image_tensor(self.module, images)], headers=bearer(), **options)


@pytest.fixture(params=["http", "grpc"])
def carrier(request: pytest.FixtureRequest, own_server: Running) -> Carrier:
    if request.param == "http":
        return Carrier(request.getfixturevalue("rest"), triton_http, own_server.http)
    return Carrier(request.getfixturevalue("remote"), triton_grpc, own_server.grpc)


def refused(carrier: Carrier, images: list[bytes], **options: Any) -> tuple[str, str]:
    """Status and message of a request that is refused."""
    with pytest.raises(InferenceServerException) as caught:
        carrier.infer(images, **options)
    return str(caught.value.status()).removeprefix("StatusCode."), caught.value.message()


def test_a_stranger_learns_of_health_and_of_nothing_else(carrier: Carrier) -> None:
    assert carrier.client.is_server_live()
    assert carrier.client.is_server_ready()
    for ask in (
        lambda headers: carrier.client.get_server_metadata(headers=headers),
        lambda headers: carrier.client.get_model_metadata("small", headers=headers),
        lambda headers: carrier.client.infer("small", [image_tensor(carrier.module, JPEGS)], headers=headers),
    ):
        for headers in (None, {"authorization": "Bearer of-nothing-good"}):
            with pytest.raises(InferenceServerException) as caught:
                ask(headers)
            assert str(caught.value.status()) in ("401", "StatusCode.UNAUTHENTICATED")
            assert "Authorization: Bearer TOKEN" in caught.value.message()
        ask(bearer())


def test_images_are_answered_as_the_model_itself_does(carrier: Carrier, own_server: Running) -> None:
    result = carrier.infer(JPEGS, request_id="mine")
    expected = own_server.probabilities(JPEGS)
    np.testing.assert_allclose(result.as_numpy("probabilities"), expected, rtol=1e-5, atol=1e-6)
    best = np.argsort(-expected, axis=1)[:, :2]
    assert result.as_numpy("index").tolist() == best.tolist()
    assert [[label.decode() for label in row] for row in result.as_numpy("label")] == [
        [artifacts.CLASSES[index] for index in row] for row in best
    ]
    np.testing.assert_allclose(
        result.as_numpy("probability"), np.take_along_axis(expected, best, axis=1), rtol=1e-5, atol=1e-6
    )


def test_pixels_are_answered_as_the_same_image_is(carrier: Carrier) -> None:
    pixels = picture(4)
    stream = io.BytesIO()
    pixels.save(stream, "PNG")
    tensor = carrier.module.InferInput(oip.INPUT, [1, 45, 60, 3], "UINT8")
    tensor.set_data_from_numpy(np.asarray(pixels)[None])
    result = carrier.client.infer("small", [tensor], headers=bearer())
    expected = carrier.infer([stream.getvalue()])
    assert result.as_numpy("probabilities").tolist() == expected.as_numpy("probabilities").tolist()


def test_a_version_is_asked_by_its_name(carrier: Carrier) -> None:
    for version in ("1.0", "2.0"):
        told = carrier.infer(JPEGS[:1], model_version=version).get_response()
        assert (told["model_version"] if isinstance(told, dict) else told.model_version) == version
        assert carrier.client.is_model_ready("small", version, headers=bearer())
    status, said = refused(carrier, JPEGS[:1], model_version="3.0")
    assert status in ("404", "NOT_FOUND")
    assert "no version '3.0'; there are 1.0, 2.0" in said


def test_k_is_a_parameter_of_the_request(carrier: Carrier) -> None:
    assert carrier.infer(JPEGS[:1], parameters={"k": 3}).as_numpy("index").shape == (1, 3)
    assert carrier.infer(JPEGS[:1], parameters={"k": 99}).as_numpy("index").shape == (1, len(artifacts.CLASSES))


def test_what_cannot_be_answered_has_its_status_and_one_line(carrier: Carrier) -> None:
    status, said = refused(carrier, [JPEGS[0], b"no image"])
    assert status in ("415", "INVALID_ARGUMENT")
    assert said.startswith("image 1: not an image")
    status, said = refused(carrier, JPEGS, parameters={"k": 0})
    assert status in ("400", "INVALID_ARGUMENT")
    assert "k must be a whole number from 1" in said
    status, said = refused(carrier, JPEGS * 3)
    assert status in ("400", "INVALID_ARGUMENT")
    assert "more than 8 images" in said
    status, said = refused(carrier, JPEGS, model="smal")
    assert status in ("404", "NOT_FOUND")
    assert "did you mean small?" in said


def test_a_deadline_that_is_over_is_told_so(carrier: Carrier) -> None:
    status, said = refused(carrier, JPEGS, timeout=1)
    assert status in ("504", "DEADLINE_EXCEEDED")
    assert "deadline has passed" in said


def test_a_full_queue_refuses_at_once(carrier: Carrier) -> None:
    large = encoded(Image.new("RGB", (4000, 3000)), quality=50)

    def ask(_: int) -> str:
        own = carrier.module.InferenceServerClient(carrier.url)
        try:
            own.infer("narrow", [image_tensor(carrier.module, [large])], headers=bearer())
        except InferenceServerException as error:
            return f"{error.status()} {error.message()}"
        else:
            return "answered"
        finally:
            own.close()

    with ThreadPoolExecutor(6) as pool:
        found = set(pool.map(ask, range(6)))
    assert "answered" in found
    (full,) = found - {"answered"}
    assert full.startswith(("503", "StatusCode.RESOURCE_EXHAUSTED"))
    assert "try again later" in full


def test_a_body_beyond_the_limit_is_refused(carrier: Carrier) -> None:
    status, _ = refused(carrier, [b"x" * BODY_LIMIT])
    assert status in ("413", "RESOURCE_EXHAUSTED")


def test_metadata_are_those_of_the_protocol(rest: Any, remote: Any) -> None:
    told = rest.get_model_metadata("small", headers=bearer())
    assert (told["name"], told["versions"], told["platform"]) == ("small", ["1.0", "2.0"], "onnx_onnxv1")
    same = MessageToDict(remote.get_model_metadata("small", headers=bearer()), preserving_proto_field_name=True)
    for tensor in [*same["inputs"], *same["outputs"]]:
        tensor["shape"] = [int(side) for side in tensor["shape"]]
    assert same == told
    server = rest.get_server_metadata(headers=bearer())
    assert server["extensions"] == ["binary_tensor_data"]
    assert remote.get_server_metadata(headers=bearer()).name == server["name"]


def test_version_1_answers_instances(plain: httpx.Client, own_server: Running) -> None:
    assert plain.get("/v1/models").json() == {"models": ["narrow", "small"]}
    assert plain.get("/v1/models/small").json() == {"name": "small", "ready": True}
    instances = [{"b64": base64.b64encode(image).decode()} for image in (*JPEGS, b"no image")]
    answer = plain.post("/v1/models/small:predict", json={"instances": instances})
    assert answer.status_code == 200
    *predictions, refusal = answer.json()["predictions"]
    expected = own_server.probabilities(JPEGS).argmax(axis=1).tolist()
    assert [prediction[0]["index"] for prediction in predictions] == expected
    assert "not an image" in refusal["error"]
    assert plain.post("/v1/models/small:explain", json={}).status_code == 501
    assert plain.post("/v1/models/small", json={}).status_code == 404
    assert plain.post("/v1/models/small:predict", content=b"{").status_code == 400
    assert plain.post("/v1/models/other:predict", content=b"{").status_code == 404
    assert httpx.post(f"http://{own_server.http}/v1/models/small:predict", json={}).status_code == 401


@pytest.fixture(scope="module")
def told_kserve(own_server: Running, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What KServe's own clients were told."""
    if missing := [name for name in kserve_client.NEEDED if importlib.util.find_spec(name) is None]:
        pytest.skip(f"of what KServe's client needs is not installed: {', '.join(missing)}")
    folder = tmp_path_factory.mktemp("kserve")
    paths = [folder / f"{number}.jpg" for number in range(len(JPEGS))]
    for path, image in zip(paths, JPEGS, strict=True):
        path.write_bytes(image)
    words = (f"http://{own_server.http}", own_server.grpc, TOKEN, *map(str, paths))
    command = [sys.executable, "-m", "tests.serve.kserve_client", *words]
    asked = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert asked.returncode == 0, asked.stderr
    told: dict[str, Any] = json.loads(asked.stdout.splitlines()[-1])
    return told


def test_kserves_own_client_is_answered_in_version_1(told_kserve: dict[str, Any], own_server: Running) -> None:
    told = told_kserve["v1"]
    assert told["live"] is told["ready"] is True
    *predictions, refusal = told["answer"]["predictions"]
    expected = own_server.probabilities(JPEGS)
    assert [prediction[0]["index"] for prediction in predictions] == expected.argmax(axis=1).tolist()
    found = [prediction[0]["probability"] for prediction in predictions]
    np.testing.assert_allclose(found, expected.max(axis=1), rtol=1e-5, atol=1e-6)
    assert "not an image" in refusal["error"]
    assert "'Authorization: Bearer TOKEN', '401 Unauthorized'" in told["no token"]
    assert "did you mean small?" in told["no model"]
    assert "explanations are not supported" in told["explain"]


@pytest.mark.parametrize(("by", "how"), [("v2", "binary"), ("v2", "json"), ("grpc", "answer")])
def test_kserves_own_client_is_answered_in_version_2(
    by: str, how: str, told_kserve: dict[str, Any], own_server: Running
) -> None:
    told = told_kserve[by]
    assert told["live"] is told["server"] is told["ready"] is True
    expected = own_server.probabilities(JPEGS)
    assert told[how]["id"] == "mine"
    np.testing.assert_allclose(told[how]["probabilities"], expected, rtol=1e-5, atol=1e-6)
    assert [row[0] for row in told[how]["index"]] == expected.argmax(axis=1).tolist()
    assert "image 3: not an image" in told_kserve["v2"]["no image"]


def test_every_wrong_request_over_http_is_a_400(plain: httpx.Client) -> None:
    for body in (b"", b"{", b"[]", b"\xff", b'{"inputs": [{"name": "image", "datatype": "BYTES", "shape": [1e9]}]}'):
        answer = plain.post("/v2/models/small/infer", content=body)
        assert answer.status_code == 400, body
        assert len(answer.json()["error"].splitlines()) == 1
    wrong = plain.post("/v2/models/small/infer", content=b"{}", headers={"inference-header-content-length": "3"})
    assert wrong.status_code == 400


def test_an_answer_over_grpc_has_the_id_that_its_request_came_with_where_that_is_a_word(own_server: Running) -> None:
    asked = message("ServerLiveRequest")().SerializeToString()
    told = []
    with grpc.insecure_channel(own_server.grpc) as channel:
        for given in ("mine", "!~" * 64, "two words", "a" * 129, "", None):
            metadata = () if given is None else (("x-request-id", given),)
            _, call = channel.unary_unary(f"/{SERVICE}/ServerLive").with_call(asked, metadata=metadata)
            told.append(dict(call.trailing_metadata())["x-request-id"])
    assert told[:2] == ["mine", "!~" * 64]
    assert len(set(told)) == len(told)
    assert all(re.fullmatch("[0-9a-f]{16}", made) for made in told[2:])


def test_what_is_no_message_is_refused_and_the_server_lives(own_server: Running, remote: Any) -> None:
    with grpc.insecure_channel(own_server.grpc) as channel:
        infer = f"/{SERVICE}/ModelInfer"
        for call, sent in (
            (channel.unary_unary(infer), b"\xff\xff\xff"),
            (channel.stream_unary(infer), iter(())),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                call(sent, metadata=tuple(bearer().items()))
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(f"/{SERVICE}/ModelStatistics")(b"", metadata=tuple(bearer().items()))
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert remote.is_server_live()


def test_a_message_that_does_not_come_is_not_waited_for_and_of_a_stranger_not_at_all(own_server: Running) -> None:
    ended = threading.Event()

    def never() -> Iterator[bytes]:
        ended.wait(60)
        yield from ()

    try:
        with grpc.insecure_channel(own_server.grpc) as channel:
            infer = channel.stream_unary(f"/{SERVICE}/ModelInfer")
            started = time.monotonic()
            for health in ("ServerLive", "ServerReady"):  # whose message says nothing
                channel.stream_unary(f"/{SERVICE}/{health}")(never())
            with pytest.raises(grpc.RpcError) as caught:
                infer(never())
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
            assert time.monotonic() - started < BODY_SECONDS
            with pytest.raises(grpc.RpcError) as caught:
                infer(never(), metadata=tuple(bearer().items()))
            assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            assert "did not arrive within 4 s" in caught.value.details()
    finally:
        ended.set()


def test_a_request_that_its_client_gives_up_is_not_waited_for(own_server: Running) -> None:
    service = own_server.application.models.get("narrow").service
    images = [encoded(Image.new("RGB", (4000, 3000)), quality=50)] * 8
    request = message("ModelInferRequest")(model_name="narrow")
    request.inputs.add(name=oip.INPUT, datatype="BYTES", shape=[8]).contents.bytes_contents.extend(images)
    told: list[Observation] = []
    own_server.application.observers.append(told.append)
    try:
        with grpc.insecure_channel(own_server.grpc) as channel:
            call = channel.unary_unary(f"/{SERVICE}/ModelInfer").future(
                request.SerializeToString(), metadata=tuple(bearer().items())
            )
            wait_for(lambda: service.waiting == 1)
            call.cancel()
        wait_for(lambda: service.waiting == 0 and bool(told))
    finally:
        own_server.application.observers.remove(told.append)
    assert [(entry.route, entry.status, entry.refusals) for entry in told] == [
        ("grpc/ModelInfer", 499, ("client-gone",))
    ]
    assert own_server.application.in_flight == own_server.application.held.bytes == 0


def test_a_port_that_is_taken_is_said_in_one_line(own_server: Running) -> None:
    port = int(own_server.grpc.rpartition(":")[2])
    with pytest.raises(UserError, match=rf"gRPC cannot listen at 127\.0\.0\.1:{port}: stop"):
        asyncio.run(GrpcServer(own_server.application, port=port).start())


def wait_for(reached: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not reached():
        assert time.monotonic() < until
        time.sleep(0.002)


@pytest.mark.parametrize("field", ["inputs", "outputs", "raw_input_contents", "parameters", "bytes_contents"])
def test_a_message_of_millions_of_fields_is_refused_before_it_is_read(field: str, own_server: Running) -> None:
    request = message("ModelInferRequest")(model_name="small")
    tensor = request.inputs.add(name="image", datatype="BYTES", shape=[1])
    many = {"inputs": b"\x2a\0", "outputs": b"\x32\0", "raw_input_contents": b"\x3a\0"}
    content = request.SerializeToString() + many.get(field, b"") * 500_000
    if field == "bytes_contents":
        tensor.contents.bytes_contents.extend([b""] * 500_000)
        content = request.SerializeToString()
    if field == "parameters":
        for number in range(100_000):
            request.parameters[str(number)].bool_param = True
        content = request.SerializeToString()
    with grpc.insecure_channel(own_server.grpc) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(f"/{SERVICE}/ModelInfer")(content, metadata=tuple(bearer().items()))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "more than 16384 fields" in caught.value.details()


def test_a_message_of_millions_of_packed_values_is_refused_before_it_is_read(own_server: Running) -> None:
    request = message("ModelInferRequest")(model_name="small")
    request.inputs.add(name="image", datatype="BYTES", shape=[1]).contents.uint64_contents.extend([1] * 2_000_000)
    with grpc.insecure_channel(own_server.grpc) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(f"/{SERVICE}/ModelInfer")(request.SerializeToString(), metadata=tuple(bearer().items()))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "more than 1048576 packed values" in caught.value.details()


def test_want_of_memory_is_told_as_over_http_and_logged_in_a_line(
    carrier: Carrier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The memory is none here where a request's tensors are read."""

    def starved(*_: Any) -> Any:
        raise MemoryError("cannot allocate 99 GiB")

    monkeypatch.setattr("serve.asgi.protocols.oip_rest.read_inference", starved)
    monkeypatch.setattr("serve.asgi.protocols.oip_grpc.read_inference", starved)
    status, said = refused(carrier, JPEGS[:1])
    assert status in ("503", "RESOURCE_EXHAUSTED")
    assert "does not have enough memory for the request now: try again later" in said
    (record,) = [record for record in caplog.records if record.name.startswith("serve.asgi")]
    assert "not enough memory: MemoryError: cannot allocate 99 GiB" in record.getMessage()
    assert record.exc_info is None
