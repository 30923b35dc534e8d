"""Learning from a teacher: what it adds to a step's loss, whose answers those are, and what it does not fit."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from optimize.context import Context
from optimize.data.random_draws import Draws
from optimize.data.records import Split
from optimize.data.targets import Labels
from optimize.listener import Silent
from optimize.models.teacher import Teacher
from optimize.passes.qat import QAT, Qat
from optimize.store.objects import Store
from optimize.tasks.classification import CLASSIFICATION
from optimize.training.config import TrainingConfig
from optimize.training.distil import Distil
from optimize.training.features import Student, match, relative_error
from optimize.training.loop import train
from optimize.training.mixup import mixed
from optimize.training.objective import Distillation, Piece
from optimize.training.precision import Precision
from optimize.training.results import Manner
from serve.runtime.errors import UserError
from tests.optimize.tiny_net import Tiny
from tests.optimize.training.test_training_loop import FAST, brightness
from tests.optimize.training.test_training_settings import difference, plain
from tests.optimize.workbench import CPU, GREY16, parent_of, with_running_statistics

MEANS = torch.tensor([(30.0 + 60 * kind) / 255 * 4 - 2 for kind in range(4)])


class Knowing(nn.Module):
    """Knows the brightness of each class of `brightness`: the nearest has the largest logit."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.asked += len(images)
        return -8 * (images.mean((1, 2, 3))[:, None] - MEANS).square()


