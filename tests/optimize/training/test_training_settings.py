"""What a training can be asked for besides rate and epochs: averages, precision, parts of steps, changes of images."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.ao.quantization.fake_quantize import FusedMovingAvgObsFakeQuantize
from torch.ao.quantization.observer import MovingAverageMinMaxObserver

from optimize.context import Context
from optimize.data.augment import transform
from optimize.data.random_draws import Draws
from optimize.listener import Silent
from optimize.passes import qat_lowbit
from optimize.passes.qat import QAT, Qat
from optimize.passes.qat_lowbit import QAT_LOWBIT, QatLowbit
from optimize.tasks.classification import CLASSIFICATION
from optimize.training import loop as training
from optimize.training.config import TrainingConfig
from optimize.training.distributed.fake_quantize import Float32FakeQuantize, in_float32
from optimize.training.loop import train
from optimize.training.mixup import mixed
from optimize.training.optimizers import Average, peak_rate, rate
from serve.runtime.errors import UserError
from tests.optimize.training.test_training_loop import FAST, brightness, network
from tests.optimize.workbench import GREY16, parent_of


def plain() -> nn.Sequential:
    """A network whose images know nothing of each other."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 49, 4))


def head_of(module: nn.Sequential) -> torch.Tensor:
    """The weight of the last layer of `plain`."""
    layer = module[3]
    assert isinstance(layer, nn.Linear)
    return layer.weight.detach()


def difference(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max((a.double() - b.double()).abs().max().item() for a, b in pairs)


# --- rate --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 4, 9, 100])
@pytest.mark.parametrize("warm_up", [0.0, 0.2, 0.3, 0.99])
def test_the_rate_of_each_step_is_that_of_torchs_one_cycle(steps, warm_up):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    share = warm_up if warm_up * (steps + 1) != 1 else 0.0
    cycle = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.3, total_steps=steps + 1, pct_start=share, cycle_momentum=False
    )
    for step in range(steps):
        assert rate(step, steps, 0.3, warm_up) == optimizer.param_groups[0]["lr"]
        optimizer.step()
        cycle.step()


def test_a_rate_for_another_batch_size_is_scaled():
    given = {"learning_rate": 0.1, "batch_size": 256}
    assert peak_rate(TrainingConfig(**given)) == 0.1
    assert peak_rate(TrainingConfig(**given, rate_for=64)) == pytest.approx(0.4)
    assert peak_rate(TrainingConfig(**given, rate_for=64, optimizer="adamw")) == pytest.approx(0.2)


@pytest.mark.parametrize(("most", "epochs", "steps"), [(7, 2, 7), (4, 1, 4), (1000, 5, 30)])
def test_a_training_ends_after_its_steps_and_is_judged(most, epochs, steps, monkeypatch):
    rates: list[float] = []
    original = torch.optim.SGD.step

    def spy(self, *arguments, **options):
        rates.append(self.param_groups[0]["lr"])
        return original(self, *arguments, **options)

    monkeypatch.setattr(torch.optim.SGD, "step", spy)
    result = train(network(), brightness(), FAST.model_copy(update={"epochs": 5, "max_steps": most}))
    assert (len(rates), len(result.epochs)) == (steps, epochs)
    assert rates[-1] < 0.1 * max(rates) or steps < 5, "the rate has fallen by then"


# --- parts and precision -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [2, 3, 100])
def test_a_step_in_parts_is_the_step(parts):
    whole, divided = plain(), plain()
    config = FAST.model_copy(update={"optimizer": "adamw", "label_smoothing": 0.1, "clip_norm": 1.0})
    expected = train(whole, brightness(), config)
    seen: list[int] = []
    divided.register_forward_pre_hook(lambda module, given: seen.append(len(given[0])) if module.training else None)
    result = train(divided, brightness(), config.model_copy(update={"accumulate": parts}))
    assert difference(whole, divided) < 1e-5
    assert [epoch.loss for epoch in result.epochs] == pytest.approx([epoch.loss for epoch in expected.epochs], abs=1e-5)
    assert 2 <= min(seen) <= max(seen) == max(2, math.ceil(16 / parts))


def test_a_step_in_bfloat16_computes_in_it_and_keeps_the_weights_and_the_judgement_in_float32():
    module, seen = plain(), set()
    module[0].register_forward_hook(lambda layer, given, out: seen.add((layer.training, out.dtype)))
    train(module, brightness(), FAST.model_copy(update={"precision": "bfloat16"}))
    assert seen == {(True, torch.bfloat16), (False, torch.float32)}
    assert {value.dtype for value in module.state_dict().values()} == {torch.float32}
    reference = plain()
    train(reference, brightness(), FAST)
    assert 0 < difference(module, reference) < 0.05


