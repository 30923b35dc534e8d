"""The task of numbers for an image: losses in units of the spread, evidence, figures and words."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import d2_absolute_error_score, mean_absolute_error, root_mean_squared_error
from torch import nn

from optimize.context import Context
from optimize.data.formats import scenes
from optimize.data.formats.base import default_data, open_data
from optimize.data.random_draws import Draws
from optimize.data.records import ImageData, Split
from optimize.data.targets import ClassMaps, Vectors
from optimize.errors import PassError
from optimize.models.source import ModelSource
from optimize.quantization.gate import Gate, check_answers
from optimize.tasks.base import GROUPS, find_task, rows_of
from optimize.tasks.regression import REGRESSION, Regression
from optimize.training.baseline import make_baseline
from optimize.training.config import TrainingConfig
from optimize.training.loop import train
from optimize.training.mixup import mixed
from serve.runtime.card.card import Preprocessing
from serve.runtime.errors import UserError
from tests.narrow import encoded
from tests.optimize.workbench import CPU, png

SIDE = 16
GREY = Preprocessing(SIDE, (SIDE, SIDE), mean=(0.5,), std=(0.25,))
#: Numbers in two units.
UNITS = torch.tensor([1.0, 4000.0])


def made(images: int = 40, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Answers and targets that are near each other."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randn(images, 2, generator=generator)
    return (targets + 0.3 * torch.randn(images, 2, generator=generator)) * UNITS, targets * UNITS


def squares(count: int, seed: int) -> Split:
    """Grey pictures whose brightness at the top and at the bottom are the numbers."""
    rng = np.random.default_rng(seed)
    numbers = rng.random((count, 2)).astype(np.float32)
    pictures = 60 + 110 * numbers.repeat(SIDE // 2, axis=1)[:, :, None] + rng.integers(0, 40, (count, SIDE, SIDE))
    return Split([png(picture) for picture in pictures.astype(np.uint8)], Vectors(torch.from_numpy(numbers) * UNITS))


@pytest.fixture(scope="module")
def context() -> Context:
    data = ImageData("squares", "regression", ("top", "bottom"), squares(96, 0), squares(32, 1), "none", (SIDE, SIDE))
    return Context(data, GREY, CPU)


def test_the_loss_is_the_absolute_error_in_units_of_the_spread() -> None:
    task = Regression(np.zeros(2), np.array([2.0, 4000.0]))
    targets = torch.tensor([[1.0, 4000.0]])
    answers = targets + torch.tensor([[4.0, 40.0]])
    # Errors of 2 and 0.01 spreads: the second is in the quadratic part, which ends at a tenth.
    expected = ((2 - 0.05) + 0.5 * 0.01**2 / 0.1) / 2
    assert float(task.loss(answers, targets, "softmax")) == pytest.approx(expected)
    assert float(task.soft_loss(answers, targets, 4.0)) == pytest.approx(expected)
    with pytest.raises(UserError, match=r"label_smoothing is 0.1, and regression has no labels"):
        task.loss(answers, targets, "softmax", 0.1)


def test_mixed_images_have_mixed_numbers() -> None:
    _, targets = made(images=5)
    inputs = torch.randn(5, 3, 8, 8)
    images, numbers = mixed(inputs, REGRESSION.shares(targets, 2), 0.4, Draws(0, 0, torch.arange(5)))
    part = float(((images[0] - inputs[1]) / (inputs[0] - inputs[1])).mean())
    assert torch.allclose(numbers[0], part * targets[0] + (1 - part) * targets[1], rtol=1e-4)


def test_scores_are_those_of_scikit_learn() -> None:
    answers, targets = made()
    found = REGRESSION.evidence((answers,), targets, 2)
    assert REGRESSION.scores(found) == {
        "d2": pytest.approx(d2_absolute_error_score(targets, answers)),
        "mae": pytest.approx(mean_absolute_error(targets, answers)),
        "rmse": pytest.approx(root_mean_squared_error(targets, answers)),
    }
    assert list(REGRESSION.scores(found)) == [metric.key for metric in REGRESSION.metrics]
    assert [metric.share for metric in REGRESSION.metrics] == [True, False, False]
    assert REGRESSION.score(found) == pytest.approx(REGRESSION.by_class(found, 2).scores.mean())
    assert REGRESSION.by_class(found, 2).images.tolist() == [40, 40]
    weights = np.random.default_rng(0).integers(0, 4, 40)
    repeated = REGRESSION.score(rows_of(found, np.repeat(np.arange(40), weights)))
    assert REGRESSION.score(found, weights.astype(np.float64)) == pytest.approx(repeated)
    low, high = REGRESSION.interval(found)
    assert low < REGRESSION.score(found) < high
    ease = REGRESSION.ease(found)
    assert (
        ease.argmin()
        == (
            ((answers - targets) / UNITS).abs()
            / (targets / UNITS).sub((targets / UNITS).median(0).values).abs().mean(0)
        )
        .mean(1)
        .argmax()
    )


def test_a_difference_is_that_of_the_scores_with_groups_if_there_are_some() -> None:
    answers, targets = made(80)
    found, other = (REGRESSION.evidence((each,), targets, 2) for each in (answers, 0.9 * answers))
    whole = REGRESSION.difference(found, other)
    assert whole.delta == pytest.approx(REGRESSION.score(other) - REGRESSION.score(found))
    assert whole.low < whole.delta < whole.high
    each = [one.delta for one in REGRESSION.class_differences(found, other, 2) if one]
    assert np.mean(each) == pytest.approx(whole.delta)
    assert REGRESSION.difference(found | {GROUPS: torch.arange(80) // 10}, other).spread.groups == 8


def test_the_same_numbers_differ_by_at_most_a_tenth_of_the_spread() -> None:
    targets = torch.tensor([[0.0], [1.0], [2.0], [3.0], [4.0]])  # 1.2 from their median
    other = targets + torch.tensor([[0.0], [0.11], [-0.11], [0.13], [1.0]])
    evidence = [REGRESSION.evidence((each,), targets, 1) for each in (targets, other)]
    assert REGRESSION.agreements(*evidence) == {REGRESSION.agreement.key: pytest.approx(3 / 5)}


def test_the_gate_fails_for_a_network_that_answers_a_constant() -> None:
    answers, _ = made(32)
    note = check_answers(answers, answers + 0.01 * UNITS, Gate(), "int8", task=REGRESSION)
    assert "D² of these answers 98.7% on 32 training images" in note
    constant = answers.median(0).values.expand_as(answers)
    with pytest.raises(PassError, match=r"D² of these answers 0.0% on 32 training images; this is broken"):
        check_answers(answers, constant, Gate(min_sqnr=-99.0), "int8", task=REGRESSION)


def test_training_begins_at_the_targets_median_and_learns_numbers_of_any_unit(context: Context) -> None:
    task = context.task
    assert isinstance(task, Regression)
    values = context.data.train.targets.values  # type: ignore[attr-defined]
    spread = (values - values.quantile(0.5, dim=0)).abs().mean(0)
    assert task.facts() == {"spread": pytest.approx(spread.tolist(), rel=1e-4)}
    torch.manual_seed(0)
    head = nn.Linear(4, 2)
    module = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), head)
    pictures = context.example(4)
    with torch.no_grad(), task.fresh(module):
        own = nn.functional.linear(module[:2](pictures), head.weight, head.bias)
        expected = own * spread + values.quantile(0.5, dim=0)
        assert torch.allclose(module(pictures), expected, rtol=1e-4)
    assert torch.allclose(module(pictures), expected, rtol=1e-4)
    head.reset_parameters()
    config = TrainingConfig(epochs=6, batch_size=8, learning_rate=0.05, optimizer="adamw")
    with task.fresh(module):
        result = train(module, context, config)
    assert result.metric == "D²"
    assert result.held_out_score > 0.6  # a constant has 0


def test_a_network_that_ends_in_a_sigmoid_keeps_it(context: Context, tmp_path: Path) -> None:
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1, 2), nn.Sigmoid())
    source = ModelSource("net", "net", "0", None, origin="own", factory=lambda *_: head)
    product = make_baseline(source, context, TrainingConfig(epochs=1, max_steps=2), tmp_path)
    assert product.structure == {}


def test_data_without_numbers_are_refused(context: Context) -> None:
    maps = Split(context.data.val.sources, ClassMaps([np.zeros((2, 2), np.uint8)] * 32, 2))
    data = dataclasses.replace(context.data, train=maps)
    with pytest.raises(UserError, match="squares: regression needs a vector of numbers for each image"):
        _ = dataclasses.replace(context, data=data).task


def test_scenes_have_their_ink_and_its_contrast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenes, "SCENES", (20, 10))
    scenes._scenes.cache_clear()
    data, masks = open_data("scenenumbers"), open_data("scenes")
    scenes._scenes.cache_clear()
    assert (default_data("regression"), data.task, data.classes) == ("scenenumbers", "regression", ("ink", "contrast"))
    assert isinstance(masks.val.targets, ClassMaps)
    for row, (ink, contrast) in enumerate(data.val.targets.values.tolist()):  # type: ignore[attr-defined]
        mask = masks.val.targets.values(row)
        picture = np.asarray(Image.open(io.BytesIO(encoded(data.val.sources[row]))).convert("L")).astype(float)
        assert contrast == pytest.approx(np.mean(picture[mask > 0]) - np.mean(picture[mask == 0]), rel=1e-5)
        assert ink == pytest.approx(100 * np.count_nonzero(mask) / 96**2)


def csv(root: Path, *lines: str) -> str:
    for number in range(6):
        (root / f"{number}.png").write_bytes(png(np.full((4, 4), number, np.uint8)))
    (root / "n.csv").write_text("\n".join(lines) + "\n")
    return f"csvnumbers:{root / 'n.csv'}"


def test_a_csv_has_a_column_for_each_number(tmp_path: Path) -> None:
    parts = ["train", "train", "train", "val", "val", "val"]
    data = open_data(csv(tmp_path, "file;age;set", *(f"{n}.png;{n / 2}e1;{parts[n]}" for n in range(6))))
    assert (data.task, data.classes, data.augment) == ("regression", ("age",), "none")
    assert data.val.targets.values.tolist() == [[15.0], [20.0], [25.0]]  # type: ignore[attr-defined]
    assert (
        data.val.fingerprint
        != open_data(
            csv(tmp_path, "file;age;set", *(f"{n}.png;{n / 2 + n % 3 / 10}e1;{parts[n]}" for n in range(6)))
        ).val.fingerprint
    )


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        (["1", "x", "nan"], r"n.csv:3: column age has 'x'; it must be a number\n.*n.csv:4: column age has 'nan'"),
        (["1", "1", "1"], "column age has the same number for all pictures; remove it"),
        (["1e-4", "2e-4", "4e-4"], r"are 0.0001 from their median, on average; write them in a unit"),
    ],
)
def test_numbers_that_are_none_or_all_equal_are_refused(tmp_path: Path, cells: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        open_data(csv(tmp_path, "image,age", *(f"{n}.png,{cell}" for n, cell in enumerate(cells))))


def test_the_task_is_found_by_its_name() -> None:
    assert find_task("regression") is REGRESSION
    assert REGRESSION.chance(2) == 0.0
