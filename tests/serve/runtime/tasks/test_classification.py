"""Classes from logits: ranked, with their options, compared with known ones."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serve.runtime.card.execution import Execution
from serve.runtime.card.known_answer import KnownAnswer
from serve.runtime.card.serving import Serving
from serve.runtime.errors import CardError, Refusal, RequestError, UserError
from serve.runtime.images.placement import Placement
from serve.runtime.tasks.classification import Classification, KnownLogits, Label, parse_k
from tests.serve import artifacts
from tests.serve.artifacts import CLASSES

TASK = artifacts.task_of()
WHOLE = Placement.of(32, 32, artifacts.PREPROCESSING)
LOGITS_OF_ONE = [0.0, 2.0, 1.0, -1.0, -2.0]
LOGITS = st.lists(st.floats(-50, 50, allow_nan=False), min_size=1, max_size=20)


@given(st.binary(max_size=12) | st.text(max_size=12) | st.integers() | st.none())
def test_any_k_is_a_number_from_1_or_refused(value: object) -> None:
    try:
        k = parse_k(value)
    except RequestError:
        return
    assert 1 <= k < 10**9


def test_the_number_of_classes_is_that_of_the_request_or_of_the_settings_and_never_more_than_there_are() -> None:
    serving = Serving((Execution("onnxruntime"),), k=3)
    assert TASK.options({"k": b"2", "other": object()}, serving) == 2
    assert TASK.options({}, serving) == 3
    assert TASK.options({"k": 99}) == TASK.options({}) == TASK.options(TASK.complete) == len(CLASSES) == 5


def test_a_card_without_classes_is_refused() -> None:
    with pytest.raises(CardError, match="small: the card's list of classes is empty"):
        artifacts.task_of(classes=())


def test_headers_carry_the_number_there_and_back() -> None:
    headers = TASK.to_headers({"k": 3})
    assert headers == {"x-top-k": "3"}
    assert TASK.from_headers({**headers, "accept": "*/*"}) == {"k": "3"}
    assert TASK.from_headers({}) == {}
    with pytest.raises(UserError, match="classification has no parameter 'form' in a header; it has k"):
        TASK.to_headers({"form": "png"})


@given(
    st.lists(st.tuples(st.lists(st.integers(-3, 3), min_size=5, max_size=5), st.integers(1, 5)), min_size=1, max_size=5)
)
def test_the_best_classes_come_first_and_equal_ones_by_index(rows: list[tuple[list[int], int]]) -> None:
    logits = torch.tensor([row for row, _ in rows], dtype=torch.float32)
    found = TASK.answers((logits,), [k for _, k in rows], [WHOLE] * len(rows))
    for (row, k), labels in zip(rows, found, strict=True):
        assert isinstance(labels, list)
        total = sum(math.exp(value) for value in row)
        expected = sorted(range(5), key=lambda index: (-row[index], index))[:k]
        assert [label.index for label in labels] == expected
        assert [label.label for label in labels] == [CLASSES[index] for index in expected]
        assert [label.probability for label in labels] == pytest.approx([math.exp(row[i]) / total for i in expected])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_no_numbers_are_an_error_of_their_image_alone(value: float) -> None:
    logits = torch.tensor([[1.0, 2, 3, 4, 5], [1, 2, value, 4, 5], [5, 4, 3, 2, 1]])
    found = TASK.answers((logits,), [1, 1, 1], [WHOLE] * 3)
    assert [outcome.status if isinstance(outcome, Refusal) else 200 for outcome in found] == [200, 500, 200]


def test_tensors_have_the_sorted_classes_or_all_of_them() -> None:
    (answer,) = TASK.answers((torch.tensor([LOGITS_OF_ONE]),), [TASK.widened(2, ["probabilities"])], [WHOLE])
    assert TASK.tensor("index", [answer], 2) == ((2,), [1, 2])
    assert TASK.tensor("label", [answer], 2) == ((2,), ["bee", "cat"])
    shape, values = TASK.tensor("probabilities", [answer], 2)
    assert shape == (5,)
    assert values == pytest.approx(torch.tensor(LOGITS_OF_ONE).softmax(0).tolist())
    assert TASK.widened(2, ["label", "index"]) == 2


def test_a_terminal_gets_a_line_for_each_class() -> None:
    answer = json.loads(TASK.json([Label("bee", 1, 0.75), Label("ant", 0, 0.25)]))
    assert TASK.lines(answer) == ["0.7500     1  bee", "0.2500     0  ant"]


# --- known answers


@given(LOGITS, st.data())
def test_the_difference_is_that_of_the_log_probabilities(logits: list[float], data: st.DataObject) -> None:
    shifted = [logit + data.draw(st.floats(-1, 1)) for logit in logits]
    expected = (
        (torch.tensor(logits).double().log_softmax(0) - torch.tensor(shifted).double().log_softmax(0)).abs().max()
    )
    found = KnownLogits(tuple(logits)).difference(torch.tensor(shifted).double().softmax(0).tolist())
    assert found <= 2.0 + 1e-6  # twice the largest shift
    if torch.tensor(logits).double().log_softmax(0).min() > -58:
        assert found == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize("probabilities", [[1.0], [math.nan, 0.5], [2.0, 0.0], [-1.0, 0.5], [0.0, 0.0]])
def test_what_is_no_answer_differs_beyond_any_tolerance(probabilities: list[float]) -> None:
    known = KnownLogits((1.0, 2.0), tolerance=1.0)
    assert known.difference(probabilities) > known.allowed


@pytest.mark.parametrize(
    "change", [{"logits": []}, {"logits": ["1"]}, {"tolerance": 2}, {"more": 1}, {"probabilities": "tanh"}]
)
def test_facts_that_are_wrong_are_refused(change: dict[str, object]) -> None:
    facts = TASK.known((torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]]),), WHOLE)
    assert facts == {"logits": [1.0, 2.0, 3.0, 4.0, 5.0], "tolerance": 0.1, "probabilities": "softmax"}
    TASK.check_known(KnownAnswer(b"x", "classification", "any", facts))
    with pytest.raises(CardError):
        TASK.check_known(KnownAnswer(b"x", "classification", "any", facts | change))


@given(LOGITS, st.data())
def test_an_answer_is_the_known_one_where_each_class_has_about_its_probability(
    logits: list[float], data: st.DataObject
) -> None:
    known = KnownAnswer(b"x", "classification", "openvino", {"logits": logits})
    shifted = torch.tensor(logits).double() + torch.tensor([data.draw(st.floats(-3, 3)) for _ in logits])
    probabilities = shifted.softmax(0).tolist()
    answer = [{"index": index, "probability": value} for index, value in enumerate(probabilities)][::-1]
    if KnownLogits(tuple(logits)).difference(probabilities) <= 0.1 * (max(logits) - min(logits)):
        said = Classification.check_answer(known, answer)
        assert said.startswith("the answer to the known image matches the one of openvino: ")
    else:
        with pytest.raises(
            CardError, match="the answer to its known image differs from the one measured with openvino"
        ):
            Classification.check_answer(known, answer)
    for other in (answer[1:], [*answer, {"index": len(logits), "probability": 0.0}]):
        with pytest.raises(CardError, match="by inf, more than"):
            Classification.check_answer(known, other)