class Wide(nn.Module):
    """A map of 6 channels, tokens of 5 numbers and 4 logits; `Narrow` has 3 and 2."""

    def __init__(self, channels: int = 6, tokens: int = 5, classes: int = 4, stride: int = 2) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, channels, 3, stride=stride)
        self.embed = nn.Linear(channels, tokens)
        self.head = nn.Linear(tokens, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        maps = torch.relu(self.conv(images))
        tokens = self.embed(maps.flatten(2).transpose(1, 2))
        return self.head(tokens.mean(1))


def narrow() -> Wide:
    torch.manual_seed(1)
    return Wide(3, 2)


def wide() -> Wide:
    torch.manual_seed(2)
    return Wide()


def taught(context: Context, module: nn.Module, **changes: Any) -> Context:
    teacher = Teacher("master", "a" * 64, module.eval(), GREY16.mean, GREY16.std)
    return dataclasses.replace(context, teacher=dataclasses.replace(teacher, **changes))


def learning(**settings: Any) -> TrainingConfig:
    return FAST.model_copy(update={"distil": Distil(teacher="master", **settings)})


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def divergence(teacher: np.ndarray, student: np.ndarray) -> float:
    """Kullback-Leibler of probabilities, summed term by term, the mean of rows."""
    return float(
        np.mean(
            [sum(p * np.log(p / q) for p, q in zip(*row, strict=True)) for row in zip(teacher, student, strict=True)]
        )
    )


# --- the loss ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_the_soft_loss_is_hintons(temperature):
    generator = np.random.default_rng(0)
    student, teacher = generator.normal(0, 3, (2, 5, 7))
    expected = temperature**2 * divergence(softmax(teacher / temperature), softmax(student / temperature))
    found = CLASSIFICATION.soft_loss(torch.tensor(student), torch.tensor(teacher), temperature)
    assert found.item() == pytest.approx(expected, rel=1e-9)
    assert CLASSIFICATION.soft_loss(torch.tensor(student), torch.tensor(student), temperature).item() == pytest.approx(
        0, abs=1e-12
    )


def test_at_a_high_temperature_its_gradient_is_that_of_the_logits_squared_distance():
    """Hinton et al. 2015, equation 4: with centred logits, (student - teacher) / classes of each image.

    What it neglects is a logit over the temperature, here a few millionths of a gradient.
    """
    student = torch.randn(3, 5, dtype=torch.float64)
    teacher = torch.randn(3, 5, dtype=torch.float64)
    student, teacher = (logits - logits.mean(1, keepdim=True) for logits in (student, teacher))
    student.requires_grad_()
    CLASSIFICATION.soft_loss(student, teacher, 1e6).backward()
    assert student.grad is not None
    assert torch.allclose(student.grad, (student - teacher).detach() / 5 / 3, rtol=0, atol=1e-5)


def test_a_features_error_is_relative_to_the_teachers_square_image_by_image():
    student, teacher = np.random.default_rng(0).normal(0, 2, (2, 4, 3, 5, 5))
    each = [((s - t) ** 2).sum() / (t**2).sum() for s, t in zip(student, teacher, strict=True)]
    found = relative_error(torch.tensor(student), torch.tensor(teacher))
    assert found.item() == pytest.approx(np.mean(each), rel=1e-9)
    assert relative_error(torch.zeros(2, 3), torch.ones(2, 3)).item() == 1


@pytest.mark.parametrize("mixup", [None, 0.4])
def test_the_parts_are_weighted_and_only_the_labels_are_smoothed(mixup):
    context = taught(brightness(), wide())
    settings = {
        "temperature": 3.0,
        "weight": 0.7,
        "features": {"relu": "relu", "embed": "embed"},
        "feature_weight": 0.2,
    }
    config = learning(**settings).model_copy(update={"label_smoothing": 0.1})
    student = narrow()
    precision = Precision(config, CPU)
    objective = Distillation(student, context, config, context.data.train, precision=precision, manner=Manner())
    images, labels = torch.randn(6, 1, 16, 16), torch.tensor([0, 1, 2, 3, 1, 0])
    shares = nn.functional.one_hot(labels, 4).float()
    if mixup is not None:
        images, shares = mixed(images, CLASSIFICATION.shares(labels, 4), mixup, Draws(0, 0, torch.arange(6)))
    piece = Piece(images, labels if mixup is None else shares, torch.arange(6))
    given = objective.student(student)(images)
    loss = objective.loss(given, piece).item()

    with torch.no_grad():
        answers = {}
        for whose, network in (("student", student), ("teacher", wide())):
            maps = torch.relu(network.conv(images))
            tokens = network.embed(maps.flatten(2).transpose(1, 2))
            answers[whose] = maps, tokens, network.head(tokens.mean(1))
        to_six, to_five = objective.own
        assert isinstance(to_six, nn.Conv2d)
        assert isinstance(to_five, nn.Linear)
        pairs = [
            (torch.einsum("oc,nchw->nohw", to_six.weight[:, :, 0, 0], answers["student"][0]), answers["teacher"][0]),
            (answers["student"][1] @ to_five.weight.T, answers["teacher"][1]),
        ]
    errors = [
        np.mean([float((s - t).square().sum() / t.square().sum()) for s, t in zip(*pair, strict=True)])
        for pair in pairs
    ]
    logits, wanted = (answers[whose][2].double().numpy() for whose in ("student", "teacher"))
    smooth = 0.9 * shares.double().numpy() + 0.1 / 4
    hard = -float(np.mean((smooth * np.log(softmax(logits))).sum(1)))
    soft = 9 * divergence(softmax(wanted / 3), softmax(logits / 3))
    assert loss == pytest.approx(0.3 * hard + 0.7 * soft + 0.2 * np.mean(errors), rel=1e-5)


def test_a_teacher_with_a_normalisation_of_its_own_sees_the_same_pixels():
    pixels = torch.rand(2, 1, 4, 4)
    teacher = Teacher("master", "", nn.Identity(), (0.2,), (0.5,))
    found = teacher.renormalised((pixels - 0.5) / 0.25, GREY16)
    assert torch.allclose(found, (pixels - 0.2) / 0.5, atol=1e-6)


# --- learning ----------------------------------------------------------------------------------------------------


def accuracy(module: nn.Module, context: Context) -> float:
    """On the training images by their brightness, whatever their labels say."""
    images = context.example(len(context.data.train))
    with torch.no_grad():
        return (module(images).argmax(1) == Knowing()(images).argmax(1)).double().mean().item()


def test_a_student_learns_from_its_teacher_alone_where_the_labels_are_destroyed():
    context = brightness()
    labels = context.data.train.labels[torch.randperm(96, generator=torch.Generator().manual_seed(3))]
    data = dataclasses.replace(context.data, train=Split(context.data.train.sources, Labels(labels)))
    context = taught(dataclasses.replace(context, data=data), Knowing())
    settings = {"epochs": 1, "batch_size": 2, "learning_rate": 0.5, "weight_decay": 0.0}
    scores = {}
    for config in (FAST, learning(weight=1.0)):
        torch.manual_seed(0)
        student = nn.Sequential(nn.AvgPool2d(16), nn.Flatten(), nn.Linear(1, 4))
        train(student, context, config.model_copy(update=settings))
        scores[config.distil is not None] = accuracy(student, context)
    assert scores[False] < 0.6
    assert scores[True] > 0.9


def test_features_are_learned_and_their_projections_left_behind():
    context = taught(brightness(), wide())
    student, before = narrow(), narrow()
    names = set(student.state_dict())
    config = learning(weight=0.0, features=["relu"], feature_weight=1.0).model_copy(update={"epochs": 4})
    result = train(student, context, config)
    assert set(student.state_dict()) == names
    assert difference(student, before) > 1e-2
    assert result.epochs[-1].loss < result.epochs[0].loss
    assert result.notes == (
        "taught by master: features relu with weight 1; it computed its outputs again in each step (features)",
    )


@pytest.mark.parametrize("features", [{}, {"relu": "relu", "embed": "embed"}])
def test_a_taught_step_in_parts_is_the_step(features):
    whole, divided = narrow(), narrow()
    config = learning(features=features).model_copy(update={"optimizer": "adamw", "clip_norm": 1.0, "mixup": 0.3})
    results = []
    for student, parts in ((whole, 1), (divided, 3)):
        torch.manual_seed(0)
        results.append(train(student, taught(brightness(), wide()), config.model_copy(update={"accumulate": parts})))
    assert difference(whole, divided) < 1e-5
    assert results[0].epochs[-1].loss == pytest.approx(results[1].epochs[-1].loss, abs=1e-5)


def test_a_student_is_trained_in_training_mode_where_its_features_are_wanted():
    """A function's dropout is active in the graph that is trained, and not in the network that is judged."""
    torch.manual_seed(0)
    module = with_running_statistics(Tiny(4)).train()
    matched = match(module, copy.deepcopy(module).eval(), {"relu": "relu"}, torch.randn(2, 1, 16, 16))
    student = Student(module, matched.student, matched.projections).train()
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d | nn.Dropout):
            layer.eval()
    images = torch.randn(3, 1, 16, 16)
    assert not torch.equal(student(images)[0], student(images)[0])
    assert torch.equal(student(images)[1][0], matched.teacher(images)[1][0])
    own = {id(layer) for layer in module.modules() if not list(layer.children())}
    assert own >= {id(layer) for layer in student.network.modules() if not list(layer.children())}


