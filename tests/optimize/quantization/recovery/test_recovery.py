"""What recovers accuracy without training (scales, rounding, biases, norms), each against arithmetic of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from optimize.errors import NotApplicableError
from optimize.passes.ptq import PTQ, Ptq
from optimize.passes.reestimate import REESTIMATE, Reestimate
from optimize.quantization.ranges import weight_observer
from optimize.quantization.recovery.adaround import Rounding, learn_rounding
from optimize.store.layer_effects import read_effects
from serve.runtime.errors import UserError
from serve.runtime.model_files.program_file import load_program
from tests.narrow import layer
from tests.optimize.tiny_net import tiny
from tests.optimize.workbench import (
    noise_context,
    packed_in_torchscript,
    packed_weights,
    parent_of,
    with_running_statistics,
)
from tests.processor import WIDEST


class Net(nn.Module):
    """A convolution with a ReLU6, a depthwise one, a residual sum, a linear head; channels of very unlike ranges."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, stride=2, padding=1)
        self.clip = nn.ReLU6()
        self.deep = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.wide = nn.Conv2d(8, 8, 1, bias=False)
        self.head = nn.Linear(8, 4)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.clip(self.stem(batch))
        x = x + self.wide(torch.relu(self.deep(x)))
        logits: torch.Tensor = self.head(x.mean((2, 3)))
        return logits


