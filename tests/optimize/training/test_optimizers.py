"""SGD and AdamW: what each does where nothing else is said, and that a transformer learns."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torchvision.models.vision_transformer import VisionTransformer

from optimize.data.loading import loader
from optimize.data.splits import hold_out
from optimize.passes.qat import Qat
from optimize.training.config import TrainingConfig
from optimize.training.loop import score_of, train
from optimize.training.optimizers import clip, make_optimizer
from serve.runtime.errors import UserError
from serve.runtime.images.image_preprocessing import normalise
from tests.optimize.workbench import CPU, GREY16, noise, noise_context


@pytest.mark.parametrize("kind", [TrainingConfig, Qat])
def test_the_rate_the_decay_and_the_clipping_that_nobody_sets_are_the_optimizers(kind):
    sgd, adamw = kind(), kind(optimizer="adamw")
    assert sgd.optimizer == "sgd"
    assert adamw.learning_rate == pytest.approx(sgd.learning_rate / 100)
    assert adamw.weight_decay == pytest.approx(sgd.weight_decay * 100)
    assert (sgd.clip_norm, adamw.clip_norm) == (None, 1.0)
    given = kind(optimizer="adamw", learning_rate=0.3, weight_decay=0.0, clip_norm=None)
    assert (given.learning_rate, given.weight_decay, given.clip_norm) == (0.3, 0.0, None)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"optimizer": "adam"}, "optimizer: input should be 'sgd' or 'adamw'"),
        ({"clip_norm": 0.0}, "clip_norm: input should be greater than 0"),
        ({"label_smoothing": 1.0}, "label_smoothing: input should be less than 1"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_in_one_line(setting, message):
    with pytest.raises(UserError, match=message) as refusal:
        TrainingConfig(**setting)
    assert "\n" not in str(refusal.value)


def test_a_step_of_adamw_is_the_papers():
    """Loshchilov & Hutter 2019, algorithm 2: in the first step both means are the gradient's own, and their ratio 1."""
    layer = nn.Linear(3, 2)
    before = {name: value.detach().clone() for name, value in layer.named_parameters()}
    optimizer = make_optimizer(layer, TrainingConfig(optimizer="adamw", learning_rate=0.01, weight_decay=0.5))
    assert optimizer.defaults["fused"], "or it takes several times as long"
    layer.weight.grad, layer.bias.grad = torch.full((2, 3), -4.0), torch.tensor([2.0, -0.5])
    optimizer.step()
    assert torch.allclose(layer.weight, before["weight"] * (1 - 0.01 * 0.5) + 0.01, atol=1e-6)
    assert torch.allclose(layer.bias, before["bias"] - torch.tensor([0.01, -0.01]), atol=1e-6)


def test_a_gradient_that_is_too_long_is_scaled_over_all_parameters_and_a_short_one_is_left():
    layer = nn.Linear(1, 1)
    optimizer = make_optimizer(layer, TrainingConfig())
    layer.weight.grad, layer.bias.grad = torch.tensor([[30.0]]), torch.tensor([40.0])
    clip(optimizer, 60.0)
    assert (layer.weight.grad.item(), layer.bias.grad.item()) == (30.0, 40.0)
    clip(optimizer, None)
    assert layer.bias.grad.item() == 40.0
    clip(optimizer, 5.0)
    assert layer.weight.grad.item() == pytest.approx(3.0, rel=1e-5)
    assert layer.bias.grad.item() == pytest.approx(4.0, rel=1e-5)


def test_the_settings_reach_the_steps(monkeypatch):
    steps = []
    original = torch.optim.AdamW.step

    def spy(self, *arguments, **options):
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        steps.append(math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients)))
        return original(self, *arguments, **options)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    module = nn.Sequential(nn.Flatten(), nn.Linear(256, 4))
    train(module, noise_context(), TrainingConfig(epochs=1, batch_size=16, optimizer="adamw", clip_norm=1e-3))
    assert steps
    assert max(steps) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("share", [0.0, 0.25])
def test_smoothed_labels_are_shared_among_all_classes(share):
    """Szegedy et al. 2016 (arXiv:1512.00567), section 7: the label keeps 1 − ε, and ε is spread evenly."""
    torch.manual_seed(0)
    context = noise_context(train=noise(40))
    module = nn.Sequential(nn.Flatten(), nn.Linear(256, 4))
    settings = {"epochs": 1, "batch_size": 64, "learning_rate": 1e-12, "augment": False, "holdout": 0.25}
    result = train(module, context, TrainingConfig(**settings, label_smoothing=share))
    fit, _ = hold_out(context.data.train, 0.25, 0)
    ((images, labels),) = loader(fit, GREY16, batch_size=64, device=CPU)
    with torch.no_grad():
        chances = module(normalise(images, GREY16, CPU, torch.float32)).softmax(1)
    targets = torch.full((len(labels), 4), share / 4)
    targets[torch.arange(len(labels)), labels] += 1 - share
    assert result.epochs[0].loss == pytest.approx(float(-(targets * chances.log()).sum(1).mean()), rel=1e-4)


def test_a_transformer_learns_the_digits_with_adamw_and_no_other_setting_of_the_optimizer(digits, digits_context):
    torch.manual_seed(0)
    module = VisionTransformer(
        image_size=16, patch_size=8, num_layers=2, num_heads=4, hidden_dim=64, mlp_dim=128, num_classes=10
    )
    module.conv_proj = nn.Conv2d(1, 64, 8, 8)  # the images are grey
    train(module, digits_context, TrainingConfig(epochs=5, batch_size=32, optimizer="adamw", augment=False))
    assert score_of(module, digits_context.evaluation(256, CPU), digits_context) > 0.8