class Louder(torch.autograd.Function):
    """The tensor itself, whose gradient is multiplied by 2 to a power on its way back, in the gradient's own type."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, power: int) -> torch.Tensor:
        ctx.power = power
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * 2.0**ctx.power, None


class Amplified(nn.Module):
    """`plain`, whose convolution gets gradients of another size on the way, and of the usual one in the end."""

    def __init__(self, power: int) -> None:
        super().__init__()
        self.convolution, *rest = plain()
        self.rest, self.power, self.types = nn.Sequential(*rest), power, set[tuple[bool, torch.dtype]]()
        self.weight.register_hook(lambda gradient: gradient * 2.0**-power)

    @property
    def weight(self) -> torch.Tensor:
        (weight, _) = self.convolution.parameters()
        return weight

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        convolved = self.convolution(images)
        self.types.add((self.training, convolved.dtype))
        return self.rest(Louder.apply(convolved, self.power))


@pytest.mark.parametrize("power", [0, -20])
def test_a_step_in_float16_computes_in_it_and_keeps_gradients_that_it_could_not_hold(power):
    """2^-20 of a gradient is less than FP16 has numbers for, and is there all the same, because the loss is scaled."""
    half, reference = Amplified(power), Amplified(power)
    start = reference.weight.detach().clone()
    train(half, brightness(), FAST.model_copy(update={"precision": "float16"}))
    train(reference, brightness(), FAST)
    assert half.types == {(True, torch.float16), (False, torch.float32)}
    assert {value.dtype for value in half.state_dict().values()} == {torch.float32}
    found, expected = (each.weight.detach() - start for each in (half, reference))
    assert expected.abs().max() > 0.01
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()


def test_a_step_whose_scaled_gradients_go_over_in_float16_is_left_out_and_the_scale_is_halved(monkeypatch, tmp_path):
    """And a training that goes on has the scale that it had: another would leave out other steps."""
    taken: list[int] = []
    step = torch.optim.SGD.step

    def counted(*given: Any, **more: Any) -> Any:
        taken.append(1)
        return step(*given, **more)

    monkeypatch.setattr(torch.optim.SGD, "step", counted)
    config = FAST.model_copy(update={"precision": "float16"})

    def trained(context: Context) -> Amplified:
        module = Amplified(8)
        taken.clear()
        assert len(train(module, context, config).history.points) == 12
        return module

    whole = trained(brightness())
    of_whole = len(taken)
    assert 2 < of_whole < 12, "2^16 times 2^8 is too much for the first steps"
    assert all(value.isfinite().all() for value in whole.state_dict().values())

    class Ending(Silent):
        steps = 0

        def progressed(self, fraction: float, message: str) -> None:
            self.steps += 1
            if self.steps == 8:
                raise KeyboardInterrupt

    context = dataclasses.replace(brightness(), unfinished=tmp_path, checkpoint_seconds=0.0)
    with pytest.raises(KeyboardInterrupt):
        trained(dataclasses.replace(context, listener=Ending()))
    resumed = trained(context)
    assert 0 < len(taken) < of_whole, "of the last five"
    assert all(torch.equal(value, resumed.state_dict()[name]) for name, value in whole.state_dict().items())


def test_images_with_their_channels_last_train_the_same_network():
    colours = dataclasses.replace(GREY16, mean=GREY16.mean * 3, std=GREY16.std * 3)
    context = dataclasses.replace(brightness(), preprocessing=colours)
    formats, reached = [], []

    class Watched(nn.Conv2d):
        def forward(self, images):
            given = super().forward(images)
            if self.training:
                formats.append([each.is_contiguous(memory_format=torch.channels_last) for each in (images, given)])
            return given

    for channels_last in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(Watched(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))
        module.eval()(context.example(2))
        train(module, context, FAST.model_copy(update={"channels_last": channels_last, "max_steps": 3}))
        assert formats == [[channels_last, channels_last]] * 3
        reached.append(module)
        formats.clear()
    assert difference(*reached) < 1e-4


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_qat_trains_in_16_bits(precision, tmp_path):
    context = brightness()
    settings = Qat(epochs=2, batch_size=16, learning_rate=0.01, images=32, augment=False, precision=precision)
    product = QAT.apply(parent_of(network().eval(), context, tmp_path / "parent"), settings, context, tmp_path)
    assert product.precision == "int8"


@pytest.mark.parametrize(
    "quantizers",
    [
        {"weight_quantizer": "lsq", "activation_quantizer": "lsq"},
        {"weight_bits": 2, "weight_quantizer": "ttq", "activation_quantizer": "pact"},
    ],
)
def test_a_training_with_few_bits_computes_in_bfloat16_on_the_grids_of_float32(quantizers, tmp_path, monkeypatch):
    context, seen, losses = brightness(), set(), list[float]()
    settings = QatLowbit(
        epochs=2, batch_size=16, images=32, augment=False, precision="bfloat16", ends_int8=False, min_sqnr=-20.0,
        min_agreement=0.0, **quantizers,
    )  # fmt: skip

    def watched(module, *given, **options):
        layer = module.get_submodule("0")
        layer.register_forward_hook(lambda layer, given, out: seen.add((layer.training, out.dtype)))
        before = {name: value.clone() for name, value in module.named_parameters()}
        result = train(module, *given, **options)
        losses.extend(epoch.loss for epoch in result.epochs)
        assert {value.dtype for value in module.parameters()} == {torch.float32}
        moved = {name for name, value in module.named_parameters() if not torch.equal(value, before[name])}
        assert moved == before.keys() or result.best is None
        weight = layer.weight_fake_quant(layer.weight.bfloat16())
        assert len(weight[0].unique()) <= 2**settings.weight_bits
        return result

    monkeypatch.setattr(qat_lowbit, "train", watched)
    product = QAT_LOWBIT.apply(parent_of(network().eval(), context, tmp_path / "parent"), settings, context, tmp_path)
    assert product.precision in ("int8 (W4A4 executed)", "int8 (ternary A4 executed)")
    assert seen == {(True, torch.bfloat16), (False, torch.float32)}
    assert losses[1] < losses[0]


def test_a_quantizer_in_mixed_precision_is_the_usual_one_in_float32():
    torch.manual_seed(0)
    fused = FusedMovingAvgObsFakeQuantize(
        observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255, averaging_constant=0.1
    )
    ours = copy.deepcopy(fused)
    in_float32(nn.Sequential(ours))
    assert type(ours) is Float32FakeQuantize
    for _ in range(4):
        batch = torch.randn(64, 8).bfloat16().float()
        expected = fused(batch)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = ours(batch.bfloat16())
        assert found.dtype == torch.float32
        assert torch.allclose(found, expected, atol=1e-6)
    for name, value in fused.state_dict().items():
        assert torch.allclose(ours.state_dict()[name].float(), value.float(), rtol=1e-6), name


def test_deterministic_algorithms_are_asked_for_and_given_back(monkeypatch):
    during: list[bool] = []
    judged = training.score_of

    def noting(*given):
        during.append(torch.are_deterministic_algorithms_enabled())
        return judged(*given)

    monkeypatch.setattr(training, "score_of", noting)
    for wanted in (True, False):
        train(network(), brightness(), FAST.model_copy(update={"epochs": 1, "deterministic": wanted}))
    assert during == [True, False]
    assert not torch.are_deterministic_algorithms_enabled()


# --- averages ----------------------------------------------------------------------------------------------------


def test_the_average_is_the_papers_sum_and_leaves_the_weights_and_the_buffers():
    layer = nn.Linear(1, 1, bias=False)
    mean, flag = torch.tensor([0.0]), torch.tensor([1])
    layer.register_buffer("mean", mean)
    layer.register_buffer("flag", flag)
    average = Average(layer, 0.9)
    expected = layer.weight.item()
    for step in range(200):
        layer.weight.data.fill_(float(step))
        mean.fill_(float(step))
        average.update(step)
        decay = min(0.9, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * step
    flag.fill_(0)
    with average.applied():
        assert layer.weight.item() == pytest.approx(expected, rel=1e-5)
        assert [buffer.item() for buffer in layer.buffers()] == [199.0, 0]
    assert layer.weight.item() == 199.0


def test_the_averaged_weights_are_what_is_judged_and_kept():
    steps: list[torch.Tensor] = []
    module = plain()
    start = head_of(module).clone()
    config = FAST.model_copy(update={"epochs": 1, "ema": 0.5, "holdout": 0.25})
    original = torch.optim.SGD.step

    with pytest.MonkeyPatch.context() as patch:

        def spy(self, *arguments, **options):
            original(self, *arguments, **options)
            steps.append(head_of(module).clone())

        patch.setattr(torch.optim.SGD, "step", spy)
        train(module, brightness(), config)
    for number, after in enumerate(steps):
        decay = min(0.5, (1 + number) / (10 + number))
        start = decay * start + (1 - decay) * after
    assert torch.allclose(head_of(module), start, atol=1e-6)
    assert not torch.allclose(head_of(module), steps[-1], atol=1e-6)


# --- images ------------------------------------------------------------------------------------------------------


def test_a_random_crop_is_a_part_of_its_image_of_the_least_area_at_least():
    across = torch.arange(0, 128, 2, dtype=torch.uint8).expand(1, 64, 64)
    batch = torch.cat((across, across.transpose(1, 2))).expand(200, 2, 64, 64)
    changed = transform(batch, Draws(0, 0, torch.arange(200)), crop_scale=0.25, trivial=False).float()
    widths = (changed[:, 0].amax((1, 2)) - changed[:, 0].amin((1, 2)) + 2) / 128
    heights = (changed[:, 1].amax((1, 2)) - changed[:, 1].amin((1, 2)) + 2) / 128
    areas = (widths * heights).numpy()
    assert 0.2 < areas.min() < 0.35
    assert areas.max() > 0.85
    assert abs(np.median(areas) - 0.625) < 0.1, "areas are uniform between a quarter and all"


@pytest.mark.parametrize(("settings", "share"), [({"crop_scale": 0.3}, 0.9), ({"trivial": True}, 0.5)])
def test_what_a_transform_does_to_an_image_is_its_own_and_leaves_the_process_random_state(settings, share):
    batch = torch.randint(0, 256, (40, 3, 16, 16), dtype=torch.uint8)
    options = {"crop_scale": None, "trivial": False, **settings}
    before, rows = torch.get_rng_state(), torch.arange(100, 140)
    whole = transform(batch, Draws(2, 1, rows), **options)
    assert torch.equal(torch.get_rng_state(), before)
    assert (whole.shape, whole.dtype) == (batch.shape, torch.uint8)
    assert (whole != batch).flatten(1).any(1).float().mean() > share
    some = torch.tensor([30, 3])
    assert torch.equal(transform(batch[some], Draws(2, 1, rows[some]), **options), whole[some])
    other = transform(batch, Draws(2, 2, rows), **options)
    assert (other != whole).flatten(1).any(1).float().mean() > share


def test_mixed_images_and_labels_have_the_same_shares():
    labels = torch.tensor([0, 1, 2, 3, 1, 0, 3])
    inputs = nn.functional.one_hot(labels, 4).float().view(7, 4, 1, 1).expand(7, 4, 2, 2)
    images, targets = mixed(inputs, CLASSIFICATION.shares(labels, 4), 0.4, Draws(0, 0, torch.arange(7)))
    assert torch.allclose(images, targets.view(7, 4, 1, 1).expand(7, 4, 2, 2))
    assert torch.allclose(targets.sum(1), torch.ones(7))
    assert torch.equal(targets[6], torch.tensor([0.0, 0.0, 0.0, 1.0]))
    for first in (0, 2, 4):
        own = targets[first, labels[first]].item()
        assert 0 < own < 1
        assert targets[first + 1, labels[first]].item() == pytest.approx(1 - own)


def test_the_shares_of_mixup_are_of_a_beta_distribution():
    labels = torch.arange(8000) % 2
    _, targets = mixed(torch.zeros(8000, 1), CLASSIFICATION.shares(labels, 2), 0.2, Draws(0, 0, torch.arange(8000)))
    shares = targets[::2, 0].numpy()
    # Beta(a, a): mean 1/2, variance 1 / (4 (2 a + 1)).
    assert shares.mean() == pytest.approx(0.5, abs=0.03)
    assert shares.var() == pytest.approx(1 / (4 * 1.4), rel=0.05)


def test_the_settings_of_images_reach_the_network():
    seen: list[torch.Tensor] = []
    context = brightness()
    settings = {"crop_scale": 0.5, "trivial_augment": True, "mixup": 0.3}
    for name, value in [("none", None), *settings.items()]:
        module = plain()
        module.register_forward_pre_hook(lambda layer, given: seen.append(given[0]) if layer.training else None)
        config = FAST.model_copy(update={"epochs": 1, "max_steps": 1, **({name: value} if name != "none" else {})})
        assert len(train(module, context, config).epochs) == 1
    first, *others = seen
    assert all(other.shape == first.shape and not torch.equal(other, first) for other in others)
    assert not torch.equal(others[0], others[2])


@pytest.mark.parametrize(
    "setting",
    [{"ema": 1.0}, {"precision": "float8"}, {"accumulate": 0}, {"max_steps": 0}, {"crop_scale": 1.5}, {"mixup": 0.0}],
)
def test_a_setting_that_cannot_be_is_refused_by_name(setting):
    (name,) = setting
    with pytest.raises(UserError, match=f"Training: {name}: ") as refusal:
        TrainingConfig(**setting)
    assert "\n" not in str(refusal.value)


def test_parts_of_a_step_that_would_have_fewer_than_two_images_are_refused():
    with pytest.raises(
        UserError, match=r"accumulate=9 leaves parts with fewer than the two images.*with batch_size=16$"
    ):
        TrainingConfig(batch_size=16, accumulate=9)
    context = dataclasses.replace(brightness(), processes=2)
    with pytest.raises(
        UserError, match=r"processes: 2 cannot share steps of 16 .* in each of its 8 parts \(accumulate\)$"
    ):
        train(nn.Linear(1, 1), context, TrainingConfig(batch_size=16, accumulate=8))
