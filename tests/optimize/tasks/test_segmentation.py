"""The task of semantic segmentation: losses, evidence and figures of class maps against plain definitions of them."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
import torch
from PIL import Image
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
    assert SEGMENTATION.score(found) == pytest.approx(np.nanmean(SEGMENTATION.by_class(found, CLASSES).scores))
    assert np.allclose(SEGMENTATION.ease(found), [each.trace() / each.sum() for each in expected])


def answered(seed: int, classes: int = CLASSES) -> dict[str, torch.Tensor]:
    """Evidence of 20 images of which about two pixels in three are right. None has class ``classes``."""
    _, targets = made(20, seed=7)
    logits, _ = made(20, seed=seed)
    right = torch.rand(targets.shape, generator=torch.Generator().manual_seed(seed)) < 0.6
    best = torch.where(right & (targets < CLASSES), targets, logits.argmax(1).to(torch.uint8))
    targets[3:, 5:][targets[3:, 5:] == 2] = 255  # class 2 is in few images
    return SEGMENTATION.evidence((best,), targets, classes)


def test_each_class_has_the_score_of_its_own_pixels_and_its_difference_an_interval() -> None:
    before, now = answered(1, 4), answered(2, 4)
    found = SEGMENTATION.by_class(before, 4)
    pixels = before["confusion"].numpy().astype(np.int64)
    differences = SEGMENTATION.class_differences(before, now, 4)
    assert (differences[3], found.counts[3], found.images[3]) == (None, 0, 0)
    assert np.isnan(found.scores[3])
    for place in range(3):
        own, given = pixels[:, place].sum(1), pixels[:, :, place].sum(1)
        assert found.counts[place] == own.sum()
        assert found.images[place] == (own > 0).sum()
        expected = pixels[:, place, place].sum() / (own.sum() + given.sum() - pixels[:, place, place].sum())
        assert found.scores[place] == pytest.approx(expected)
        # By leaving out each image in turn.
        less = [iou_of(now, place, image) - iou_of(before, place, image) for image in range(20)]
        error = math.sqrt(19 / 20 * np.sum((np.array(less) - np.mean(less)) ** 2))
        difference = differences[place]
        assert difference is not None
        assert difference.delta == pytest.approx(iou_of(now, place) - iou_of(before, place))
        assert difference.low < difference.delta - 1.9 * error
        assert difference.high > difference.delta + 1.9 * error
    grouped = [each | {GROUPS: torch.arange(20) // 5} for each in (before, now)]
    wide = SEGMENTATION.class_differences(grouped[0], grouped[1], 4)[0]
    assert wide is not None
    assert differences[0] is not None
    assert wide.high - wide.low > differences[0].high - differences[0].low


def iou_of(evidence: dict[str, torch.Tensor], place: int, left_out: int = -1) -> float:
    rows = [row for row in range(20) if row != left_out]
    return float(SEGMENTATION.by_class(rows_of(evidence, np.array(rows)), 4).scores[place])


def test_a_class_that_few_images_show_has_the_interval_of_few_images() -> None:
    """Both networks answer alike: what so many images cannot exclude is all that the interval has."""
    targets = torch.zeros(100, 4, 4, dtype=torch.uint8)
    targets[:2, 0] = 1
    found = SEGMENTATION.evidence((targets,), targets, 2)
    many, few = SEGMENTATION.class_differences(found, found, 2)
    assert many is not None
    assert few is not None
    z = 1.959964
    assert many.high == pytest.approx(z**2 / (100 + z**2))
    assert few.high == pytest.approx(z**2 / (2 + z**2))


def test_an_example_shows_image_target_maps_and_where_they_differ() -> None:
    target = np.array([[0, 0, 1, 1], [0, 1, 255, 255]], np.uint8)
    before = np.array([[0, 1, 1, 0], [0, 1, 1, 0]], np.uint8)
    now = np.array([[0, 0, 0, 2], [0, 1, 0, 0]], np.uint8)
    maps = {"float": torch.from_numpy(before)[None], "int8": torch.from_numpy(now)[None]}
    answers = {name: {"predicted": each} for name, each in maps.items()}
    found = SEGMENTATION.example(np.full((3, 2, 4), 90, np.uint8), target, answers, ["ground", "cat", "dog"])
    assert [panel.title for panel in found.panels] == ["image", "target", "float", "int8", "difference"]
    image, *drawn = (Image.open(io.BytesIO(panel.image)) for panel in found.panels)
    assert (image.size, image.getpixel((0, 0))) == ((4, 2), (90, 90, 90))
    for panel, each in zip(drawn, (target, before, now), strict=False):
        assert np.array_equal(np.asarray(panel), each)
    # (0, 1) is right now, (0, 2) was right, (0, 3) is wrong in another way, and (1, 2) does not count.
    colours = np.asarray(drawn[3].convert("RGBA"))
    assert (colours[..., 3] > 0).tolist() == [[False, True, True, True], [False] * 4]
    red, blue = colours[0, 2, 0] > colours[0, 2, 2], colours[0, 1, 2] > colours[0, 1, 0]
    assert (red, blue, colours[0, 3, :3].std() < 8) == (True, True, True)
    assert found.panels[2].said == "ground 50.0%, cat 50.0%"
    assert found.panels[4].said == "as before 62.5%, wrong in another way 12.5%, right now 12.5%, right before 12.5%"
    sizes = {label: size for label, (_, size) in found.legend.items()}
    assert sizes == {"ground": 3 + 4 + 6, "cat": 3 + 4 + 1, "dog": 1, "does not count": 2}
    assert {label: colour for label, (colour, _) in found.legend.items()}["cat"] == "#800000"  # PASCAL VOC's


def test_maps_of_more_classes_than_colours_are_drawn() -> None:
    target = np.array([[0, 299], [32767, 254]], np.int16)
    answers = {name: {"predicted": torch.from_numpy(target)[None]} for name in ("float", "int8")}
    found = SEGMENTATION.example(np.zeros((1, 2, 2), np.uint8), target, answers, [f"c{place}" for place in range(300)])
    assert set(found.legend) == {"c0", "c299", "c254", "does not count"}
    assert found.panels[4].said == "as before 100.0%"


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
