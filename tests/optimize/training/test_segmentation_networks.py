"""A small network for segmentation is trained, measured, taught and quantized with class maps of synthetic pictures."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from optimize.context import Context
from optimize.data.records import ImageData, Split
from optimize.data.targets import ClassMaps
from optimize.errors import PassError
from optimize.measure.accuracy import Answers, accuracy, answer, load_answers, parity, save_answers
from optimize.models.source import ModelSource
from optimize.models.teacher import Teacher
from optimize.passes.onnx_int8 import ONNX_INT8, OnnxInt8
from optimize.passes.ptq import PTQ, Ptq
from optimize.passes.qat import QAT, Qat
from optimize.quantization import gate
from optimize.store.objects import Store
from optimize.tasks.base import GROUPS
from optimize.training.baseline import make_baseline
from optimize.training.config import TrainingConfig
from optimize.training.distil import Distil
from optimize.training.loop import train
from serve.runtime.card.card import Preprocessing
from serve.runtime.errors import UserError
from tests.optimize.workbench import CPU, applied, parent_of, png, run

SIDE = 16
GREY = Preprocessing(SIDE, (SIDE, SIDE), mean=(0.5,), std=(0.25,))


def squares(count: int, seed: int) -> Split:
    """Grey pictures with a bright and a dark square, and their classes; a row of each does not count."""
    rng = np.random.default_rng(seed)
    pictures = rng.integers(110, 146, (count, SIDE, SIDE))
    masks = np.zeros((count, SIDE, SIDE), np.uint8)
    for picture, mask in zip(pictures, masks, strict=True):
        for name, grey in ((1, 230), (2, 20)):
            top, left = rng.integers(0, 10, 2)
            picture[top : top + 6, left : left + 6] = grey
            mask[top : top + 6, left : left + 6] = name
        mask[-1] = 255
    groups = torch.arange(count) // 4
    return Split([png(picture) for picture in pictures], ClassMaps(list(masks), 3), groups=groups)


@pytest.fixture(scope="module")
def context() -> Context:
    data = ImageData(
        "squares", "segmentation", ("ground", "bright", "dark"), squares(96, 0), squares(32, 1), "none", (SIDE, SIDE)
    )
    return Context(data, GREY, CPU)


class Tiny(nn.Module):
    """Two sizes, a bilinear interpolation and a concatenation; an output behind the logits while it is trained."""

    def __init__(self, *, auxiliary: bool = False) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.down = nn.Sequential(nn.Conv2d(8, 16, 3, 2, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        self.head = nn.Conv2d(24, 3, 1)
        self.aux = nn.Conv2d(8, 3, 1) if auxiliary else None

    def forward(self, images: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        x = self.stem(images)
        logits = self.head(torch.cat((x, self.up(self.down(x))), 1))
        return (logits, self.aux(x)) if self.training and self.aux is not None else logits


@pytest.fixture(scope="module")
def network(context: Context) -> nn.Module:
    torch.manual_seed(0)
    module = Tiny()
    result = train(module, context, TrainingConfig(epochs=4, batch_size=16, learning_rate=0.1))
    assert result.metric == "mIoU"
    assert result.held_out_score > 0.8
    return module


def answers(module: nn.Module, context: Context) -> Answers:
    def call(pixels: torch.Tensor) -> tuple[torch.Tensor]:
        with torch.no_grad():
            return (module((pixels.float() / 255 - 0.5) / 0.25),)

    return answer(call, context, 7)


def test_a_trained_network_is_measured_by_its_pixels_and_the_groups_of_its_images(
    network: nn.Module, context: Context, tmp_path: Path
) -> None:
    found, random = answers(network, context), answers(Tiny().eval(), context)
    assert found.evidence[GROUPS].tolist() == (torch.arange(32) // 4).tolist()
    assert int(found.evidence["confusion"].sum()) == 32 * SIDE * (SIDE - 1)
    measured = accuracy(random, found, "key", context.task)
    assert list(measured.scores) == ["miou", "pixel_accuracy"]
    assert measured.difference is not None
    assert measured.difference.high < 0
    assert measured.interval[0] < measured.score < measured.interval[1]
    save_answers(found, tmp_path)
    read = load_answers(tmp_path)
    alike = parity(found, read, "itself", context.task)
    assert (alike.agreements, alike.sqnr_db) == ({"pixel_agreement": 1.0, "worst_image_agreement": 1.0}, None)
    assert (alike.images, alike.logits_of) == (32, 32)


def test_outputs_for_each_pixel_are_kept_of_few_images(
    network: nn.Module, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optimize.measure.accuracy._PARITY_NUMBERS", 5 * 3 * SIDE * SIDE + 1)
    found = answers(network, context)
    assert (found.images, tuple(found.outputs[0].shape)) == (32, (5, 3, SIDE, SIDE))


def test_int8_of_it_passes_the_gate_and_a_broken_one_does_not(
    network: nn.Module, context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = parent_of(network, context, tmp_path / "baseline")
    config = Ptq(observer="minmax", images=32)
    packed = applied(PTQ, config, parent, context, tmp_path / "ptq")
    graph = applied(ONNX_INT8, OnnxInt8(input="float"), packed, context, tmp_path / "onnx")
    images = context.example(8)
    with torch.no_grad():
        expected = network(images)
    for artifact in (packed, graph):
        same = (run(artifact, images).argmax(1) == expected.argmax(1)).double().mean()
        assert same > 0.97
    with monkeypatch.context() as patched:
        patched.setattr(gate, "_KERNELS_LOSE", 1e9)
        patched.setattr(gate, "load_script", lambda *_: lambda given: given.expand(-1, 3, -1, -1))
        with pytest.raises(PassError, match=r"same class on .* pixels of 32 training images.* this is broken"):
            PTQ.apply(parent, config.model_copy(update={"min_sqnr": -99.0}), context, tmp_path / "ptq")
    learned = applied(QAT, Qat(epochs=1, images=32, batch_size=16), parent, context, tmp_path / "qat")
    assert learned.card.precision == "int8"


def test_a_student_learns_from_a_teachers_maps(
    network: nn.Module, context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = Teacher("wide", "0" * 64, network.eval(), GREY.mean, GREY.std)
    taught = dataclasses.replace(context, teacher=teacher, store=Store(tmp_path))
    torch.manual_seed(1)
    config = TrainingConfig(
        epochs=2, batch_size=16, learning_rate=0.1, distil=Distil(teacher="wide", weight=1.0), mixup=None
    )
    result = train(Tiny(), taught, config)
    assert result.held_out_score > 0.5
    assert "its outputs are kept in the store" in result.notes[0]
    mixed = train(Tiny(), taught, config.model_copy(update={"mixup": 0.2, "epochs": 1}))
    assert "mixup: 0.2" in mixed.notes[0]
    with monkeypatch.context() as patched:
        patched.setattr("optimize.training.objective._MOST_KEPT", 80 * 3 * SIDE * SIDE * 4)
        anew = train(Tiny(), taught, config.model_copy(update={"epochs": 1, "max_steps": 1}))
    assert "computed its outputs again in each step (0 GB of outputs)" in anew.notes[0]
    small = Teacher("small", "1" * 64, nn.Conv2d(1, 4, 13), GREY.mean, GREY.std)
    with pytest.raises(UserError, match=r"gives 4x4x4 for an image.*logits of shape \(2, 3, 16, 16\)"):
        train(Tiny(), dataclasses.replace(taught, teacher=small), config)


def test_auxiliary_outputs_are_trained_with_their_weight_and_are_not_in_the_artifact(
    context: Context, tmp_path: Path
) -> None:
    trained: list[Tiny] = []

    def with_head(classes: int, size: int | None) -> Tiny:
        trained.append(Tiny(auxiliary=True))
        return trained[-1]

    source = ModelSource(
        "net", "net", "0", None, origin="own", auxiliary=(0.5,), factory=lambda *_: Tiny(), training_factory=with_head
    )
    config = TrainingConfig(epochs=1, batch_size=16)
    (tmp_path / "head").mkdir()
    make_baseline(source, context, config, tmp_path / "head")
    (module,) = trained
    assert module.aux is not None
    torch.manual_seed(context.seed)
    initial = Tiny(auxiliary=True).aux
    assert initial is not None
    assert not torch.equal(module.aux.weight, initial.weight)
    from safetensors.torch import load_file

    names = load_file(tmp_path / "head" / "weights.safetensors").keys()
    assert names == Tiny().state_dict().keys()


def test_a_network_whose_logits_are_smaller_than_its_input_is_refused_before_training(
    context: Context, tmp_path: Path
) -> None:
    source = ModelSource("net", "net", "0", None, origin="own", factory=lambda *_: nn.Conv2d(1, 3, 3, 2, padding=1))
    with pytest.raises(UserError, match=r"gives \(4, 3, 8, 8\) .* logits of shape \(4, 3, 16, 16\): one for each"):
        make_baseline(source, context, TrainingConfig(epochs=1), tmp_path)


def test_a_network_that_ends_in_a_softmax_over_classes_is_trained_by_its_logits(
    context: Context, tmp_path: Path
) -> None:
    source = ModelSource(
        "net", "net", "0", None, origin="own", factory=lambda *_: nn.Sequential(Tiny(), nn.Softmax(dim=1))
    )
    product = make_baseline(source, context, TrainingConfig(epochs=1, max_steps=2), tmp_path)
    assert product.structure == {"ending": "softmax"}
