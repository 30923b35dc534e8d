"""Any request is read or refused: never another exception, which would fail a whole batch."""

from __future__ import annotations

import base64
import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.runtime.card.execution import Execution
from serve.runtime.card.serving import Serving
from serve.runtime.errors import Refusal, RequestError
from serve.runtime.service.protocol import Request, answer, parse, refuse
from serve.runtime.tasks.classification import Label
from tests.serve import artifacts

TASK = artifacts.task_of()
SERVING = Serving((Execution("onnxruntime"),), k=3, instance_limit=4)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(("instances", "b64", "x")), inner),
    max_leaves=12,
)


def read(parameters: dict[str, object], says_json: bool = False) -> Request | RequestError:
    try:
        return parse(parameters, TASK, SERVING, says_json=says_json, request_type="image/jpeg")
    except RequestError as error:
        return error


def read_or_refused(got: Request | RequestError) -> None:
    if isinstance(got, RequestError):
        assert (got.status, len(str(got).splitlines())) == (400, 1)
    else:
        assert 1 <= len(got.images) <= 4  # the limit
        assert all(isinstance(image, bytes | Refusal) for image in got.images)
        assert got.options == 3


@given(JSON, st.booleans())
def test_any_json_is_read_or_refused(document: object, decoded: bool) -> None:
    read_or_refused(read({"body": document if decoded else json.dumps(document).encode()}, says_json=True))


@given(st.binary(max_size=60) | st.text(max_size=60), st.booleans(), st.sampled_from(("body", "data")))
def test_any_body_is_read_or_refused(body: bytes | str, says_json: bool, name: str) -> None:
    read_or_refused(read({name: body}, says_json))


def test_a_raw_image_is_passed_on_untouched_and_base64_may_be_wrapped() -> None:
    assert read({"body": bytearray(b"\xff\xd8 image")}) == Request((b"\xff\xd8 image",), 3, listed=False)
    wrapped = base64.encodebytes(b"x" * 100).decode()
    assert read({"body": {"instances": [{"b64": wrapped}]}, "k": b"2"}) == Request((b"x" * 100,), 2, listed=True)


@pytest.mark.parametrize("instance", [{"b64": "{}"}, {"data": "{}"}, {"b64": "data:image/png;base64,{}", "x": 1}])
def test_base64_may_stand_in_data_and_in_a_browsers_url(instance: dict[str, object]) -> None:
    filled = {name: str(value).format(base64.b64encode(b"pixels").decode()) for name, value in instance.items()}
    found = read({"body": {"instances": [filled]}})
    assert isinstance(found, Request)
    assert found.images == (b"pixels",)


@pytest.mark.parametrize(
    "instance", [{}, {"data": [[0.5]]}, {"b64": "eA==", "data": "eA=="}, {"image": "eA=="}, "eA=="]
)
def test_an_instance_of_another_form_is_told_the_right_one(instance: object) -> None:
    found = read({"body": {"instances": [instance]}})
    assert isinstance(found, Request)
    (refused,) = found.images
    assert isinstance(refused, Refusal)
    assert refused.status == 400
    assert '{"b64": "<base64 of an image>"}' in refused.message


@pytest.mark.parametrize("url", ["data:image/png,%89PNG", "data:,x", "data:image/png;base64"])
def test_a_url_that_holds_no_base64_is_refused(url: str) -> None:
    found = read({"body": {"instances": [{"b64": url}]}})
    assert isinstance(found, Request)
    (refused,) = found.images
    assert isinstance(refused, Refusal)
    assert "not in base64" in refused.message


def test_two_places_for_an_image_in_one_request_are_refused() -> None:
    refused = read({"data": b"one", "body": b"two"})
    assert isinstance(refused, RequestError)
    assert "more than one part 'data' or 'body'" in str(refused)


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
    got, text, _ = answer(TASK, request, outcomes)
    assert (got, json.loads(text)) == (status, body)


@given(
    st.lists(
        st.lists(st.builds(Label, st.text(max_size=8), st.integers(0, 10**6), st.floats(0, 1)), min_size=1, max_size=4)
        | st.builds(Refusal, st.sampled_from((400, 503)), st.text(max_size=20)),
        min_size=1,
        max_size=4,
    ),
    st.booleans(),
)
def test_every_answer_is_json_with_the_values_that_were_given(outcomes: list, listed: bool) -> None:
    outcomes = outcomes if listed else outcomes[:1]
    _, text, _ = answer(TASK, Request((b"",) * len(outcomes), 1, listed), outcomes)
    document = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    bodies = document["predictions"] if listed else [document]
    for body, outcome in zip(bodies, outcomes, strict=True):
        if isinstance(outcome, Refusal):
            assert body == {"error": outcome.message}
        else:
            assert [Label(**entry) for entry in body] == outcome


@pytest.mark.parametrize("listed", [True, False])
def test_an_unpaired_surrogate_is_not_passed_on(listed: bool) -> None:
    _, text, _ = answer(TASK, Request((b"",), 1, listed), [Refusal(400, "no \ud800")])
    assert "error" in json.loads(text)
    assert b"\\ud800" not in text
    assert refuse(Refusal(400, "no \ud800")) == (400, b'{"error": "no ?"}', "application/json")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_is_never_written_as_one(value: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        answer(TASK, Request((b"",), 1, listed=False), [[Label("ant", 0, value)]])


@pytest.mark.parametrize(
    "parameters", [{"body": "\ud800"}, {"data": "x\udfff\ud800"}, {"body": {"instances": "\ud800"}}, {"\ud800": "x"}]
)
def test_text_with_an_unpaired_surrogate_is_the_requests_own_fault(parameters: dict[str, object]) -> None:
    got = read(parameters)
    assert isinstance(got, RequestError)
    assert got.status == 400


@pytest.mark.parametrize(
    "values", [b"[],", b"1,", b"{},", b'{"a":1},', b"[[[[1]]]],", b"[" * 500_000 + b"]" * 500_000 + b","]
)
def test_json_of_millions_of_values_is_refused_before_it_is_read(values: bytes) -> None:
    body = b'{"instances": [' + values * (6_000_000 // len(values)) + b"1]}"
    with pytest.raises(RequestError, match="more than 1048576 values") as caught:
        parse({"body": body}, TASK, SERVING, says_json=True, request_type="")
    assert caught.value.status == 413


def test_base64_of_nothing_but_blanks_takes_no_more_memory_than_it_has() -> None:
    body = b'{"instances": [{"b64": "' + b"ab " * 1_000_000 + b'"}]}'
    tracemalloc.start()
    try:
        parse({"body": body}, TASK, SERVING, says_json=True, request_type="")
        assert tracemalloc.get_traced_memory()[1] < 4 * len(body)
    finally:
        tracemalloc.stop()
