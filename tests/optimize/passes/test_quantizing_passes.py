"""``ptq`` and ``qat``: which images ranges come from, what they are, and that the result is really int8."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.ao.quantization import FakeQuantizeBase
from torch.nn import functional
from torchvision.ops import stochastic_depth

from optimize.context import Context
from optimize.data.loading import loader
from optimize.data.records import Split
from optimize.data.targets import Labels
from optimize.errors import NotApplicableError, PassError
from optimize.passes import qat as qat_module
from optimize.passes.ptq import PTQ, Ptq
from optimize.passes.qat import QAT, Qat
from optimize.quantization.convert import trace_calls
from optimize.quantization.rewrites.batch_norms import lift_factors
from optimize.quantization.targets import x86_target
from optimize.training.config import TrainingConfig
from optimize.training.loop import train
from serve.runtime.engines.torchscript import use_int8_kernels
from serve.runtime.errors import UserError
from serve.runtime.images.image_preprocessing import normalise
from tests.narrow import layer
from tests.optimize.foreign_layers import GatedSameConv, NamedConv, NamedNorm, NormAct, StandardisedConv
from tests.optimize.training.test_training_loop import brightness, network
from tests.optimize.workbench import (
    CPU,
    GREY16,
    noise,
    noise_context,
    packed_in_torchscript,
    packed_weights,
    parent_of,
    png,
    quantizers,
    run,
    with_running_statistics,
)
from tests.processor import WIDEST

OBSERVERS = ("minmax", "moving-average", "histogram")


def small() -> nn.Sequential:
    torch.manual_seed(3)
    return with_running_statistics(
        nn.Sequential(
            nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 14 * 14, 4)
        )
    )


def ptq(module: nn.Module, context: Context, folder: Path, **config: object) -> Path:
    """Run ``ptq`` on a module; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    PTQ.apply(parent_of(module, context, folder / "parent"), Ptq(**config), context, folder)
    return folder


def seen_inputs(context: Context, images: int) -> list[torch.Tensor]:
    """The normalised calibration batches, of 32 images each, normalised here by the formula of the card."""
    batches = loader(context.data.train, context.preprocessing, batch_size=32, device=CPU, seed=0, limit=images)
    return [(batch.double() / 255 - 0.5) / 0.25 for batch, _ in batches]


