"""The Open Inference Protocol's codecs, against the protocol's own client library and against whatever may come."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.service_pb2 as triton_messages
import tritonclient.http as triton_http
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tritonclient.grpc._utils import _get_inference_request

from serve.asgi.protocols import kserve_v1, oip, oip_grpc, oip_messages, oip_rest
from serve.runtime.card.card import Preprocessing
from serve.runtime.card.execution import Execution
from serve.runtime.card.serving import Serving
from serve.runtime.errors import Refusal, RequestError
from serve.runtime.tasks.base import Outcome
from serve.runtime.tasks.classification import Label
from tests.serve.artifacts import CLASSES, jpeg, task_of

SERVING = Serving((Execution("onnxruntime"),), k=2, instance_limit=8)
SIGNATURE = oip.Signature("small", ("1.0",), task_of(), SERVING)
GREY = oip.Signature("grey", ("1.0",), task_of(preprocessing=Preprocessing(36, (32, 32), (0.5,), (0.5,))), SERVING)
OUTPUTS = ("label", "index", "probability", "probabilities")
JPEGS = [jpeg(seed) for seed in range(3)]


def answers(inference: oip.Inference) -> list[list[Label]]:
    """An answer for each image: the classes from the last one on, with probabilities that halve."""
    order = list(range(len(CLASSES)))[::-1]
    labels = [Label(CLASSES[index], index, 0.5 ** (place + 1)) for place, index in enumerate(order)]
    return [labels[: inference.request.options] for _ in inference.request.images]


def triton_input(images: list[bytes], module: Any = triton_http) -> Any:
    tensor = module.InferInput(oip.INPUT, [len(images)], "BYTES")
    tensor.set_data_from_numpy(np.array(images, dtype=np.object_))
    return tensor


def triton_body(inputs: list[Any], outputs: list[Any] | None = None, **options: Any) -> tuple[bytes, str | None]:
    body, length = triton_http.InferenceServerClient.generate_request_body(inputs, outputs, **options)
    return body, None if length is None else str(length)


def body_of(**changes: Any) -> bytes:
    tensor = {"name": oip.INPUT, "datatype": "BYTES", "shape": [1], "data": [base64.b64encode(JPEGS[0]).decode()]}
    tensor = {name: value for name, value in {**tensor, **changes}.items() if value is not None}
    return json.dumps({"inputs": [tensor]}).encode()


def test_tritons_client_sends_images_as_binary_data() -> None:
    body, length = triton_body([triton_input(JPEGS)], request_id="seven", timeout=250_000)
    inference = oip_rest.read(SIGNATURE, body, length)
    assert inference.request.images == tuple(JPEGS)
    assert (inference.id, inference.timeout_s) == ("seven", 0.25)
    assert [output.name for output in inference.wanted] == list(OUTPUTS)
    assert inference.request.options == len(CLASSES)  # the probabilities of all are among the outputs


def test_many_inputs_with_binary_data_do_not_copy_what_is_behind_them() -> None:
    """A body of so many bytes would be copied once for each, in the event loop."""
    one = {"name": oip.INPUT, "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 4}}
    head = json.dumps({"inputs": [one] * 16}).encode()
    body = head + bytes(16 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(RequestError):
            oip_rest.read(SIGNATURE, body, str(len(head)))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_tritons_client_reads_every_output_binary_or_not() -> None:
    wanted = [triton_http.InferRequestedOutput(name, binary_data=name != "index") for name in OUTPUTS]
    body, length = triton_body([triton_input(JPEGS)], wanted)
    inference = oip_rest.read(SIGNATURE, body, length)
    answer = oip_rest.write(SIGNATURE, "1.0", inference, oip.write_outputs(SIGNATURE, inference, answers(inference)))
    result = triton_http.InferenceServerClient.parse_response_body(answer.body, header_length=answer.json_length)
    assert result.as_numpy("label").tolist() == [[b"eel", b"dog"]] * 3
    assert result.as_numpy("index").tolist() == [[4, 3]] * 3
    assert result.as_numpy("probability").tolist() == [[0.5, 0.25]] * 3
    assert result.as_numpy("probabilities").tolist() == [[1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2]] * 3
    assert result.get_response()["model_version"] == "1.0"


def test_an_answer_without_binary_data_is_json_alone() -> None:
    document = json.loads(body_of())
    document["outputs"] = [{"name": "index"}]
    inference = oip_rest.read(SIGNATURE, json.dumps(document).encode(), None)
    assert inference.request.options == SERVING.k  # nobody wants all of them
    answer = oip_rest.write(SIGNATURE, "1.0", inference, oip.write_outputs(SIGNATURE, inference, answers(inference)))
    assert answer.json_length is None
    assert json.loads(answer.body)["outputs"] == [
        {"name": "index", "datatype": "INT64", "shape": [1, 2], "data": [4, 3]}
    ]


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_image_in_json_is_base64(wrapped: bool) -> None:
    text = (base64.encodebytes if wrapped else base64.b64encode)(JPEGS[1]).decode()
    assert oip_rest.read(SIGNATURE, body_of(data=[text]), None).request.images == (JPEGS[1],)
    said = body_of(data=[[text]], shape=[1, 1], parameters={"content_type": "base64"})
    assert oip_rest.read(SIGNATURE, said, None).request.images == (JPEGS[1],)


def test_a_text_that_is_no_base64_is_its_utf8() -> None:
    assert oip_rest.read(SIGNATURE, body_of(data=["no imäge"]), None).request.images == ("no imäge".encode(),)


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("signature", [SIGNATURE, GREY], ids=["rgb", "grey"])
def test_pixels_come_through_unchanged(layout: str, binary: bool, signature: oip.Signature) -> None:
    pixels = np.random.default_rng(3).integers(0, 256, (2, 5, 7, signature.channels), dtype=np.uint8)
    sent = pixels if layout == "NHWC" else np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))
    tensor = triton_http.InferInput(oip.INPUT, list(sent.shape), "UINT8")
    tensor.set_data_from_numpy(sent, binary_data=binary)
    images = oip_rest.read(signature, *triton_body([tensor])).request.images
    assert len(images) == 2
    for image, expected in zip(images, pixels, strict=True):
        assert isinstance(image, bytes)
        with Image.open(io.BytesIO(image)) as opened:
            got = np.asarray(opened).reshape(5, 7, signature.channels)
        np.testing.assert_array_equal(got, expected)


def test_our_messages_are_those_of_tritons_stubs() -> None:
    def told(descriptor: Any) -> Any:
        fields = [
            (entry.number, entry.name, entry.type, entry.is_repeated, getattr(entry.message_type, "full_name", None))
            for entry in descriptor.fields
        ]
        return fields, {nested.name: told(nested) for nested in descriptor.nested_types}

    theirs = triton_messages.DESCRIPTOR.message_types_by_name
    for method in oip_messages.METHODS:
        for name in (f"{method}Request", f"{method}Response"):
            assert told(oip_messages.message(name).DESCRIPTOR) == told(theirs[name]), name
    for name in ("InferParameter", "InferTensorContents"):
        assert told(oip_messages.message(name).DESCRIPTOR) == told(theirs[name]), name


def grpc_request(**options: Any) -> Any:
    settings = {"model_version": "", "request_id": "", "outputs": None, "sequence_id": 0, "sequence_start": False}
    settings |= {"sequence_end": False, "priority": 0, "timeout": None, "parameters": None}
    theirs = _get_inference_request(model_name="small", **{**settings, **options})
    return oip_messages.message("ModelInferRequest").FromString(theirs.SerializeToString())


def test_tritons_grpc_client_is_read_and_answered() -> None:
    request = grpc_request(inputs=[triton_input(JPEGS, triton_grpc)], request_id="nine", parameters={"k": 3})
    inference = oip_grpc.read(SIGNATURE, request)
    assert inference.request.images == tuple(JPEGS)
    assert inference.options == 3
    ours = oip_grpc.write(SIGNATURE, "1.0", inference, oip.write_outputs(SIGNATURE, inference, answers(inference)))
    result = triton_grpc.InferResult(triton_messages.ModelInferResponse.FromString(ours.SerializeToString()))
    assert result.get_response().id == "nine"
    assert result.as_numpy("label").tolist() == [[b"eel", b"dog", b"cat"]] * 3
    assert result.as_numpy("probabilities").tolist() == [[1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2]] * 3


def test_typed_contents_are_answered_with_typed_contents() -> None:
    request = oip_messages.message("ModelInferRequest")(model_name="small")
    request.inputs.add(name=oip.INPUT, datatype="BYTES", shape=[2]).contents.bytes_contents.extend(JPEGS[:2])
    inference = oip_grpc.read(SIGNATURE, request)
    assert inference.request.images == tuple(JPEGS[:2])
    answer = oip_grpc.write(SIGNATURE, "1.0", inference, oip.write_outputs(SIGNATURE, inference, answers(inference)))
    by_name = {entry.name: entry.contents for entry in answer.outputs}
    assert list(by_name["label"].bytes_contents) == [b"eel", b"dog"] * 2
    assert list(by_name["index"].int64_contents) == [4, 3] * 2
    assert list(answer.raw_output_contents) == []


def test_metadata_say_what_is_taken_and_given() -> None:
    told = oip.model_metadata(SIGNATURE)
    assert told["platform"] == "onnx_onnxv1"
    assert told["inputs"] == [{"name": "image", "datatype": "BYTES", "shape": [-1]}]
    assert {"name": "probabilities", "datatype": "FP32", "shape": [-1, 5]} in told["outputs"]
    message = oip_grpc.write_metadata(SIGNATURE)
    assert [(entry.name, entry.datatype, list(entry.shape)) for entry in message.outputs] == [
        (entry["name"], entry["datatype"], entry["shape"]) for entry in told["outputs"]
    ]


def test_one_refused_image_refuses_the_request_with_its_status_and_place() -> None:
    inference = oip_rest.read(SIGNATURE, *triton_body([triton_input(JPEGS)]))
    outcomes: list[Outcome] = [*answers(inference)[:1], Refusal(415, "not an image"), Refusal(413, "too large")]
    with pytest.raises(RequestError, match=r"^image 1: not an image$") as caught:
        oip.write_outputs(SIGNATURE, inference, outcomes)
    assert caught.value.status == 415


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "pixels"}, "must have one input, named 'image'; found 'pixels'"),
        ({"datatype": "FP32", "data": [1]}, "must be BYTES .* or UINT8"),
        ({"datatype": "FP32", "data": [0.5], "shape": [1, 3, 1, 1]}, "must be BYTES .* or UINT8"),
        ({"shape": [2]}, r"has 1 elements, but its shape \[2\] needs 2"),
        ({"shape": [1 << 62, 1 << 62]}, "needs"),
        ({"shape": [0]}, "numbers of at least 1"),
        ({"shape": [-1]}, "numbers of at least 1"),
        ({"shape": [10**400]}, "numbers of at least 1"),
        ({"shape": []}, "1 to 4 numbers"),
        ({"shape": [1] * 100_000}, "1 to 4 numbers"),
        ({"shape": [True]}, "list of whole numbers"),
        ({"shape": [1.0]}, "list of whole numbers"),
        ({"shape": None}, "list of whole numbers"),
        ({"data": None}, "no list of data"),
        ({"data": [7]}, "must be a string"),
        ({"data": ["\ud800"]}, "not valid text"),
        ({"data": [["a"], "b"], "shape": [2]}, "mixes lists and values"),
        ({"data": ["a!"], "parameters": {"content_type": "base64"}}, "not valid base64"),
        ({"data": ["a"] * 9, "shape": [9]}, "the limit is 8"),
        ({"data": None, "parameters": {"binary_data_size": 4}}, "up to the 0 bytes"),
        ({"parameters": {"binary_data_size": 0}}, "both data and"),
        ({"parameters": 3}, "JSON object"),
        ({"datatype": "UINT8", "data": [256]}, "from 0 to 255"),
        ({"datatype": "UINT8", "data": [0.5]}, "from 0 to 255"),
        ({"datatype": "UINT8", "data": [1]}, r"shape \[N,H,W,3\]"),
        ({"datatype": "UINT8", "data": [1] * 4, "shape": [1, 2, 2, 1]}, r"found \[1,2,2,1\]"),
        ({"datatype": "UINT8", "data": [0] * 3 * 70_000, "shape": [1, 1, 70_000, 3]}, "rows and columns"),
        ({"datatype": 8}, "both strings"),
    ],
)
def test_what_a_tensor_gets_wrong_is_said_in_one_line(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        oip_rest.read(SIGNATURE, body_of(**changes), None)
    assert_is_a_400(caught.value)


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ([], "the JSON body must be"),
        ({}, "must have one input, named 'image'; found none"),
        ({"inputs": {}}, "list of JSON objects"),
        ({"inputs": [3]}, "list of JSON objects"),
        ({"inputs": [{}] * 17}, "the limit is 16"),
        ({"id": 3, "inputs": []}, "id must be a string"),
        ({"id": "\ud800", "inputs": []}, "id must be a string"),
        ({"outputs": [{"name": "logits"}]}, "there is no output 'logits'; the outputs are label, index"),
        ({"outputs": [{"name": "index"}, {"name": "index"}]}, "requested twice"),
        ({"outputs": [{}]}, "must have a name"),
        ({"outputs": [{"name": "index", "parameters": {"binary_data": 1}}]}, "true or false"),
        ({"outputs": [{"name": "index", "parameters": {"classification": 2}}]}, "by their names"),
        ({"parameters": {"k": 0}}, "k must be a whole number from 1"),
        ({"parameters": {"k": True}}, "k must be a whole number from 1"),
        ({"parameters": {"timeout": -1}}, "microseconds"),
        ({"parameters": {"timeout": "1"}}, "microseconds"),
        ({"parameters": {"binary_data_output": "yes"}}, "true or false"),
    ],
)
def test_what_a_request_gets_wrong_is_said_in_one_line(document: Any, said: str) -> None:
    whole = {**json.loads(body_of()), **document} if isinstance(document, dict) and document else document
    with pytest.raises(RequestError, match=said) as caught:
        oip_rest.read(SIGNATURE, json.dumps(whole).encode(), None)
    assert_is_a_400(caught.value)


@pytest.mark.parametrize("length", ["-1", "", "1e3", "9" * 30, "100000", "٣", " 12"])
def test_a_length_of_the_json_that_lies_is_a_400(length: str) -> None:
    with pytest.raises(RequestError, match="must be a number of bytes") as caught:
        oip_rest.read(SIGNATURE, body_of(), length)
    assert_is_a_400(caught.value)


@pytest.mark.parametrize(
    ("binary", "said"),
    [
        (b"\x01\x00\x00", "in the middle of an element's length"),
        (b"\x05\x00\x00\x00abc", "an element should have 5 bytes"),
        (b"\xff\xff\xff\xff", "an element should have 4294967295 bytes"),
        (b"\x00\x00\x00\x00" * 9, "more than 8 images"),
        (b"\x00\x00\x00\x00" * 2, "has 2 elements"),
        (b"", "has 0 elements"),
    ],
)
def test_binary_sizes_that_lie_are_a_400(binary: bytes, said: str) -> None:
    header = body_of(data=None, parameters={"binary_data_size": len(binary)})
    with pytest.raises(RequestError, match=said) as caught:
        oip_rest.read(SIGNATURE, header + binary, str(len(header)))
    assert_is_a_400(caught.value)
    request = grpc_request(inputs=[triton_input(JPEGS[:1], triton_grpc)])
    request.raw_input_contents[0] = binary
    with pytest.raises(RequestError) as caught:
        oip_grpc.read(SIGNATURE, request)
    assert_is_a_400(caught.value)


def test_bytes_behind_the_last_input_are_a_400() -> None:
    good = struct.pack("<I", len(JPEGS[0])) + JPEGS[0]
    header = body_of(data=None, parameters={"binary_data_size": len(good)})
    assert oip_rest.read(SIGNATURE, header + good, str(len(header))).request.images == (JPEGS[0],)
    with pytest.raises(RequestError, match="1 bytes are left after the binary data"):
        oip_rest.read(SIGNATURE, header + good + b"!", str(len(header)))


def assert_is_a_400(error: RequestError) -> None:
    assert error.status == 400
    assert len(str(error).splitlines()) == 1
    assert len(str(error)) < 400


def read_or_400(read: Any) -> None:
    try:
        inference = read()
    except RequestError as error:
        assert_is_a_400(error)
    else:
        assert all(isinstance(image, bytes) for image in inference.request.images)
        assert 1 <= len(inference.request.images) <= SIGNATURE.instance_limit


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner), max_leaves=8
)
PARAMETERS = st.dictionaries(
    st.sampled_from(["k", "timeout", "binary_data_output", "binary_data_size", "content_type", "binary_data"]),
    SCALARS | st.sampled_from(["base64"]),
)
SHAPES = st.lists(st.integers(-2, 9) | st.integers(), max_size=5)
TENSORS = st.fixed_dictionaries(
    {},
    optional={
        "name": st.just(oip.INPUT) | JSON,
        "datatype": st.sampled_from(["BYTES", "UINT8", "FP32"]) | JSON,
        "shape": SHAPES | JSON,
        "data": st.lists(st.text(max_size=8) | st.integers(-1, 256), max_size=9) | JSON,
        "parameters": PARAMETERS | JSON,
    },
)
DOCUMENTS = JSON | st.fixed_dictionaries(
    {},
    optional={
        "id": st.text(max_size=4) | JSON,
        "inputs": st.lists(TENSORS, max_size=3) | JSON,
        "outputs": st.lists(
            st.fixed_dictionaries({"name": st.sampled_from(list(OUTPUTS)) | JSON}, optional={"parameters": PARAMETERS}),
            max_size=3,
        )
        | JSON,
        "parameters": PARAMETERS | JSON,
    },
)


@given(DOCUMENTS, st.binary(max_size=40), st.none() | st.integers(-3, 3))
def test_any_json_and_any_binary_data_are_read_or_are_a_400(document: Any, binary: bytes, off: int | None) -> None:
    header = json.dumps(document).encode()
    length = None if off is None else str(len(header) + off)
    read_or_400(lambda: oip_rest.read(SIGNATURE, header + binary, length))


@given(st.binary(max_size=200), st.none() | st.text(max_size=6))
def test_any_bytes_are_read_or_are_a_400(body: bytes, length: str | None) -> None:
    read_or_400(lambda: oip_rest.read(SIGNATURE, body, length))


@given(st.data())
def test_a_request_of_tritons_client_that_was_changed_is_read_or_is_a_400(data: st.DataObject) -> None:
    body, length = triton_body([triton_input([b"abc", b"defgh"])])
    changed = bytearray(body)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    read_or_400(lambda: oip_rest.read(SIGNATURE, bytes(changed), length))


@given(
    st.lists(
        st.tuples(
            st.sampled_from([oip.INPUT, "other"]),
            st.sampled_from(["BYTES", "UINT8", "FP32", ""]),
            st.lists(st.integers(-2, 9) | st.integers(-(2**63), 2**63 - 1), max_size=5),
            st.lists(st.binary(max_size=6), max_size=3),
            st.lists(st.integers(0, 300), max_size=12),
        ),
        max_size=3,
    ),
    st.lists(st.binary(max_size=40), max_size=3),
)
def test_any_grpc_message_is_read_or_is_a_400(tensors: list[Any], raw: list[bytes]) -> None:
    request = oip_messages.message("ModelInferRequest")(raw_input_contents=raw)
    for name, datatype, shape, texts, numbers in tensors:
        tensor = request.inputs.add(name=name, datatype=datatype, shape=shape)
        tensor.contents.bytes_contents.extend(texts)
        tensor.contents.uint_contents.extend(numbers)
    read_or_400(lambda: oip_grpc.read(SIGNATURE, request))


def test_a_tensor_of_two_kinds_of_contents_is_refused_and_names_them() -> None:
    request = oip_messages.message("ModelInferRequest")()
    tensor = request.inputs.add(name=oip.INPUT, datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(b"x")
    assert oip_grpc.read(SIGNATURE, request).request.images == (b"x",)
    tensor.contents.uint_contents.append(1)
    with pytest.raises(RequestError, match=r"several kinds of contents \(uint_contents, bytes_contents\)"):
        oip_grpc.read(SIGNATURE, request)


PACKED = {
    "bool_contents": st.booleans(),
    "int_contents": st.integers(-(2**31), 2**31 - 1),
    "int64_contents": st.integers(-(2**63), 2**63 - 1),
    "uint_contents": st.integers(0, 2**32 - 1),
    "uint64_contents": st.integers(0, 2**64 - 1),
    "fp32_contents": st.floats(width=32),
    "fp64_contents": st.floats(),
}


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=9),
    st.fixed_dictionaries({name: st.lists(value, max_size=9) for name, value in PACKED.items()}),
    st.lists(st.binary(max_size=99), max_size=3),
)
def test_packed_values_are_counted_and_nothing_else_is(shape: list[int], packed: Any, texts: list[bytes]) -> None:
    """A message is read where it may have as many as it has, and is not where it may have one less."""
    request = oip_messages.message("ModelInferRequest")(model_name="of no values", raw_input_contents=texts)
    request.parameters["k"].int64_param = 3
    tensor = request.inputs.add(name=oip.INPUT, datatype="BYTES", shape=shape)
    tensor.contents.bytes_contents.extend(texts)
    for name, values in packed.items():
        getattr(tensor.contents, name).extend(values)
    content = request.SerializeToString()
    count = len(shape) + sum(map(len, packed.values()))
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(oip_messages, "MOST_VALUES", count)
        assert oip_messages.read_message("ModelInferRequest", content).SerializeToString() == content
        changed.setattr(oip_messages, "MOST_VALUES", count - 1)
        with pytest.raises(ValueError, match="packed values"):
            oip_messages.read_message("ModelInferRequest", content)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_message_or_are_told_to_be_none(content: bytes) -> None:
    with contextlib.suppress(ValueError):
        oip_messages.read_message("ModelInferRequest", content)


def test_a_shape_of_a_million_numbers_is_refused_with_the_first_of_them() -> None:
    request = oip_messages.message("ModelInferRequest")()
    request.inputs.add(name=oip.INPUT, datatype="BYTES", shape=[1] * (1 << 20)).contents.bytes_contents.append(b"x")
    with pytest.raises(RequestError, match=r"have 1 to 4 numbers of at least 1, found \[1,1,1,1,…\]$"):
        oip_grpc.read(SIGNATURE, request)


def test_version_1_reads_instances_whatever_their_content_type() -> None:
    body = json.dumps({"instances": [{"b64": base64.b64encode(image).decode()} for image in JPEGS]}).encode()
    request = kserve_v1.read(body, {"k": "4"}, SIGNATURE.task, SERVING)
    assert (request.images, request.options, request.listed) == (tuple(JPEGS), 4, True)
    with pytest.raises(RequestError, match="not valid JSON"):
        kserve_v1.read(JPEGS[0], {}, SIGNATURE.task, SERVING)


@pytest.mark.parametrize(
    ("last", "split"),
    [
        ("a:predict", ("a", "predict")),
        ("a", ("a", "")),
        ("a:b:predict", ("a:b", "predict")),
        (":predict", (":predict", "")),
    ],
)
def test_the_verb_of_a_path_is_split_off(last: str, split: tuple[str, str]) -> None:
    assert kserve_v1.split_verb(last) == split
