"""Labels from logits: those that reach a threshold, in every form, compared with known ones."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serve.runtime.card.known_answer import KnownAnswer
from serve.runtime.errors import CardError, Refusal, RequestError
from serve.runtime.images.placement import Placement
from serve.runtime.tasks.multilabel import Labelled, MultiLabel, parse_threshold
from tests.serve import artifacts

TASK = artifacts.task_of(task="multilabel", probabilities="sigmoid")
WHOLE = Placement.of(32, 32, artifacts.PREPROCESSING)
LOGITS = [-3.0, 2.0, 0.0, 5.0, -0.5]
PROBABILITIES = [1 / (1 + math.exp(-logit)) for logit in LOGITS]


def answered(logits: list[float], threshold: float = 0.5) -> Labelled:
    (answer,) = TASK.answers((torch.tensor([logits]),), [threshold], [WHOLE])
    assert isinstance(answer, Labelled)
    return answer


def document(logits: list[float], threshold: float = 0.5) -> Any:
    return json.loads(TASK.json(answered(logits, threshold)))


@given(st.binary(max_size=12) | st.text(max_size=12) | st.floats() | st.none())
def test_any_threshold_is_a_number_from_0_to_1_or_refused(value: object) -> None:
    try:
        threshold = parse_threshold(value)
    except RequestError:
        return
    assert 0 <= threshold <= 1


def test_the_threshold_is_that_of_the_request_or_a_half() -> None:
    assert (TASK.options({}), TASK.options({"threshold": b"0.25"}), TASK.options(TASK.complete)) == (0.5, 0.25, 0.0)
    assert TASK.to_headers({"threshold": 0.2}) == {"x-threshold": "0.2"}
    assert TASK.from_headers({"x-threshold": "0.2", "x-top-k": "3"}) == {"threshold": "0.2"}


def test_json_has_the_classes_that_reach_it_best_first() -> None:
    found = document(LOGITS)
    assert found["threshold"] == 0.5
    assert [(entry["label"], entry["index"]) for entry in found["classes"]] == [("dog", 3), ("bee", 1), ("cat", 2)]
    shown = [entry["probability"] for entry in found["classes"]]
    assert shown == pytest.approx([PROBABILITIES[place] for place in (3, 1, 2)])
    assert TASK.lines(found) == ["0.9933     3  dog", "0.8808     1  bee", "0.5000     2  cat"]
    assert TASK.lines(document([-9.0] * 5)) == ["no class has a probability of 0.5"]
    assert len(document(LOGITS, 0.0)["classes"]) == 5


def test_an_image_without_numbers_is_refused_alone() -> None:
    logits = torch.tensor([LOGITS, [math.nan, *LOGITS[1:]]])
    first, second = TASK.answers((logits,), [0.5, 0.5], [WHOLE] * 2)
    assert isinstance(first, Labelled)
    assert isinstance(second, Refusal)


def test_tensors_have_a_column_for_each_class() -> None:
    least = TASK.widened(0.6, ["probabilities"])
    answers = [answered(LOGITS, least), answered([*LOGITS[1:], 1.0], least)]
    shape, values = TASK.tensor("probabilities", answers, 0.6)
    assert (shape, len(values)) == ((5,), 10)
    assert values[:5] == pytest.approx(PROBABILITIES)
    assert TASK.tensor("present", answers, 0.6) == ((5,), [0, 1, 0, 1, 0, 1, 0, 1, 0, 1])
    assert {name: (kind.datatype, kind.shape) for name, kind in TASK.tensors.items()} == {
        "probabilities": ("FP32", (5,)),
        "present": ("UINT8", (5,)),
    }


def test_a_known_answer_is_compared_by_its_log_probabilities() -> None:
    facts = TASK.known((torch.tensor([LOGITS]),), WHOLE)
    known = KnownAnswer(b"image", "multilabel", "onnxruntime", facts)
    TASK.check_known(known)
    assert "matches" in TASK.check_answer(known, document(LOGITS, 0.0))
    with pytest.raises(CardError, match="a log-probability is off by"):
        TASK.check_answer(known, document([*LOGITS[1:], 3.0], 0.0))
    with pytest.raises(CardError, match="a log-probability is off by inf"):
        TASK.check_answer(known, document(LOGITS, 0.5))


def test_a_single_label_may_differ_as_much_as_one_of_several() -> None:
    task = artifacts.task_of(task="multilabel", probabilities="sigmoid", classes=("defect",))
    known = KnownAnswer(b"image", "multilabel", "onnxruntime", task.known((torch.tensor([[0.3]]),), WHOLE))
    for logit, fits in ((0.35, True), (3.0, False)):
        answer = json.loads(task.json(task.answers((torch.tensor([[logit]]),), [0.0], [WHOLE])[0]))
        assert (task.compared(known.facts, answer)[0] == "") is fits


def test_answers_under_load_may_differ_by_the_tolerance_and_lack_no_class() -> None:
    reference = document(LOGITS, 0.0)
    assert TASK.fault(reference, document(LOGITS), 0.01) == ""
    nearly = document([-3.0, 2.0, -0.01, 5.0, -0.5])
    assert len(nearly["classes"]) == 2
    assert TASK.fault(reference, nearly, 0.01) == ""
    assert TASK.fault(reference, document([-3.0, 1.0, 0.0, 5.0, -0.5]), 0.01).startswith("class 1 has 0.7311")
    assert TASK.fault(reference, {"threshold": 0.5, "classes": []}, 0.01) == "class 3 is missing, and has 0.9933"
    twice = {"threshold": 0.5, "classes": [reference["classes"][0]] * 2}
    assert TASK.fault(reference, twice, 0.01) == "a class is listed twice"


def test_a_card_without_probabilities_of_its_own_for_each_class_is_refused() -> None:
    with pytest.raises(CardError, match="multilabel needs probabilities of a sigmoid, not of a softmax"):
        artifacts.task_of(task="multilabel")
    assert isinstance(TASK, MultiLabel)
    assert TASK.described() == {"classes": list(artifacts.CLASSES), "threshold": 0.5}