def affine(low: float, high: float, levels: int) -> tuple[float, int]:
    """Scale and zero point of the range [low, high], widened to hold 0, in unsigned integers up to ``levels``."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = (high - low) / levels
    return scale, max(0, min(levels, round(-low / scale)))


def evaluate(artifact, context: Context) -> float:
    batches = loader(context.data.val, context.preprocessing, batch_size=256, device=CPU)
    right = sum(
        int((run(artifact, normalise(images, context.preprocessing, CPU, torch.float32)).argmax(1) == labels).sum())
        for images, labels in batches
    )
    return right / len(context.data.val)


# --- ptq ---------------------------------------------------------------------------------------------------------


def test_ptq_packs_its_weights_as_int8(made, session):
    artifact = made("ptq")
    assert artifact.card.precision == "int8"
    assert artifact.card.format == "torchscript"
    assert artifact.card.device == "cpu"
    use_int8_kernels()
    program = torch.jit.load(str(artifact.path))
    code = program.inlined_graph
    kernels = [n.kind() for n in code.nodes() if n.kind().startswith("quantized::")]
    assert sum("conv2d" in kernel for kernel in kernels) == 4
    assert sum("linear" in kernel for kernel in kernels) == 1
    assert not [n for n in code.nodes() if n.kind() in ("aten::_convolution", "aten::conv2d", "aten::linear")]
    float_bytes = sum(t.numel() * 4 for t in made().module().state_dict().values())
    assert sum(weight.numel() for weight in packed_weights(artifact.folder)) * 4 > 0.9 * float_bytes
    assert all(weight.dtype == torch.int8 for weight in packed_weights(artifact.folder))
    # Nothing of the size of a weight is left in float.
    left = [t for t in program.state_dict().values() if t.is_floating_point() and t.numel() > 64]
    assert not left


def test_ptq_is_near_the_float_network_on_images_it_has_not_seen(trained, made, digits_context):
    before, after = evaluate(trained, digits_context), evaluate(made("ptq"), digits_context)
    assert before > 0.9  # else the comparison says little
    assert after > before - 0.015
    batch = digits_context.example(8)
    assert not torch.equal(run(made("ptq"), batch), run(trained, batch)), "int8 that changes no logit is not int8"


def test_ptq_rounds_each_weight_to_the_nearest_of_its_channels_steps(tmp_path):
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4 * 14 * 14, 4)).eval()
    context = noise_context()
    ptq(module, context, tmp_path)
    weights = (layer(module, 0, nn.Conv2d).weight.detach(), layer(module, 2, nn.Linear).weight.detach())
    for weight, integers in zip(weights, packed_weights(tmp_path), strict=True):
        scale = weight.flatten(1).abs().amax(1) / WIDEST
        expected = torch.round(weight / scale.view(-1, *[1] * (weight.ndim - 1)))
        assert integers.abs().flatten(1).amax(1).tolist() == [WIDEST] * 4
        assert (integers - expected).abs().max() <= 1  # a tie may fall either way in float32
        assert (integers == expected).float().mean() > 0.99


def test_minmax_ranges_are_exactly_the_extremes_of_the_images_that_were_seen(tmp_path):
    context, module = noise_context(), small()
    folder = ptq(module, context, tmp_path, observer="minmax", images=40)
    levels = x86_target().activation_max
    batch = torch.cat(seen_inputs(context, 40))
    assert len(batch) == 40
    with torch.no_grad():
        hidden = module[:3](batch.float())
        logits = module(batch.float())
    expected = [affine(t.min().item(), t.max().item(), levels) for t in (batch, hidden, logits)]
    # Flattening keeps the numbers, and so their range: the reference form writes it twice.
    found = list(dict.fromkeys(quantizers(folder)))
    assert len(found) == 3
    for (scale, zero_point), (found_scale, found_zero_point, low, high) in zip(expected, found, strict=True):
        assert found_scale == pytest.approx(scale, rel=1e-4)
        assert found_zero_point == zero_point
        assert (low, high) == (0, levels)


def mean_range(context: Context, images: int) -> tuple[float, float]:
    """Mean over batches of the least and of the largest value of the normalised images."""
    batches = seen_inputs(context, images)
    return (
        sum(batch.min().item() for batch in batches) / len(batches),
        sum(batch.max().item() for batch in batches) / len(batches),
    )


def test_moving_average_ranges_are_the_mean_of_each_batchs_extremes(tmp_path):
    pixels = [np.random.default_rng(n).integers(120 - n, 130 + n, (16, 16)) for n in range(120)]
    context = noise_context(train=Split(tuple(png(image) for image in pixels), Labels(torch.arange(120) % 4)))
    folder = ptq(small(), context, tmp_path, observer="moving-average", images=96)
    assert len(seen_inputs(context, 96)) == 3
    scale, zero_point = affine(*mean_range(context, 96), x86_target().activation_max)
    assert quantizers(folder)[0][0] == pytest.approx(scale, rel=1e-4)
    assert quantizers(folder)[0][1] == zero_point


def test_a_histogram_gives_up_a_rare_tail_for_a_smaller_error_of_all(tmp_path):
    pixels = (128 + np.random.default_rng(0).laplace(0, 9, (256, 16, 16))).clip(0, 255)
    train = Split(tuple(png(image) for image in pixels), Labels(torch.arange(256) % 4))
    context = noise_context(train=train)
    inputs = torch.cat(seen_inputs(context, 256))
    error = {}
    for name in ("minmax", "histogram"):
        scale, zero_point, low, high = quantizers(ptq(small(), context, tmp_path / name, observer=name))[0]
        integers = (torch.round(inputs / scale) + zero_point).clamp(low, high)
        error[name] = ((integers - zero_point) * scale - inputs).square().mean().item()
    assert error["histogram"] < 0.98 * error["minmax"]


def test_calibration_reads_only_as_many_training_images_as_it_was_told(tmp_path, monkeypatch):
    seen = []
    from optimize.quantization import calibration as module

    def spy(batch, *rest):
        seen.append(len(batch))
        return normalise(batch, *rest)

    monkeypatch.setattr(module, "normalise", spy)
    ptq(small(), noise_context(), tmp_path, images=40)
    assert sum(seen) == 40


def test_validation_images_do_not_move_any_range(tmp_path):
    train = noise(64, 1, 100, 150)
    calm = noise_context(train=train, val=noise(8, 2, 100, 150))
    extreme = noise_context(train=train, val=noise(8, 2, 0, 256))
    for observer in OBSERVERS:
        folders = [
            ptq(small(), context, tmp_path / f"{observer}{index}", observer=observer)
            for index, context in enumerate((calm, extreme))
        ]
        assert quantizers(folders[0]) == quantizers(folders[1])
    poisoned_training = noise_context(train=noise(64, 1, 0, 256), val=calm.data.val)
    assert quantizers(ptq(small(), poisoned_training, tmp_path / "other")) != quantizers(folders[0])


def test_the_same_seed_gives_the_same_integers_and_another_seed_other_images(tmp_path):
    train = noise(200, 1)
    runs = {
        name: ptq(small(), noise_context(seed, train=train), tmp_path / name, images=8, observer="moving-average")
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    }
    assert quantizers(runs["a"]) == quantizers(runs["b"])
    assert all(torch.equal(x, y) for x, y in zip(packed_weights(runs["a"]), packed_weights(runs["b"]), strict=True))
    assert quantizers(runs["a"]) != quantizers(runs["c"])


def test_a_target_of_seven_bits_keeps_weights_within_63_and_activations_within_255(tmp_path):
    context = noise_context()
    folder = ptq(small(), context, tmp_path, observer="minmax", images=64, target="x86")
    batch = torch.cat(seen_inputs(context, 64))
    scale, zero_point = affine(batch.min().item(), batch.max().item(), 255)
    found = quantizers(folder)
    assert {entry[2:] for entry in found} == {(0, 255)}
    assert {int(row.abs().max()) for weight in packed_weights(folder) for row in weight} == {63}
    assert found[0][0] == pytest.approx(scale, rel=1e-4)
    assert found[0][1] == zero_point


class Nothing(nn.Module):
    """Has no layer with weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3)).expand(-1, 4).exp()


