"""Any request is read or refused: never another exception, which would fail a whole batch."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.runtime.errors import Refusal, RequestError
from serve.runtime.predictor import Label
from serve.runtime.protocol import Request, answer, parse, parse_k

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(("instances", "b64", "x")), inner),
    max_leaves=12,
)


def read(parameters: dict[str, object], says_json: bool = False) -> Request | RequestError:
    try:
        return parse(parameters, says_json=says_json, request_type="image/jpeg", default_k=3, instance_limit=4)
    except RequestError as error:
        return error


def read_or_refused(got: Request | RequestError) -> None:
    if isinstance(got, RequestError):
        assert (got.status, len(str(got).splitlines())) == (400, 1)
    else:
        assert 1 <= len(got.images) <= 4  # the limit
        assert all(isinstance(image, bytes | Refusal) for image in got.images)
        assert got.k == 3


@given(JSON, st.booleans())
def test_any_json_is_read_or_refused(document: object, decoded: bool) -> None:
    read_or_refused(read({"body": document if decoded else json.dumps(document).encode()}, says_json=True))


@given(st.binary(max_size=60) | st.text(max_size=60), st.booleans(), st.sampled_from(("body", "data")))
def test_any_body_is_read_or_refused(body: bytes | str, says_json: bool, name: str) -> None:
    read_or_refused(read({name: body}, says_json))


@given(st.binary(max_size=12) | st.text(max_size=12) | st.integers() | st.none())
def test_any_k_is_a_number_from_1_or_refused(value: object) -> None:
    try:
        k = parse_k(value)
    except RequestError:
        return
    assert 1 <= k < 10**9


def test_a_raw_image_is_passed_on_untouched_and_base64_may_be_wrapped() -> None:
    assert read({"body": bytearray(b"\xff\xd8 image")}) == Request((b"\xff\xd8 image",), 3, listed=False)
    wrapped = base64.encodebytes(b"x" * 100).decode()
    assert read({"body": {"instances": [{"b64": wrapped}]}, "k": b"2"}) == Request((b"x" * 100,), 2, listed=True)


GOOD = [Label("ant", 0, 0.75)]
ANT = {"label": "ant", "index": 0, "probability": 0.75}


@pytest.mark.parametrize(
    ("listed", "outcomes", "status", "body"),
    [
        (False, [GOOD], 200, [ANT]),
        (False, [Refusal(413, "too large")], 413, {"error": "too large"}),
        (True, [GOOD, Refusal(400, "bad")], 200, {"predictions": [[ANT], {"error": "bad"}]}),
        (True, [Refusal(415, "a")], 415, {"error": "a", "predictions": [{"error": "a"}]}),
    ],
)
def test_the_answer_has_the_form_of_the_request(listed: bool, outcomes: list, status: int, body: object) -> None:
    request = Request((b"",) * len(outcomes), 1, listed)
    assert answer(request, outcomes) == (status, body)
