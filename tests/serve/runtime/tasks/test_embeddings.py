"""Vectors of length one: in every form, compared with known ones by their direction."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serve.runtime.card.known_answer import KnownAnswer
from serve.runtime.errors import CardError, Refusal
from serve.runtime.images.placement import Placement
from serve.runtime.tasks.embeddings import Embedded
from tests.serve import artifacts

TASK = artifacts.task_of(task="embeddings")
WHOLE = Placement.of(32, 32, artifacts.PREPROCESSING)


def answered(*values: float) -> Any:
    (answer,) = TASK.answers((torch.tensor([values]),), [None], [WHOLE])
    return answer


def document(*values: float) -> Any:
    return json.loads(TASK.json(answered(*values)))


@given(st.lists(st.floats(-(2.0**120), 2.0**120, width=32), min_size=2, max_size=9))
def test_an_answer_has_the_direction_of_the_output_and_length_one(values: list[float]) -> None:
    answer = answered(*values)
    if isinstance(answer, Refusal):
        assert not any(values)
        return
    assert math.hypot(*answer.vector) == pytest.approx(1, abs=1e-5)
    whole = np.array(values) / max(map(abs, values))
    np.testing.assert_allclose(answer.vector, whole / np.linalg.norm(whole), atol=1e-5)


def test_an_output_without_numbers_or_direction_is_refused_alone() -> None:
    outputs = torch.tensor([[3.0, 4.0], [math.nan, 1.0], [0.0, 0.0]])
    first, *others = TASK.answers((outputs,), [None] * 3, [WHOLE] * 3)
    assert first == Embedded((0.6, 0.8))
    assert [other.status for other in others] == [500, 500]


def test_json_lines_and_the_tensor_have_the_vector() -> None:
    assert document(3, -4) == {"embedding": [0.6, -0.8]}
    assert TASK.lines(document(3, -4)) == ["2 numbers: 0.6000 -0.8000"]
    assert TASK.lines(document(*[1.0] * 16)) == [f"16 numbers: {' '.join(['0.2500'] * 8)} …"]
    assert TASK.tensor("embedding", [answered(3, 4), answered(4, 3)], None) == ((2,), [0.6, 0.8, 0.8, 0.6])
    assert TASK.described() == {"length": 1, "compare": "cosine"}


def test_a_known_vector_is_compared_by_its_cosine() -> None:
    known = KnownAnswer(b"image", "embeddings", "onnxruntime", TASK.known((torch.tensor([[3.0, 4.0]]),), WHOLE))
    TASK.check_known(known)
    assert "its cosine with the known vector is 0.9999" in TASK.check_answer(known, document(3.1, 4))
    with pytest.raises(CardError, match=r"its cosine with the known vector is 0.6000, less than the allowed 0.9500"):
        TASK.check_answer(known, document(1, 0))
    with pytest.raises(CardError, match=r"cosine with the known vector is -1.0000"):
        TASK.check_answer(known, document(3, 4, 0))


@pytest.mark.parametrize("facts", [{}, {"embedding": []}, {"embedding": [0.6, "0.8"]}, {"embedding": [0.6, 0.6]}])
def test_wrong_facts_are_refused(facts: dict[str, Any]) -> None:
    with pytest.raises(CardError, match="known: "):
        TASK.check_known(KnownAnswer(b"image", "embeddings", "onnxruntime", facts))


def test_answers_under_load_may_turn_by_the_tolerance() -> None:
    assert TASK.fault(document(3, 4), document(3.1, 4), 0.01) == ""
    assert TASK.fault(document(3, 4), document(4, 3), 0.01) == "its cosine with the reference is 0.9600"