def test_a_model_with_nothing_to_quantize_is_not_applicable(tmp_path):
    with pytest.raises(NotApplicableError, match="no layer that it can quantize"):
        ptq(Nothing(), noise_context(), tmp_path)


class Viewed(nn.Module):
    """LeNet's way to the last layer: rows as a view of the images that a convolution gives."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(1, 6, 5), nn.Linear(6 * 36, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.max_pool2d(torch.relu(self.conv(x)), 2)
        return self.last(x.view(-1, 6 * 36))


def test_a_view_of_what_a_convolution_gives_is_taken_of_its_integers_too(tmp_path):
    torch.manual_seed(0)
    module, context = Viewed().eval(), noise_context()
    folder = ptq(module, context, tmp_path / "viewed", observer="minmax")
    images = context.example(16)
    use_int8_kernels()
    with torch.no_grad():
        found, expected = torch.jit.load(str(folder / "model.pt"))(images), module(images)
    assert (found - expected).abs().max() < 0.1 * (expected.max() - expected.min())


def test_the_program_takes_any_batch_size_and_gives_each_image_the_same_answer(made, digits_context):
    batch = digits_context.example(16)
    for artifact in (made("ptq"), made("fuse", "ptq")):
        whole = run(artifact, batch)
        assert whole.shape == (16, 10)
        assert torch.equal(
            torch.cat([run(artifact, batch[:1]), run(artifact, batch[1:4]), run(artifact, batch[4:])]), whole
        )


# --- qat ---------------------------------------------------------------------------------------------------------


def learnable(images: int = 96) -> Context:
    """Images whose brightness is their class."""
    parts = [noise(images // 4, seed, 20 + 60 * seed, 40 + 60 * seed) for seed in range(4)]
    train = noise(images, 0)
    sources = tuple(source for part in parts for source in part.sources)
    labels = torch.arange(4).repeat_interleave(images // 4)
    return noise_context(train=dataclasses.replace(train, sources=sources, targets=Labels(labels)))


@pytest.fixture
def schedule(monkeypatch):
    """Records norms' statistics and activation ranges around each half of each epoch of ``qat``'s training."""
    snapshots: dict[tuple[int, bool], tuple[list, list]] = {}

    def recording(module, context, config, *, set_mode, **options):
        def wrapped(network, epoch, training):
            set_mode(network, epoch, training)
            norms = [
                tensor.tolist()
                for name, tensor in network.state_dict().items()
                if name.endswith(("running_mean", "var"))
            ]
            ranges = [
                tuple(fake.state_dict()[f"activation_post_process.{end}_val"].tolist() for end in ("min", "max"))
                for name, fake in network.named_modules()
                if isinstance(fake, FakeQuantizeBase) and "weight" not in name
            ]
            snapshots[epoch, training] = (norms, ranges)

        return train(module, context, config, set_mode=wrapped, **options)

    monkeypatch.setattr(qat_module, "train", recording)
    return snapshots


class Loose(nn.Module):
    """Norms that a convolution absorbs, that a linear layer absorbs, and that none absorbs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU())
        self.loose = nn.BatchNorm2d(4)
        self.middle = nn.Sequential(nn.Linear(4 * 49, 8), nn.BatchNorm1d(8))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.middle(torch.flatten(torch.relu(self.loose(self.first(x))), 1))))


