"""Numbers of an image: in every form, compared with known ones in units of their spread."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serve.runtime.card.known_answer import KnownAnswer
from serve.runtime.errors import CardError, Refusal, RequestError
from serve.runtime.images.placement import Placement
from serve.runtime.tasks.regression import Numbers
from tests.serve import artifacts

SPREAD = [2.0, 3000.0]
TASK = artifacts.task_of(task="regression", classes=("age", "price"), data={"spread": SPREAD})
WHOLE = Placement.of(32, 32, artifacts.PREPROCESSING)


def document(*values: float, spread: bool = False) -> Any:
    (answer,) = TASK.answers((torch.tensor([values]),), [spread], [WHOLE])
    assert isinstance(answer, Numbers)
    return json.loads(TASK.json(answer))


def test_json_has_each_number_with_its_name_and_its_spread_on_request() -> None:
    found = document(41.5, 120_000.0)
    assert found == [{"label": "age", "index": 0, "value": 41.5}, {"label": "price", "index": 1, "value": 120_000.0}]
    assert [entry["spread"] for entry in document(41.5, 120_000.0, spread=True)] == SPREAD
    assert TASK.lines(found) == ["        41.5  age", "      120000  price"]
    assert TASK.described() == {"numbers": ["age", "price"], "spread": SPREAD}


@given(st.binary(max_size=4) | st.text(max_size=4) | st.integers(-1, 2))
def test_a_request_wants_spreads_or_not(value: object) -> None:
    try:
        assert TASK.options({"spread": value}) in (True, False)
    except RequestError:
        return
    assert str(value).strip("b'") in ("0", "1")


def test_defaults_and_headers() -> None:
    assert (TASK.options({}), TASK.options(TASK.complete)) == (False, True)
    assert TASK.to_headers(TASK.complete) == {"x-spread": "1"}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_image_without_numbers_is_refused_alone(value: float) -> None:
    first, second = TASK.answers((torch.tensor([[1.0, 2.0], [value, 2.0]]),), [False] * 2, [WHOLE] * 2)
    assert isinstance(first, Numbers)
    assert isinstance(second, Refusal)


def test_the_tensor_has_a_column_for_each_number() -> None:
    answers = [Numbers((1.0, 2.0)), Numbers((3.0, 4.0))]
    assert TASK.tensor("values", answers, options=False) == ((2,), [1.0, 2.0, 3.0, 4.0])
    assert (TASK.tensors["values"].datatype, TASK.tensors["values"].shape) == ("FP32", (2,))


def test_known_numbers_may_differ_by_a_share_of_their_spread() -> None:
    known = KnownAnswer(b"image", "regression", "onnxruntime", TASK.known((torch.tensor([[40.0, 9e4]]),), WHOLE))
    TASK.check_known(known)
    assert "numbers within 0.1 of the spread" in TASK.check_answer(known, document(40.2, 9e4 + 200))
    with pytest.raises(CardError, match=r"a number is off by 0.5 of the spread of its targets, more than the allowed"):
        TASK.check_answer(known, document(41.0, 9e4))
    with pytest.raises(CardError, match="it has 1 numbers instead of 2"):
        TASK.check_answer(known, document(41.0, 9e4)[:1])


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"values": [1.0], "spread": [1.0], "tolerance": 0.2},
        {"values": [1.0, 2.0], "spread": [1.0], "tolerance": 0.2},
        {"values": [1.0, 2.0], "spread": [1.0, 0.0], "tolerance": 0.2},
        {"values": [1.0, "2"], "spread": [1.0, 1.0], "tolerance": 0.2},
    ],
)
def test_wrong_facts_are_refused(facts: dict[str, Any]) -> None:
    with pytest.raises(CardError):
        TASK.check_known(KnownAnswer(b"image", "regression", "onnxruntime", facts))


def test_answers_under_load_may_differ_by_the_tolerance_of_their_spread() -> None:
    reference = document(40.0, 9e4, spread=True)
    assert TASK.fault(reference, document(40.1, 9e4 + 100), 0.06) == ""
    assert TASK.fault(reference, document(40.1, 9e4 + 300), 0.06) == "price is 90300 instead of 90000"
    assert TASK.fault(reference, [], 0.06) == "it has 0 numbers instead of 2"


def test_a_card_with_a_wrong_spread_or_without_names_is_refused() -> None:
    with pytest.raises(CardError, match="spread has 1 numbers for 2 names"):
        artifacts.task_of(task="regression", classes=("a", "b"), data={"spread": [1.0]})
    with pytest.raises(CardError, match="the card has no names"):
        artifacts.task_of(task="regression", classes=())
