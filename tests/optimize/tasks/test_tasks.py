"""The tasks of the registry, and one that is added from outside."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from optimize.measure.figures import Accuracy
from optimize.tasks import base
from optimize.tasks.base import GROUPS, Metric, find_task, joined_evidence, rows_of
from optimize.tasks.classification import CLASSIFICATION, Classification
from serve.runtime.errors import UserError


def evidence(count: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 7, (count,), generator=generator)
    return CLASSIFICATION.evidence((torch.randn(count, 7, generator=generator),), labels, 7)


def test_a_task_is_found_by_its_name_and_another_is_refused_in_one_line() -> None:
    assert find_task("classification") is CLASSIFICATION
    with pytest.raises(UserError, match=r"unknown task 'clasification'.*did you mean"):
        find_task("clasification")


def test_a_weight_counts_an_image_so_often() -> None:
    found = evidence(40, 0)
    weights = np.random.default_rng(0).integers(0, 4, 40)
    rows = np.repeat(np.arange(40), weights)
    repeated = float(np.mean(found["first"].numpy()[rows]))
    assert CLASSIFICATION.score(found, weights.astype(np.float64)) == pytest.approx(repeated)
    assert CLASSIFICATION.score(rows_of(found, rows)) == pytest.approx(repeated)


def test_each_class_has_the_accuracy_of_its_own_images() -> None:
    before, now = evidence(90, 0), evidence(90, 0) | {"first": evidence(90, 3)["first"]}
    found = CLASSIFICATION.by_class(before, 9)
    differences = CLASSIFICATION.class_differences(before, now, 9)
    labels = before["target"].numpy()
    assert found is not None
    for place in range(9):
        first, second = (each["first"].numpy()[labels == place].tolist() for each in (before, now))
        assert found.counts[place] == found.images[place] == len(first)
        difference = differences[place]
        if not first:
            assert (place > 6, np.isnan(found.scores[place]), difference) == (True, True, None)
            continue
        assert found.scores[place] == pytest.approx(sum(first) / len(first))
        assert difference is not None
        assert difference.delta == pytest.approx((sum(second) - sum(first)) / len(first))
        assert difference.low < difference.delta < difference.high


def test_frames_of_a_video_say_no_more_than_its_groups() -> None:
    """Each image five times: as single images they would have an interval of half the width."""
    found, other = (rows_of(evidence(60, seed), np.repeat(np.arange(60), 5)) for seed in (0, 2))
    grouped = [each | {GROUPS: torch.arange(60).repeat_interleave(5)} for each in (found, other)]
    frames, groups = CLASSIFICATION.difference(found, other), CLASSIFICATION.difference(*grouped)
    assert groups.delta == pytest.approx(frames.delta)
    assert (groups.gained, groups.lost, groups.n) == (frames.gained, frames.lost, frames.n)
    assert groups.high - groups.low > 2 * (frames.high - frames.low)
    (low, high), (least, most) = CLASSIFICATION.interval(found), CLASSIFICATION.interval(grouped[0])
    assert most - least > 2 * (high - low)


def test_evidence_of_parts_is_that_of_the_whole() -> None:
    whole = evidence(30, 1)
    parts = [rows_of(whole, np.arange(start, min(start + 8, 30))) for start in range(0, 30, 8)]
    joined = joined_evidence(parts)
    assert joined.keys() == whole.keys()
    assert all(torch.equal(joined[name], whole[name]) for name in whole)


def test_a_report_keeps_the_order_of_a_tasks_scores() -> None:
    made = Accuracy(scores={"zeta": 0.25, "alpha": 0.5}, interval=(0.0, 1.0), images=4, answers="a")
    body = made.to_json()
    assert list(body) == ["zeta", "alpha", "interval", "images", "left_out", "answers", "difference"]
    read = Accuracy.from_json(body)
    assert read == made
    assert read.score == 0.25


@pytest.mark.parametrize(
    "body",
    [
        {"interval": [0, 1], "images": 4, "answers": "a"},
        {"top1": "much", "interval": [0, 1], "images": 4, "answers": "a"},
    ],
)
def test_a_report_without_scores_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="scores"):
        Accuracy.from_json(body)


def test_a_task_from_outside_is_registered_by_its_name() -> None:
    class Other(Classification):
        name = "other-for-this-test"
        metrics = (Metric("right", "right"),)

    task = base.register(Other())
    try:
        assert find_task("other-for-this-test") is task
        assert task.metric.title == "right"
        with pytest.raises(ValueError, match="registered already"):
            base.register(type("Twin", (Classification,), {"name": "other-for-this-test"})())
    finally:
        base._REGISTRY._entries.pop("other-for-this-test")
        base._REGISTRY._homes.pop("other-for-this-test")