def qat(module: nn.Module, context: Context, folder: Path, **config: object):
    settings = {"epochs": 4, "freeze_norms_at": 1, "freeze_observers_at": 2, "images": 32, "batch_size": 16, **config}
    folder.mkdir(parents=True, exist_ok=True)
    return QAT.apply(parent_of(module, context, folder / "parent"), Qat(**settings), context, folder)


def test_norms_and_ranges_freeze_on_schedule_and_held_out_images_move_nothing(tmp_path, schedule):
    torch.manual_seed(0)
    qat(Loose().eval(), learnable(), tmp_path, augment=False)
    assert len(schedule) == 8
    norms = {moment: taken[0] for moment, taken in schedule.items()}
    ranges = {moment: taken[1] for moment, taken in schedule.items()}
    assert len(norms[0, True]) == 6, "mean and variance of three norms"
    for epoch in range(4):
        begin, end = (epoch, True), (epoch, False)
        for before, after in zip(norms[begin], norms[end], strict=True):
            assert (before != after) == (epoch < 1)
        assert (ranges[begin] != ranges[end]) == (epoch < 2)
        if epoch < 3:  # between the end of one epoch and the begin of the next stands the held-out evaluation
            assert norms[end] == norms[epoch + 1, True]
            assert ranges[end] == ranges[epoch + 1, True]


@pytest.mark.parametrize("factor", [0.0, -1e-30])
def test_norms_that_give_nothing_are_trained_and_not_divided_by(factor: float, tmp_path: Path) -> None:
    """As the last norm of a residual branch begins, and as those of dead channels end."""
    torch.manual_seed(0)
    module = Loose().eval()
    folded = ("first.1.weight", "middle.1.weight")
    for name in folded:
        module.get_parameter(name).data[::2] = factor
    traced = trace_calls(copy.deepcopy(module), learnable().example())
    lift_factors(traced)
    batch = learnable().example(8)
    with torch.no_grad():
        assert torch.allclose(traced(batch), module(batch), atol=1e-3)
    sign = -1 if factor else 1
    assert all(bool((traced.get_parameter(name)[::2] * sign > 0).all()) for name in folded)
    product = qat(module, learnable(), tmp_path, epochs=2, learning_rate=0.05, min_sqnr=10.0)
    assert product.precision == "int8"