def test_in_bfloat16_the_teacher_answers_in_it_and_the_loss_is_float32():
    seen = set()
    master = wide()
    master.conv.register_forward_hook(lambda layer, given, out: seen.add(out.dtype))
    config = learning(features=["relu"]).model_copy(update={"precision": "bfloat16", "epochs": 1})
    context = taught(brightness(), master)
    precision = Precision(config, CPU)
    objective = Distillation(narrow(), context, config, context.data.train, precision=precision, manner=Manner())
    piece = Piece(torch.randn(4, 1, 16, 16), torch.arange(4), torch.arange(4))
    seen.clear()
    given = Precision(config, CPU).forward(objective.student(narrow()), piece.inputs)
    assert objective.loss(given, piece).dtype == torch.float32
    assert seen == {torch.bfloat16}


# --- answers that are kept ---------------------------------------------------------------------------------------


class Heard(Silent):
    def __init__(self) -> None:
        self.messages: list[str] = []

    def progressed(self, fraction: float, message: str) -> None:
        self.messages.append(message)


def test_answers_to_images_that_never_change_are_kept_and_teach_the_same(tmp_path):
    heard = Heard()
    context = dataclasses.replace(brightness(), listener=heard)
    there = dataclasses.replace(context, store=Store(tmp_path))
    config = learning()
    without, first, second = plain(), plain(), plain()
    anew = train(without, taught(context, Knowing()), config)
    result = train(first, taught(there, Knowing()), config)
    assert "teacher" in heard.messages
    assert result.notes[0].endswith("its outputs are kept in the store")
    assert anew.notes[0].endswith("it computed its outputs again in each step")
    assert difference(first, without) < 1e-5
    # A teacher that would answer otherwise is not asked: by its digest it is the same one.
    train(second, taught(there, nn.Sequential(nn.Flatten(), nn.Linear(256, 4)), name="renamed"), config)
    assert difference(first, second) == 0


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"augment": "shift"}, "augment: shift"),
        ({"crop_scale": 0.5}, "crop_scale: 0.5"),
        ({"trivial_augment": True}, "trivial_augment: true"),
        ({"mixup": 0.3}, "mixup: 0.3"),
    ],
)
def test_images_that_change_are_answered_anew_and_the_note_says_why(setting, said, tmp_path):
    context = taught(dataclasses.replace(brightness(), store=Store(tmp_path)), Knowing())
    config = learning().model_copy(update={"epochs": 1, "max_steps": 1, **setting})
    result = train(plain(), context, config)
    assert result.notes[0].endswith(f"it computed its outputs again in each step ({said})")