def unlike(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    module = Net().eval()
    with torch.no_grad():
        factors = 10 ** torch.linspace(-1.5, 0.5, 8)
        module.stem.weight.mul_(factors.view(-1, 1, 1, 1))
        module.deep.weight.mul_(factors.flip(0).view(-1, 1, 1, 1))
    return module


CONFIGS: dict[str, dict[str, object]] = {
    "channel": {},
    "channel-mse": {"weight_observer": "mse"},
    "tensor": {"weights": "per-tensor"},
    "tensor-corrected": {"weights": "per-tensor", "bias_correction": True},
    "tensor-adaround": {"weights": "per-tensor", "rounding": "adaround", "rounding_steps": 60},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of what ``ptq`` makes of `unlike` with the settings of this name; made once."""
    root = tmp_path_factory.mktemp("recovery")
    context = noise_context()

    def make(name: str) -> Path:
        if not (root / name).exists():
            parent = parent_of(unlike(), context, root / name / "parent")
            config = Ptq(min_sqnr=-99.0, min_agreement=0.0, images=64, observer="minmax", **CONFIGS[name])
            PTQ.apply(parent, config, context, root / name)
        return root / name

    return make


def layer_outputs(module: nn.Module, images: torch.Tensor) -> dict[str, torch.Tensor]:
    """What each convolution and linear layer of the float network gives, before a ReLU."""
    found: dict[str, torch.Tensor] = {}
    handles = [
        part.register_forward_hook(lambda _, __, out, name=name: found.update({name: out.detach()}))
        for name, part in module.named_modules()
        if isinstance(part, (nn.Conv2d, nn.Linear))
    ]
    with torch.no_grad():
        module(images)
    for handle in handles:
        handle.remove()
    return found


def integer_outputs(folder: Path, images: torch.Tensor) -> list[torch.Tensor]:
    """What each convolution and linear layer of the written reference program gives, in the graph's order."""
    program = load_program(folder / "reference.pt2").module()
    found: list[torch.Tensor] = []

    class Seeing(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> object:
            value = super().run_node(n)
            if n.op == "call_function" and str(n.target).split(".")[1] in ("conv2d", "linear"):
                found.append(value)
            return value

    with torch.no_grad():
        Seeing(program).run(images)
    return found


LAYERS = ("stem", "deep", "wide", "head")


def seen_images() -> torch.Tensor:
    """The 64 images that there are, normalised."""
    return torch.cat([batch for batch, _ in noise_context().calibration(64)]).float().div(255).sub(0.5).div(0.25)


# --- scales of weights -------------------------------------------------------------------------------------------


def test_one_scale_a_tensor_is_that_of_its_largest_weight(made) -> None:
    for name, integers in zip(LAYERS, packed_weights(made("tensor")), strict=True):
        weight = getattr(unlike(), name).weight.detach()
        expected = (weight / (weight.abs().max() / WIDEST)).round()
        assert int((integers.int() - expected.int()).abs().max()) <= 1
        assert (integers.int() != expected.int()).float().mean() < 0.02
    assert all(int(row.abs().max()) == WIDEST for weight in packed_weights(made("channel")) for row in weight)


@pytest.mark.parametrize("whole", [False, True])
def test_a_clipped_weight_has_the_least_squared_error(whole: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4, 8, 3, 3, generator=generator) ** 3
    observer = weight_observer("mse", "per-tensor" if whole else "per-channel", -127, 127)()
    observer(weight)
    scales, zero_points = observer.calculate_qparams()
    assert not zero_points.any()
    assert (len(scales.unique()) == 1) == whole
    rows = (weight.flatten()[None] if whole else weight.flatten(1)).double()
    for row, found in zip(rows, scales.double(), strict=False):

        def error(scale: float, row: torch.Tensor = row) -> float:
            return float((((row / scale).round().clamp(-127, 127) * scale - row) ** 2).sum())

        tried = min(error(float(row.abs().max()) * share / 127) for share in np.linspace(0.02, 1, 1000))
        assert error(float(found)) <= 1.1 * tried
        assert error(float(found)) <= error(float(row.abs().max()) / 127) * (1 + 1e-4)


@pytest.mark.parametrize("whole", [False, True])
def test_a_percentile_of_weights_leaves_one_of_ten_thousand_out(whole: bool) -> None:
    weight = torch.randn(4, 20_000, generator=torch.Generator().manual_seed(0)) ** 3
    observer = weight_observer("percentile", "per-tensor" if whole else "per-channel", -127, 127)()
    observer(weight)
    scales, _ = observer.calculate_qparams()
    rows = weight.flatten()[None] if whole else weight
    beyond = [int((row.abs() > 127.01 * scale).sum()) for row, scale in zip(rows, scales, strict=False)]
    assert beyond == [8] if whole else [2] * 4
    few = weight[:, :9_999]
    observer(few)
    assert (float(observer.max_val.max()) == float(few.abs().max())) != whole, "of fewer it is all of them"


def test_torchs_program_has_the_references_integers_where_weights_are_clipped(made) -> None:
    folder = made("channel-mse")
    clipped = 0
    for (packed, _), reference in zip(packed_in_torchscript(folder / "model.pt"), packed_weights(folder), strict=True):
        assert torch.equal(packed, reference)
        assert int(reference.min()) >= -WIDEST
        clipped += int((reference.abs() == WIDEST).sum()) - len(reference)
    assert clipped > 0


# --- bias correction ---------------------------------------------------------------------------------------------


def test_bias_correction_takes_each_layers_mean_error_away(made) -> None:
    images = seen_images()
    expected = layer_outputs(unlike(), images)
    left = {}
    for name in ("tensor", "tensor-corrected"):
        outputs = integer_outputs(made(name), images)
        assert len(outputs) == len(LAYERS)
        for own, given in zip(LAYERS, outputs, strict=True):
            target = expected[own]
            error = (given - target).mean((0, 2, 3) if given.ndim == 4 else (0,)) / target.std()
            left[name, own] = float(error.abs().max())
    for own in LAYERS:
        assert left["tensor-corrected", own] < 1e-3, own
        assert left["tensor-corrected", own] < left["tensor", own]
    assert max(left["tensor", own] for own in LAYERS) > 0.02


def test_its_effect_on_each_layer_is_written(made) -> None:
    effects = read_effects(made("tensor-corrected"))
    assert [effect.layer for effect in effects] == [name for name in LAYERS for _ in range(2)]
    shifts, ratios = effects[::2], effects[1::2]
    assert all("mean error" in effect.figure and effect.after < 1e-3 < effect.before for effect in shifts)
    assert all("SQNR" in effect.figure and effect.after >= effect.before for effect in ratios)
    assert read_effects(made("tensor")) == ()


def test_a_layer_without_a_bias_is_given_one(made) -> None:
    assert unlike().wide.bias is None
    program = load_program(made("tensor-corrected") / "reference.pt2")
    convolutions = [node for node in program.graph.nodes if "conv2d" in str(node.target)]
    assert all(node.args[2] is not None for node in convolutions)


# --- AdaRound ----------------------------------------------------------------------------------------------------


def correlated(count: int, seed: int) -> torch.Tensor:
    """Inputs whose neighbours and channels are alike, as activations' are: then rounding errors add up."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.rand(count, 1, 10, 10, generator=generator)
    return (base + 0.2 * torch.rand(count, 8, 10, 10, generator=generator)).relu()


@pytest.mark.parametrize("groups", [1, 8])
def test_adaround_beats_the_nearest_on_images_it_has_not_seen(groups: int) -> None:
    torch.manual_seed(0)
    convolution = nn.Conv2d(8, 16, 3, groups=groups)
    weight = convolution.weight.detach().clone()
    scale = weight.abs().amax((1, 2, 3), keepdim=True) / 7  # 4 bits: what rounding does is large
    seen, unseen = correlated(128, 1), correlated(64, 2)
    with torch.no_grad():
        learned = learn_rounding(convolution, [seen], [convolution(seen)], Rounding(scale, -7, 7, steps=300))
        nearest = (weight / scale).round() * scale
        expected = convolution(unseen)
        errors = [
            float((functional.conv2d(unseen, tried, convolution.bias, groups=groups) - expected).square().mean())
            for tried in (learned.weight, nearest)
        ]
    assert errors[0] < 0.7 * errors[1]
    steps = (learned.weight - weight) / scale
    assert float(steps.abs().max()) < 1.0 + 1e-4, "up or down, and no further"
    integers = learned.weight / scale
    assert torch.allclose(integers, integers.round(), atol=1e-3)
    assert float(integers.abs().max()) <= 7 + 1e-3
    assert torch.equal(convolution.weight, weight), "what it was given stays"


def test_steps_that_nothing_takes_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"rounding_steps is 60, but only rounding: adaround uses it; rounding is nearest"
    ):
        Ptq(rounding_steps=60)
    assert Ptq(rounding_steps=60, rounding="adaround").rounding_steps == 60


def test_ptq_packs_the_rounding_that_was_learned(made) -> None:
    folder, plain = made("tensor-adaround"), made("tensor")
    changed = 0
    for name, learned, nearest in zip(LAYERS, packed_weights(folder), packed_weights(plain), strict=True):
        weight = getattr(unlike(), name).weight.detach()
        exact = weight / (weight.abs().max() / WIDEST)
        assert float((learned.float() - exact).abs().max()) < 1.0 + 1e-3
        changed += int((learned != nearest).sum())
    assert changed > 0
    effects = read_effects(folder)
    assert [effect.layer for effect in effects] == list(LAYERS)
    assert all(effect.after <= effect.before for effect in effects)
    assert any(effect.after < 0.9 * effect.before for effect in effects)
    packed = packed_in_torchscript(folder / "model.pt")
    for (own, _), reference in zip(packed, packed_weights(folder), strict=True):
        assert torch.equal(own, reference)


# --- batch norms -------------------------------------------------------------------------------------------------


def test_norms_have_the_statistics_of_the_training_images(tmp_path: Path) -> None:
    module, context = with_running_statistics(tiny(4)), noise_context()
    product = REESTIMATE.apply(parent_of(module, context, tmp_path / "parent"), Reestimate(), context, tmp_path)
    assert Reestimate().images > 64
    assert product.notes == ("statistics of 4 batch norms measured again on 64 training images",)
    state = load_file(tmp_path / "weights.safetensors")
    first, second = layer(module, "stem.1", nn.BatchNorm2d), layer(module, "depthwise.1", nn.BatchNorm2d)
    assert first.running_mean is not None
    assert second.running_mean is not None
    convolution = layer(module, "stem.0", nn.Conv2d)
    with torch.no_grad():
        given = convolution(seen_images())
    assert torch.allclose(state["stem.1.running_mean"], given.mean((0, 2, 3)), atol=1e-5)
    assert torch.allclose(state["stem.1.running_var"], given.var((0, 2, 3)), rtol=1e-4)
    effect = read_effects(tmp_path)[0]
    assert effect.layer == "stem.1"
    assert effect.before == pytest.approx(float(first.running_mean.square().mean().sqrt()))
    assert effect.after == pytest.approx(float(given.mean((0, 2, 3)).square().mean().sqrt()), rel=1e-4)
    # The norm after it saw what the re-estimated one before it gives.
    assert not torch.allclose(state["depthwise.1.running_mean"], second.running_mean, atol=1e-2)
    assert torch.equal(state["stem.0.weight"], convolution.weight)


def test_without_norms_there_is_nothing_to_measure(tmp_path: Path) -> None:
    context = noise_context()
    with pytest.raises(NotApplicableError, match="before fuse"):
        REESTIMATE.apply(parent_of(unlike(), context, tmp_path / "parent"), Reestimate(), context, tmp_path)