def test_a_norm_without_factors_and_a_weight_that_is_computed_are_trained_for_int8(tmp_path: Path) -> None:
    torch.manual_seed(0)
    convolution = nn.utils.parametrizations.weight_norm(nn.Conv2d(1, 8, 3, stride=2))
    layers = (convolution, nn.BatchNorm2d(8, affine=False), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    module = with_running_statistics(nn.Sequential(*layers, nn.Linear(8, 4)))
    traced = trace_calls(copy.deepcopy(module), learnable().example())
    with torch.no_grad():
        torch.testing.assert_close(traced(learnable().example()), module(learnable().example()))
    product = qat(module, learnable(), tmp_path, epochs=2, max_steps=1, min_sqnr=0.0, min_agreement=0.0)
    assert product.precision == "int8"
    assert [len(weight) for weight in packed_weights(tmp_path)] == [8, 4]


def test_layers_that_torchs_kernels_compute_wrongly_stay_in_float(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 8, 3, stride=4), nn.InstanceNorm2d(8, affine=True), nn.PReLU(), nn.Conv2d(8, 8, 3))
    module = nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(32, 4)).eval()
    folder = ptq(module, noise_context(), tmp_path, images=32, min_sqnr=25.0)  # of torch's own program
    assert len(packed_weights(folder)) == 3


def test_a_norm_whose_answers_depend_on_the_batch_is_refused_in_a_line() -> None:
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)).eval()
    with pytest.raises(NotApplicableError, match=r"^the norm 1 has no running statistics"):
        trace_calls(module, learnable().example())


def test_the_ranges_start_from_the_mean_of_calibration_not_from_the_first_step(tmp_path, schedule):
    context = learnable()
    qat(small(), context, tmp_path, images=96, epochs=1, freeze_observers_at=0)
    low, high = mean_range(context, 96)
    (found_low,), (found_high,) = (torch.tensor(side).flatten().tolist() for side in schedule[0, True][1][0])
    assert found_low == pytest.approx(low, rel=1e-4)
    assert found_high == pytest.approx(high, rel=1e-4)
    # Frozen from the start, it is what the artifact has.
    scale, zero_point = affine(low, high, x86_target().activation_max)
    assert quantizers(tmp_path)[0][0] == pytest.approx(scale, rel=1e-4)
    assert quantizers(tmp_path)[0][1] == zero_point


@pytest.mark.parametrize("rate", [None, 0.05])
def test_qat_is_not_worse_than_ptq_even_where_training_does_harm(rate, session, trained, made, digits):
    """McNemar's test on the validation images: those that only one of the two classifies right."""
    settings = {"augment": False} if rate is None else {"augment": False, "learning_rate": rate}
    artifact = session.apply(trained, Qat(**settings), f"qat-{rate}").artifact
    ((images, labels),) = loader(digits.val, GREY16, batch_size=len(digits.val), device=CPU)
    batch = normalise(images, GREY16, CPU, torch.float32)
    after, before = (run(entry, batch).argmax(1) == labels for entry in (artifact, made("ptq")))
    lost, won = int((before & ~after).sum()), int((after & ~before).sum())
    assert lost - won <= 1.96 * (lost + won) ** 0.5


