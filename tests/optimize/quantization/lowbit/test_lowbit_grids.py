"""The quantizers of fewer bits against their papers' formulas, written out in numpy: grids, values, gradients."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
import torch
from torch import fx, nn
from torch.ao.quantization import FakeQuantizeBase

from optimize.quantization.lowbit.inputs import DorefaInput, Grid, InputQuantizer, LsqInput, PactInput, put_before
from optimize.quantization.lowbit.weights import (
    WEIGHT_QUANTIZERS,
    BalancedWeight,
    DorefaWeight,
    LsqWeight,
    TtqWeight,
    TwnWeight,
    WeightQuantizerName,
    XnorWeight,
)

BITS = {"lsq": 4, "dorefa": 4, "twn": 2, "ttq": 2, "xnor": 1, "balanced": 1}


def weights(*shape: int, seed: int = 0) -> torch.Tensor:
    """Weights whose channels are of different sizes."""
    generator = torch.Generator().manual_seed(seed)
    own = torch.randn(*shape, generator=generator)
    return own * torch.linspace(0.05, 0.5, shape[0]).view(-1, *(1,) * (len(shape) - 1))


def gradients(module: nn.Module, given: torch.Tensor) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """What a module gives, the gradients of its input and of its parameters, for one of 1, 2, 3 …"""
    own = given.clone().requires_grad_()
    found = module(own)
    outer = torch.arange(1.0, found.numel() + 1).view_as(found)
    found.backward(outer)
    assert own.grad is not None
    learned = {name: p.grad.numpy() for name, p in module.named_parameters() if p.grad is not None}
    return found.detach().numpy().astype(np.float64), own.grad.numpy(), learned


def outer_of(values: np.ndarray) -> np.ndarray:
    return np.arange(1.0, values.size + 1).reshape(values.shape)


@pytest.mark.parametrize("name", get_args(WeightQuantizerName))
@pytest.mark.parametrize("granularity", ["per-channel", "per-tensor"])
def test_a_weights_integers_are_what_training_computes_with(name: WeightQuantizerName, granularity) -> None:
    weight = weights(6, 4, 3, 3)
    fake = WEIGHT_QUANTIZERS[name](BITS[name], 6, granularity)
    assert isinstance(fake, FakeQuantizeBase)
    fake.start(weight)
    codes = fake.codes(weight)
    assert torch.equal(codes.integers, codes.integers.round())
    assert codes.low <= codes.integers.min()
    assert codes.integers.max() <= codes.high
    assert torch.allclose(fake(weight.requires_grad_()), codes.value, rtol=1e-6, atol=0)
    fake.disable_fake_quant()
    assert fake(weight) is weight
    half = fake.enable_fake_quant() or fake(weight.detach().bfloat16())
    assert half.dtype == torch.bfloat16


@pytest.mark.parametrize("bits", range(2, 8))
def test_uniform_weights_have_2_to_the_bits_integers(bits: int) -> None:
    dense = torch.linspace(-1, 1, 4096).view(1, -1)
    lsq, dorefa = LsqWeight(bits, 1), DorefaWeight(bits, 1)
    lsq.step.data.fill_(1.0 / (1 << (bits - 1)))
    half = 1 << (bits - 1)
    assert np.unique(lsq.codes(dense).integers).tolist() == list(range(-half, half))
    odd = np.unique(dorefa.codes(dense).integers)
    assert odd.tolist() == list(range(1 - 2 * half, 2 * half, 2))
    assert len(odd) == 2**bits


@pytest.mark.parametrize("name", ["twn", "ttq"])
def test_ternary_weights_have_3_integers_a_channel(name: WeightQuantizerName) -> None:
    weight = weights(8, 16, 3, 3)
    fake = WEIGHT_QUANTIZERS[name](2, 8, "per-channel")
    fake.start(weight)
    for row in fake.codes(weight).integers.flatten(1):
        assert len(np.unique(row)) == 3
    assert 0 in fake.codes(weight).integers


@pytest.mark.parametrize("name", ["xnor", "balanced"])
def test_binary_weights_have_2_integers_a_channel(name: WeightQuantizerName) -> None:
    weight = weights(8, 16, 3, 3)
    weight[0, 0] = 0.0
    integers = WEIGHT_QUANTIZERS[name](1, 8, "per-channel").codes(weight).integers
    for row in integers.flatten(1):
        assert np.unique(row).tolist() == [-1, 1]


def test_lsq_is_its_papers_forward_and_backward() -> None:
    weight = weights(3, 40).double().float()
    fake = LsqWeight(3, 3)
    fake.step.data.copy_(torch.tensor([0.02, 0.1, 0.2]))
    found, given, learned = gradients(fake, weight)
    v, s = weight.double().numpy(), fake.step.detach().double().numpy()[:, None]
    inside = (v / s > -4) & (v / s < 3)
    assert inside.any()
    assert (~inside).any()
    expected = np.clip(np.round(v / s), -4, 3) * s
    assert np.allclose(found, expected, rtol=1e-5)
    outer = outer_of(v)
    assert np.allclose(given, outer * inside)
    by_step = np.where(inside, np.round(v / s) - v / s, np.clip(v / s, -4, 3))
    g = 1 / np.sqrt(40 * 3)  # N of a channel, Qp of 3 bits
    assert np.allclose(learned["step"], (outer * by_step).sum(1) * g, rtol=1e-4)


def test_one_step_for_a_layer_gets_all_gradients() -> None:
    weight = weights(3, 40)
    fake = LsqWeight(3, 3, "per-tensor")
    fake.step.data.fill_(0.07)
    _, _, learned = gradients(fake, weight)
    v, s = weight.double().numpy(), float(fake.step.detach())
    inside = (v / s > -4) & (v / s < 3)
    by_step = np.where(inside, np.round(v / s) - v / s, np.clip(v / s, -4, 3))
    assert np.allclose(learned["step"], [(outer_of(v) * by_step).sum() / np.sqrt(120 * 3)], rtol=1e-4)


def test_lsq_starts_at_the_step_of_the_least_squared_error() -> None:
    weight = weights(4, 200)
    fake = LsqWeight(4, 4)
    fake.start(weight)
    for row, step in zip(weight.double().numpy(), fake.step.detach().double().numpy(), strict=True):

        def error(s: float, row=row) -> float:
            return float(((np.clip(np.round(row / s), -8, 7) * s - row) ** 2).sum())

        tried = [error(s) for s in np.abs(row).max() / 7.5 * np.arange(1, 129) / 128]
        assert error(step) == pytest.approx(min(tried), rel=1e-3)


def test_dorefa_is_equation_9_times_the_layers_size() -> None:
    weight = weights(4, 50)
    found, given, _ = gradients(DorefaWeight(3, 4), weight)
    bent = np.tanh(weight.double().numpy())
    most = np.abs(bent).max()
    expected = (2 * np.round((bent / (2 * most) + 0.5) * 7) / 7 - 1) * most
    assert np.allclose(found, expected, atol=1e-6)
    others = np.abs(bent) < most  # the largest is divided by itself
    assert np.allclose(given[others], (outer_of(bent) * (1 - bent**2))[others], rtol=1e-4)


def test_ternary_weight_networks_keep_what_is_above_seven_tenths_of_the_mean() -> None:
    weight = weights(5, 60)
    found, given, _ = gradients(TwnWeight(2, 5), weight)
    w = weight.double().numpy()
    kept = np.abs(w) > 0.7 * np.abs(w).mean(1, keepdims=True)
    scale = (np.abs(w) * kept).sum(1, keepdims=True) / kept.sum(1, keepdims=True)
    assert np.allclose(found, np.sign(w) * kept * scale, rtol=1e-5)
    assert np.array_equal(given, outer_of(w))


def test_a_channel_of_zeros_stays_zero() -> None:
    weight = torch.zeros(2, 8)
    for name, kind in WEIGHT_QUANTIZERS.items():
        fake = kind(BITS[name], 2, "per-channel")
        fake.start(weight)
        assert fake(weight).isfinite().all()
        assert fake(weight).abs().max() <= 1e-6


def test_trained_ternary_quantization_has_its_papers_gradients() -> None:
    weight = weights(5, 60)
    fake = TtqWeight(2, 5)
    fake.scales.data.copy_(torch.tensor([0.3, 0.2]))
    found, given, learned = gradients(fake, weight)
    w = weight.double().numpy()
    up, down = w > 0.05 * np.abs(w).max(), w < -0.05 * np.abs(w).max()
    assert np.allclose(found, 0.3 * up - 0.2 * down, atol=0.3 / 126 + 1e-6)  # 0.2 is a whole number of 63rds of 0.3
    outer = outer_of(w)
    assert np.allclose(given, outer * np.where(up, 0.3, np.where(down, 0.2, 1.0)), rtol=1e-5)
    assert np.allclose(learned["scales"], [outer[up].sum(), -outer[down].sum()], rtol=1e-5)
    fake.start(weight)
    assert np.allclose(fake.scales.detach().numpy(), [w[up].mean(), -w[down].mean()], rtol=1e-5)


def test_xnor_is_the_sign_times_the_mean_and_its_gradient_goes_through_both() -> None:
    weight = weights(5, 60) * 4
    found, given, _ = gradients(XnorWeight(1, 5), weight)
    w = weight.double().numpy()
    mean, sign = np.abs(w).mean(1, keepdims=True), np.where(w >= 0, 1.0, -1.0)
    assert (np.abs(w) > 1).any()
    assert np.allclose(found, sign * mean, rtol=1e-5)
    outer = outer_of(w)
    expected = outer * mean * (np.abs(w) <= 1) + sign * (outer * sign).sum(1, keepdims=True) / 60
    assert np.allclose(given, expected, rtol=1e-4, atol=1e-3)


def test_balanced_weights_are_the_signs_around_their_mean() -> None:
    weight = weights(5, 60) + 0.2
    found, _, _ = gradients(BalancedWeight(1, 5), weight)
    w = weight.double().numpy()
    centred = w - w.mean(1, keepdims=True)
    expected = np.where(centred >= 0, 1.0, -1.0) * np.abs(centred).mean(1, keepdims=True)
    assert np.allclose(found, expected, rtol=1e-4)
    assert (np.abs((found > 0).mean(1) - 0.5) < 0.2).all()
    assert (XnorWeight(1, 5).codes(weight).integers[0] > 0).all(), "or balancing would change nothing"


@pytest.mark.parametrize("kind", [LsqInput, PactInput, DorefaInput])
@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("bits", [1, 2, 4, 7])
def test_inputs_have_2_to_the_bits_values_and_0_is_one_of_them(
    kind: type[InputQuantizer], zero: int, bits: int
) -> None:
    levels = 1 << bits
    zero = min(zero, levels // 2)
    fake = kind(Grid(0.25, zero, levels))
    dense = torch.linspace(-40, 40, 20_001).view(1, -1)
    expected = [(integer - zero) * 0.25 for integer in range(levels)]
    assert np.unique(fake(dense).detach().numpy()).tolist() == expected
    assert fake.grid == Grid(0.25, zero, levels)


@pytest.mark.parametrize("zero", [0, 1])
def test_lsq_of_inputs_counts_one_images_features(zero: int) -> None:
    """What has zero-point 0 is never negative."""
    fake = LsqInput(Grid(0.5, zero, 4))
    given = torch.linspace(-2 if zero else 0.01, 4, 60).view(2, 30)
    found, passed, learned = gradients(fake, given)
    x, low, high = given.double().numpy(), -zero, 3 - zero
    inside = (x / 0.5 > low) & (x / 0.5 < high)
    assert (~inside).any()
    assert np.allclose(found, np.clip(np.round(x / 0.5), low, high) * 0.5)
    assert np.allclose(passed, outer_of(x) * inside)
    by_step = np.where(inside, np.round(x / 0.5) - x / 0.5, np.clip(x / 0.5, low, high))
    assert np.allclose(learned["learned"], [(outer_of(x) * by_step).sum() / np.sqrt(30 * high)], rtol=1e-4)


def test_pact_learns_from_what_lies_beyond_its_end() -> None:
    fake = PactInput(Grid(0.5, 0, 8))  # ends at 3.5
    given = torch.linspace(-1, 6, 70).view(2, 35)
    found, passed, learned = gradients(fake, given)
    x, outer = given.double().numpy(), outer_of(given.numpy())
    assert np.allclose(found, np.round(np.clip(x, 0, 3.5) / 0.5) * 0.5)
    assert np.allclose(passed, outer * ((x >= 0) & (x < 3.5)))
    assert np.allclose(learned["alpha"], [outer[x >= 3.5].sum()])


def test_an_optimizer_that_steps_too_far_leaves_a_positive_step() -> None:
    lsq, given = LsqInput(Grid(0.5, 0, 4)), torch.rand(2, 8)
    lsq.learned.data.fill_(-1.0)
    assert lsq(given).isfinite().all()
    assert lsq.step() > 0


def test_what_rounds_a_layers_input_takes_no_name_of_another_layer() -> None:
    class Alike(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.conv_input = nn.Conv2d(1, 1, 1), nn.Conv2d(1, 1, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.conv(self.conv_input(x))
            return found

    module, images = Alike(), torch.randn(2, 1, 4, 4)
    traced = fx.symbolic_trace(module)
    (placed,) = put_before(traced, {"conv": None}, lambda _: nn.Identity())
    assert isinstance(traced.get_submodule(placed), nn.Identity)
    torch.testing.assert_close(traced(images), module(images))
