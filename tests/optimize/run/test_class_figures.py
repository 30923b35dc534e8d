"""Which artifacts a run compares class by class, and what it says of each class."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from optimize.measure.rows import Report, Row
from optimize.run.class_figures import class_figures, compared_pairs
from optimize.tasks.classification import CLASSIFICATION, Classification
from tests.optimize.synthetic import body, synthetic


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ("qat@torchscript", ("qat@torchscript",)),
        # ptq has the lowest p50 of those with integers.
        ("onnx@openvino", ("ptq@torchscript", "onnx@openvino")),
        ("baseline@torchscript", ("ptq@torchscript",)),
        (None, ("ptq@torchscript",)),
    ],
)
def test_integers_are_compared_and_what_is_recommended(chosen: str | None, expected: tuple[str, ...]) -> None:
    assert compared_pairs(synthetic().rows, chosen) == expected


def test_without_integers_the_recommended_artifact_is_compared() -> None:
    floats = [row for row in synthetic().rows if row.file and row.file.is_float]
    assert compared_pairs(floats, "onnx@openvino") == ("onnx@openvino",)
    assert compared_pairs(floats[:1], "baseline@torchscript") == ()


def rows() -> tuple[Row, ...]:
    kept = [row for row in body()["rows"] if row["name"] in ("baseline", "fuse", "ptq")]
    return Report.from_json(body() | {"rows": kept}).rows


def answers(right: list[bool], labels: list[int]) -> dict[str, torch.Tensor]:
    first = torch.tensor(right)
    return {"first": first, "five": first, "predicted": torch.tensor(labels), "target": torch.tensor(labels)}


def test_a_class_has_its_score_for_each_artifact_and_differences_for_the_compared_one() -> None:
    labels = [0] * 40 + [1] * 40
    base = answers([True] * 80, labels)
    worse = answers([True] * 40 + [False] * 20 + [True] * 20, labels)
    evidence = {"baseline@torchscript": base, "fuse@torchscript": base, "ptq@torchscript": worse}
    cat, dog, none = class_figures(rows(), "fuse@torchscript", evidence, CLASSIFICATION, ["cat", "dog", "none"])
    assert (cat.name, cat.count, cat.images, none.count, none.scores, none.differences) == ("cat", 40, 40, 0, {}, {})
    assert dog.scores == {"baseline@torchscript": 1.0, "fuse@torchscript": 1.0, "ptq@torchscript": 0.5}
    assert list(dog.differences) == ["ptq@torchscript", "fuse@torchscript"]
    assert dog.differences["ptq@torchscript"].delta == -0.5
    assert [each.differences["ptq@torchscript"].worse for each in (cat, dog)] == [False, True]


def test_a_loss_by_chance_in_one_of_many_classes_is_not_called_one() -> None:
    """Four of 30 images change to wrong: alone that is below 0 with 95 % confidence, but not as one of 100 classes."""
    labels = np.repeat(np.arange(100), 30).tolist()
    worse = [label != 7 or image % 30 >= 5 for image, label in enumerate(labels)]
    evidence = {"baseline@torchscript": answers([True] * 3000, labels), "ptq@torchscript": answers(worse, labels)}
    few = [row for row in rows() if row.name != "fuse"]
    found = class_figures(few, None, evidence, CLASSIFICATION, [str(place) for place in range(100)])[7]
    difference = found.differences["ptq@torchscript"]
    assert difference.high < 0
    assert not difference.worse


def test_a_task_without_scores_of_classes_has_no_figures() -> None:
    class Plain(Classification):
        def by_class(self, evidence: object, classes: int) -> None:  # type: ignore[override]
            return None

    base = answers([True], [0])
    evidence = dict.fromkeys(("baseline@torchscript", "fuse@torchscript", "ptq@torchscript"), base)
    assert class_figures(rows(), None, evidence, Plain(), ["cat"]) == ()