@pytest.mark.parametrize("change", [{"digest": "b" * 64}, {"precision": "bfloat16"}])
def test_another_teacher_or_precision_has_answers_of_its_own(change, tmp_path):
    store = Store(tmp_path)
    context = dataclasses.replace(brightness(), store=store)
    settings = {"epochs": 1, "max_steps": 1}
    train(plain(), taught(context, Knowing()), learning().model_copy(update=settings))
    precision = {name: value for name, value in change.items() if name == "precision"}
    named = {name: value for name, value in change.items() if name == "digest"}
    train(plain(), taught(context, Knowing(), **named), learning().model_copy(update=settings | precision))
    assert len(list(store.objects.iterdir())) == 2


# --- what does not fit -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("master", "features", "said"),
    [
        (Wide(classes=5), {}, "gives 5 for an image, but the data has 4 classes"),
        (nn.Conv2d(3, 4, 3), {}, "the teacher master fails on images of 1x16x16"),
        (Wide(), {"relo": "relu"}, r"the student has no node 'relo' \(did you mean relu\?\)"),
        (Wide(), {"relu": "conv.1"}, r"the teacher has no node 'conv.1' \(did you mean conv"),
        (Wide(stride=1), {"relu": "relu"}, "'relu' is 3x7x7 in the student and 'relu' 6x14x14 in the teacher"),
        (Wide(), {"relu": "embed"}, "'relu' is 3x7x7 in the student and 'embed' 49x5 in the teacher"),
    ],
)
def test_a_teacher_or_a_feature_that_does_not_fit_is_refused_in_one_line_before_a_step(master, features, said):
    steps = Heard()
    context = taught(dataclasses.replace(brightness(), listener=steps), master)
    with pytest.raises(UserError, match=said) as refusal:
        train(narrow(), context, learning(features=features))
    assert "\n" not in str(refusal.value)
    assert not steps.messages


class Branching(nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.flatten(1)[:, :4] if images.sum() > 0 else images.flatten(1)[:, 4:8]


def test_a_network_that_torch_cannot_trace_teaches_by_its_answers_and_not_by_features():
    context = taught(brightness(), Branching())
    train(narrow(), context, learning().model_copy(update={"max_steps": 1}))
    with pytest.raises(
        UserError, match=r"distil\.features: the teacher has no nodes: torch\.fx cannot trace this model"
    ):
        train(narrow(), context, learning(features=["relu"]))


# --- for int8 ----------------------------------------------------------------------------------------------------


def test_qat_learns_features_by_the_names_of_the_float_network(tmp_path: Path):
    context = brightness()
    torch.manual_seed(0)
    master = with_running_statistics(Tiny(4)).eval()
    context = taught(context, copy.deepcopy(master))
    parent = parent_of(master, context, tmp_path / "parent")
    names = ["stem_2", "relu", "residual_1"]
    short: dict[str, Any] = {"epochs": 1, "max_steps": 2, "batch_size": 16, "images": 16, "augment": False}
    short |= {"min_sqnr": -100.0, "min_agreement": 0.0}
    product = QAT.apply(parent, Qat(**short, distil=Distil(teacher="self", features=names)), context, tmp_path)
    assert any("features stem_2, relu, residual_1" in note for note in product.notes)
    for gone, said in (
        ("stem_0", "the student fuses 'stem_0' with the node after it; the output of both is 'stem_2'$"),
        ("stem_1", r"the student has no node 'stem_1' \(did you mean stem_2"),
    ):
        with pytest.raises(UserError, match=said):
            QAT.apply(parent, Qat(**short, distil=Distil(teacher="self", features=[gone])), context, tmp_path)