class Joined(nn.Module):
    """Two branches of very different size, which torch.ao gives one range because they are concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large, self.head = nn.Conv2d(1, 4, 3), nn.Conv2d(1, 4, 3), nn.Linear(8 * 196, 4)
        self.large.weight.data *= 20

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.flatten(torch.cat((self.large(x), self.small(x)), 1), 1))


@pytest.mark.parametrize("name", ["ptq", "qat"])
def test_a_mean_range_that_branches_share_holds_them_all(name, tmp_path):
    torch.manual_seed(0)
    module, context = Joined().eval(), noise_context()
    if name == "ptq":
        ptq(module, context, tmp_path, observer="moving-average", images=64)
    else:
        qat(module, context, tmp_path, epochs=1, freeze_observers_at=0, learning_rate=1e-9, images=64)
    batches = seen_inputs(context, 64)
    with torch.no_grad():
        joined = [torch.cat((module.large(b.float()), module.small(b.float())), 1) for b in batches]
    low, high = (sum(end(b).item() for b in joined) / len(joined) for end in (torch.min, torch.max))
    scale, zero_point = affine(low, high, x86_target().activation_max)
    assert any(
        found == pytest.approx(scale, rel=1e-3) and point == zero_point for found, point, _, _ in quantizers(tmp_path)
    )


@pytest.mark.parametrize("seed", range(5))
def test_the_packed_and_the_exported_weights_of_qat_are_equal_and_fill_their_range(seed, tmp_path):
    """Also where a step after the last range was taken, or a norm that moved, made a weight larger."""
    torch.manual_seed(seed)
    context = dataclasses.replace(learnable(), seed=seed)
    module = with_running_statistics(Loose(), seed=seed)
    settings = {"freeze_norms_at": 3, "freeze_observers_at": 1, "learning_rate": 0.3, "weight_decay": 0.1}
    qat(module, context, tmp_path, epochs=3, **settings)
    exported = packed_weights(tmp_path)
    packed = [integers for integers, _ in packed_in_torchscript(tmp_path / "model.pt")]
    assert len(packed) == len(exported) == 3
    for ours, theirs in zip(packed, exported, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.flatten(1).int().abs().amax(1).tolist() == [WIDEST] * len(ours), "a range is not its weight's"


class Placed(nn.Module):
    """Learned places, which a table holds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.places, self.head = nn.Conv2d(1, 8, 4, 4), nn.Embedding(16, 8), nn.Linear(8, 4)
        self.register_buffer("numbers", torch.arange(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.first(x).flatten(2).transpose(1, 2) + self.places(self.numbers)
        return self.head(tokens.mean(1))


@pytest.mark.parametrize("make", [ptq, qat], ids=["ptq", "qat"])
def test_a_table_of_places_stays_in_float_and_the_layers_beside_it_do_not(make, tmp_path):
    torch.manual_seed(0)
    make(Placed().eval(), learnable(), tmp_path)
    assert len(packed_weights(tmp_path)) == 2


def test_observers_that_never_freeze_move_in_every_epoch(tmp_path, schedule):
    qat(small(), learnable(), tmp_path, epochs=2, freeze_observers_at=2)
    assert schedule[1, True][1] != schedule[1, False][1]


def test_freezing_after_the_last_epoch_is_refused_with_the_number_that_means_never():
    with pytest.raises(UserError, match=r"freeze_observers_at=5 comes after the last of 3 epochs; use 3 for never"):
        Qat(epochs=3, freeze_observers_at=5)


def test_qat_improves_a_network_that_was_not_trained_to_the_end(session, digits_context):
    parent = session.baseline(TrainingConfig(epochs=1, learning_rate=0.01, augment=False)).artifact
    artifact = session.apply(parent, Qat(epochs=2, learning_rate=0.05, images=32, augment=False)).artifact
    assert evaluate(artifact, digits_context) > evaluate(parent, digits_context) + 0.03


@pytest.mark.parametrize("parents", [(), ("fuse",)], ids=["float", "fused"])
def test_qat_is_at_least_as_good_as_its_parent_and_really_int8(parents, made, digits_context):
    parent, artifact = made(*parents), made(*parents, "qat")
    assert evaluate(artifact, digits_context) >= evaluate(parent, digits_context) - 0.01
    assert len(packed_weights(artifact.folder)) == 5
    assert all(weight.dtype == torch.int8 for weight in packed_weights(artifact.folder))
    calibrated = packed_weights(made(*parents, "ptq").folder)
    moved = [not torch.equal(x, y) for x, y in zip(packed_weights(artifact.folder), calibrated, strict=True)]
    stays = any("kept as it was before training" in note for note in artifact.card.notes)
    assert moved == [not stays] * 5


def test_qat_trains_what_calibration_leaves_wrong(tmp_path):
    context, module = brightness(), network().eval()
    parent = parent_of(module, context, tmp_path / "parent")
    for name in ("ptq", "qat"):
        (tmp_path / name).mkdir()
    PTQ.apply(parent, Ptq(images=32), context, tmp_path / "ptq")
    product = QAT.apply(parent, Qat(epochs=4, learning_rate=0.05), context, tmp_path / "qat")
    assert any(note.startswith("best of 4 epochs") for note in product.notes)
    pairs = zip(packed_weights(tmp_path / "ptq"), packed_weights(tmp_path / "qat"), strict=True)
    assert all(not torch.equal(before, after) for before, after in pairs)


class Random(nn.Module):
    """Dropout and stochastic depth as functions of ``self.training``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3, padding=1), nn.Linear(784, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        x = x + stochastic_depth(self.second(x), 0.9, "row", training=self.training)
        x = functional.dropout(x, 0.9, training=self.training)
        return self.head(torch.flatten(x, 1))


@pytest.mark.parametrize("name", ["ptq", "qat"])
def test_functional_dropout_and_stochastic_depth_are_not_baked_in_active(name, tmp_path):
    torch.manual_seed(0)
    module, context = Random().train(), noise_context()
    if name == "ptq":
        ptq(module, context, tmp_path)
    else:
        qat(module, context, tmp_path, epochs=2, learning_rate=1e-6)
    use_int8_kernels()
    program = torch.jit.load(str(tmp_path / "model.pt"))
    batch = context.example(8)
    with torch.no_grad():
        first, second, expected = program(batch), program(batch), module.eval()(batch)
    assert torch.equal(first, second)
    # A dropout of 0.9 would change logits by several times their size.
    assert (first - expected).abs().max() < 0.1 * expected.abs().max()


def test_qat_notes_the_epoch_that_it_kept(tmp_path):
    product = qat(small(), learnable(), tmp_path, epochs=2)
    assert any("best of 2 epochs" in note and "held-out images" in note for note in product.notes)


# --- layers of other libraries -----------------------------------------------------------------------------------


def foreign() -> nn.Module:
    torch.manual_seed(0)
    return with_running_statistics(
        nn.Sequential(
            NamedConv(1, 8, 3, bias=False), NormAct(8), StandardisedConv(8, 8, 3), NamedNorm(8), nn.ReLU(),
            nn.Flatten(), nn.Linear(8 * 144, 4),
        )
    )  # fmt: skip


@pytest.mark.parametrize("name", ["ptq", "qat"])
def test_subclasses_of_layers_are_quantized_as_torchs_own(name, tmp_path):
    if name == "ptq":
        context = noise_context()
        product = PTQ.apply(parent_of(foreign(), context, tmp_path / "parent"), Ptq(images=32), context, tmp_path)
    else:
        product = qat(foreign(), learnable(), tmp_path, epochs=1, freeze_observers_at=1)
    assert product.notes[0].startswith("3 quantized layers")
    kinds = [node.kind() for node in torch.jit.load(str(tmp_path / "model.pt")).inlined_graph.nodes()]
    assert kinds.count("quantized::conv2d_relu") == 2
    assert "aten::batch_norm" not in kinds
    assert not [note for note in product.notes if "left in float" in note]


@pytest.mark.parametrize("name", ["ptq", "qat"])
def test_what_is_left_in_float_is_said(name, tmp_path):
    """A convolution that no tracing enters is served as it is."""
    torch.manual_seed(0)
    module = nn.Sequential(
        GatedSameConv(1, 4, 3, stride=2), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 4)
    )
    if name == "ptq":
        context = noise_context()
        parent = parent_of(module.eval(), context, tmp_path / "parent")
        notes = PTQ.apply(parent, Ptq(images=32), context, tmp_path).notes
    else:
        notes = qat(module.eval(), learnable(), tmp_path, epochs=1, freeze_observers_at=1).notes
    assert notes[0].startswith("2 quantized layers")
    assert "1 layers left in float: 0 (GatedSameConv)" in notes


class Rooted(nn.Module):
    """The gradient of a root of 0 is infinite, and times 0 no number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(1, 4, 3, bias=False), nn.Conv2d(4, 4, 3), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.head(self.second((x - x).sqrt() + x).mean((2, 3)))


def test_weights_that_are_no_numbers_are_told_by_name(tmp_path):
    with pytest.raises(
        PassError, match=r"training diverged: first\.weight became NaN .* in epoch 1; lower learning_rate"
    ):
        qat(Rooted().eval(), learnable(), tmp_path, epochs=1, freeze_observers_at=1, images=16)
