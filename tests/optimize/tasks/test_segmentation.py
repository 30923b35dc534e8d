"""The task of semantic segmentation: losses, evidence and figures of class maps against plain definitions of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn import functional

from optimize.data.random_draws import Draws
from optimize.errors import PassError
from optimize.quantization.gate import Gate, check_answers
from optimize.tasks.base import GROUPS, find_task, rows_of
from optimize.tasks.segmentation import SEGMENTATION
from optimize.training.mixup import mixed

CLASSES = 3
_PARTS = [0], [1, 2, 3, 4, 5]


def made(
    images: int = 6, seed: int = 0, dtype: torch.dtype = torch.uint8, classes: int = CLASSES
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and targets, with pixels that do not count in each image."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, classes, (images, 8, 10), generator=generator).to(dtype)
    targets[:, :2, :3] = torch.iinfo(dtype).max
    return 2 * torch.randn(images, classes, 8, 10, generator=generator), targets


def by_pixel(logits: torch.Tensor, targets: torch.Tensor, smoothing: float = 0.0) -> float:
    """The loss by a loop over images, of the pixels that count."""
    means = []
    for image, target in zip(logits, targets, strict=True):
        counts = target < CLASSES
        each = functional.log_softmax(image.permute(1, 2, 0)[counts], 1)
        right = functional.one_hot(target[counts].long(), CLASSES) * (1 - smoothing) + smoothing / CLASSES
        means.append(-(right * each).sum(1).mean())
    return float(torch.stack(means).mean())


def test_the_loss_is_the_mean_of_each_images_pixels_that_count() -> None:
    logits, targets = made()
    targets[0, :5] = 255  # an image with fewer pixels weighs as much
    for smoothing in (0.0, 0.1):
        found = SEGMENTATION.loss(logits, targets, "softmax", smoothing)
        assert float(found) == pytest.approx(by_pixel(logits, targets, smoothing), rel=1e-5)
        first, rest = (SEGMENTATION.loss(logits[part], targets[part], "softmax", smoothing) for part in _PARTS)
        assert float(found) == pytest.approx(float(first) / 6 + 5 * float(rest) / 6, rel=1e-5)
    wide, of_wide = made(dtype=torch.int16)
    assert float(SEGMENTATION.loss(wide, of_wide, "softmax")) == pytest.approx(by_pixel(wide, of_wide), rel=1e-5)
    nothing = torch.full_like(targets, 255)
    assert float(SEGMENTATION.loss(logits, nothing, "softmax")) == 0.0


@pytest.mark.parametrize("probabilities", ["softmax", "sigmoid"])
def test_shares_have_the_loss_of_their_targets_and_pixels_that_do_not_count_have_no_gradient(
    probabilities: str,
) -> None:
    logits, targets = made()
    logits.requires_grad_()
    shares = SEGMENTATION.shares(targets, CLASSES)
    assert torch.equal(shares.sum(1), (targets < CLASSES).float())
    losses = [SEGMENTATION.loss(logits, each, probabilities, 0.1) for each in (targets, shares)]  # type: ignore[arg-type]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
    for loss in losses:
        (gradient,) = torch.autograd.grad(loss, logits)
        assert not gradient[:, :, :2, :3].any()
        assert gradient[:, :, 2:].abs().min() > 0


def test_mixed_maps_have_the_shares_of_both_images() -> None:
    logits, targets = made(images=5)
    inputs = torch.randn(5, 3, 8, 10)
    images, shares = mixed(inputs, SEGMENTATION.shares(targets, CLASSES), 0.4, Draws(0, 0, torch.arange(5)))
    part = float(((images[0] - inputs[1]) / (inputs[0] - inputs[1])).mean())
    whole = SEGMENTATION.shares(targets, CLASSES)
    assert torch.allclose(shares[0], part * whole[0] + (1 - part) * whole[1], atol=1e-5)
    assert torch.equal(shares[4], whole[4])
    assert SEGMENTATION.loss(logits, shares, "softmax").isfinite()


def test_a_student_that_answers_as_its_teacher_has_no_soft_loss() -> None:
    logits, _ = made()
    other, _ = made(seed=1)
    assert float(SEGMENTATION.soft_loss(logits, logits + 7, 2.0)) == pytest.approx(0, abs=1e-5)
    flat = [each.permute(0, 2, 3, 1).reshape(-1, CLASSES) for each in (logits, other)]
    expected = find_task("classification").soft_loss(flat[0], flat[1], 2.0)
    assert float(SEGMENTATION.soft_loss(logits, other, 2.0)) == pytest.approx(float(expected), rel=1e-5)


def test_evidence_counts_each_pixel_that_counts_and_keeps_classes_and_not_logits() -> None:
    logits, targets = made()
    found = SEGMENTATION.evidence((logits,), targets, CLASSES)
    expected = np.zeros((6, CLASSES, CLASSES), np.int64)
    best = logits.argmax(1)
    for image in range(6):
        for row in range(8):
            for column in range(10):
                if targets[image, row, column] < CLASSES:
                    expected[image, targets[image, row, column], best[image, row, column]] += 1
    assert np.array_equal(found["confusion"], expected)
    assert (found["confusion"].dtype, found["predicted"].dtype) == (torch.int32, torch.uint8)
    assert torch.equal(found["predicted"].long(), best)
    by_classes = SEGMENTATION.evidence((best.to(torch.uint8),), targets, CLASSES)
    assert all(torch.equal(by_classes[name], found[name]) for name in found)
    right = expected.sum(0).trace() / expected.sum()
    assert SEGMENTATION.scores(found)["pixel_accuracy"] == pytest.approx(right)
    assert list(SEGMENTATION.scores(found)) == [metric.key for metric in SEGMENTATION.metrics]
    assert SEGMENTATION.score(found) == pytest.approx(np.nanmean(SEGMENTATION.by_class(found)))
    assert np.allclose(SEGMENTATION.ease(found), [each.trace() / each.sum() for each in expected])


def test_more_classes_than_a_byte_holds_keep_their_numbers() -> None:
    logits, targets = made(images=1, dtype=torch.int16, classes=300)
    found = SEGMENTATION.evidence((logits,), targets, 300)
    assert torch.equal(found["predicted"].long(), logits.argmax(1))
    assert int(found["confusion"].sum()) == 80 - 6


def test_a_weight_counts_an_image_so_often_and_groups_widen_the_interval() -> None:
    logits, targets = made(images=40)
    targets = torch.where(torch.rand(40, 8, 10) < 0.6, logits.argmax(1).to(torch.uint8), targets)
    found = SEGMENTATION.evidence((logits,), targets, CLASSES)
    weights = np.random.default_rng(0).integers(0, 4, 40)
    rows = np.repeat(np.arange(40), weights)
    assert SEGMENTATION.score(found, weights.astype(np.float64)) == pytest.approx(
        SEGMENTATION.score(rows_of(found, rows))
    )
    low, high = SEGMENTATION.interval(found)
    assert low < SEGMENTATION.score(found) < high
    grouped = found | {GROUPS: torch.arange(40) // 8}
    wide = SEGMENTATION.interval(grouped)
    assert wide[0] < low < high < wide[1]
    alike = SEGMENTATION.difference(grouped, grouped)
    assert (alike.delta, alike.spread.groups, alike.n) == (0.0, 5, 40)
    assert alike.low < SEGMENTATION.difference(found, found).low < 0


def test_agreement_is_of_pixels_of_all_images_and_of_the_worst() -> None:
    logits, targets = made()
    other = logits.clone()
    other[2, :, :4] = other[2, :, :4].roll(1, 0)  # every class of half of an image
    evidence = [SEGMENTATION.evidence((each,), targets, CLASSES) for each in (logits, other)]
    found = SEGMENTATION.agreements(*evidence)
    assert found == {"pixel_agreement": pytest.approx(1 - 0.5 / 6), "worst_image_agreement": pytest.approx(0.5)}
    assert next(iter(found)) == SEGMENTATION.agreement.key


def shapes(images: int = 8) -> torch.Tensor:
    """Logits of a network that sees a square of class 1 or 2 on each image, and class 0 around it."""
    targets = torch.zeros(images, 16, 16, dtype=torch.int64)
    targets[::2, 4:8, 4:8], targets[1::2, 4:8, 4:8] = 1, 2
    return 10 * functional.one_hot(targets, CLASSES).permute(0, 3, 1, 2).float()


def test_the_gate_fails_for_a_network_that_answers_background_only_or_fails_on_one_image() -> None:
    expected = shapes()
    noise = 0.5 * torch.randn(expected.shape, generator=torch.Generator().manual_seed(0))
    note = check_answers(expected, expected + noise, Gate(), "int8", task=SEGMENTATION)
    assert "same class on 100.0% of the pixels of 8 training images, on 100.0% in the worst of them" in note
    background = expected.clone()
    background[:, 0] = 11.0  # 94 % of the pixels are right
    with pytest.raises(PassError, match=r"same class on 93.8% .*mIoU of these answers 31.2%.* min_agreement 0.5"):
        check_answers(expected, background, Gate(min_agreement=0.5), "int8", task=SEGMENTATION)
    one = expected.clone()
    one[3] = one[3].roll(1, 0)
    with pytest.raises(PassError, match=r"same class on 87.5% .* on 0.0% in the worst"):
        check_answers(expected, one, Gate(), "int8", task=SEGMENTATION)


def test_logits_of_another_size_are_refused_with_the_right_one() -> None:
    inputs = torch.zeros(4, 3, 8, 10)
    assert SEGMENTATION.fault_of(torch.zeros(4, CLASSES, 8, 10), inputs, CLASSES) is None
    for shape in ((4, CLASSES), (4, CLASSES, 4, 5), (4, 5, 8, 10), (4, 8, 10)):
        fault = SEGMENTATION.fault_of(torch.zeros(shape), inputs, CLASSES)
        assert fault == "it must give logits of shape (4, 3, 8, 10): one for each class and pixel of its input"


def test_classes_that_are_never_answered_are_named() -> None:
    logits, targets = made()
    assert SEGMENTATION.remarks(SEGMENTATION.evidence((logits,), targets, CLASSES), targets, ["a", "b", "c"]) == []
    logits[:, 1] = -math.inf
    found = SEGMENTATION.evidence((logits,), targets, CLASSES)
    (said,) = SEGMENTATION.remarks(found, targets, ["a", "b", "c"])
    assert said.endswith("1 of their 3 classes: b")


def test_outputs_in_another_order_than_the_classes_are_noticed_with_the_right_one() -> None:
    expected = shapes()
    targets = expected.argmax(1).to(torch.uint8)
    targets[:, 8:12] = 1  # so that no class has most pixels
    targets[:, 12:] = 2
    logits = 10 * functional.one_hot(targets.long(), CLASSES).permute(0, 3, 1, 2).float()
    names = ["ground", "bright", "dark"]
    none = SEGMENTATION.evidence((logits,), torch.full_like(targets, 255), CLASSES)
    assert SEGMENTATION.remarks(none, targets, names) == []
