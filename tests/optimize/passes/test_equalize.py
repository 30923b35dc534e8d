"""``equalize``: the same answers from weights whose channels reach equally far."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from torchvision.models.mobilenetv2 import MobileNetV2

from optimize.errors import NotApplicableError, PassError
from optimize.passes.equalize import EQUALIZE, Equalize, _bounded
from optimize.passes.ptq import PTQ, Ptq
from optimize.quantization.recovery.concatenations import FIGURE, level
from optimize.quantization.recovery.equalization import equalize, pairs
from optimize.store.layer_effects import read_effects
from optimize.tracing.folding import fuse_module
from optimize.tracing.trace import trace
from tests.narrow import layer
from tests.optimize.quantization.recovery.test_recovery import unlike
from tests.optimize.workbench import (
    applied,
    decibels,
    noise_context,
    parent_of,
    quantizers,
    run,
    with_running_statistics,
)


def weight_of(module: nn.Module) -> torch.Tensor:
    assert isinstance(module, nn.Conv2d | nn.Linear)
    return module.weight.detach()


def ranges(module: nn.Module) -> torch.Tensor:
    return weight_of(module).flatten(1).abs().amax(1)


class Chain(nn.Module):
    """Every kind of neighbour: plain, bounded, depthwise, grouped, behind a pool; then a residual and a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(1, 8, 3, padding=1)
        self.two = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.three = nn.Conv2d(8, 12, 1)
        self.four = nn.Conv2d(12, 8, 1, groups=4, bias=False)
        self.inner = nn.Conv2d(8, 8, 1)
        self.after = nn.Conv2d(8, 8, 1)
        self.left, self.right = nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 1)
        self.fc, self.head = nn.Linear(8, 6), nn.Linear(6, 4)
        self.clip, self.pool = nn.ReLU6(), nn.MaxPool2d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu6(self.two(self.clip(self.one(x))))
        x = torch.relu(self.four(self.pool(functional.relu(self.three(x)))))
        x = x + self.inner(x)
        x = torch.cat([self.left(y := self.after(x)), self.right(y)], 1)
        logits: torch.Tensor = self.head(torch.relu(self.fc(x.mean((2, 3)))))
        return logits


def chain(seed: int = 0) -> Chain:
    torch.manual_seed(seed)
    module = Chain().eval()
    with torch.no_grad():
        for child in module.children():
            if isinstance(child, nn.Conv2d | nn.Linear):
                factors = 10 ** (2 * torch.rand(len(child.weight)) - 1)
                child.weight.mul_(factors.view(-1, *[1] * (child.weight.ndim - 1)))
                if child.bias is not None:
                    child.bias.uniform_(-1, 3)
    return module


def test_pairs_are_those_that_nothing_else_sees() -> None:
    found = [(pair.first, pair.second, pair.bound is not None) for pair in pairs(trace(chain()))]
    assert found == [
        ("one", "two", True),
        ("two", "three", True),
        ("three", "four", False),
        ("fc", "head", False),
    ]


def test_a_layer_that_is_called_twice_or_whose_weight_is_tied_is_left_alone() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Conv2d(2, 2, 1) for _ in range(3))
            self.c.weight = self.b.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(torch.relu(self.b(torch.relu(self.a(self.a(x))))))

    assert pairs(trace(Twice())) == []


def test_answers_stay_and_ranges_become_alike() -> None:
    module = chain()
    images = 3 * torch.randn(16, 1, 16, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = module(images)
        assert (module.one(images) > 6).float().mean() > 0.05, "the bounds of the ReLU6 are at work"
        equal, found = _bounded(copy.deepcopy(module))
        assert torch.allclose(equal(images), expected, atol=1e-6 * float(expected.abs().max()))
        effects = equalize(equal, found)
        assert float((equal(images) - expected).abs().max()) < 1e-4 * float(expected.abs().max())
    for first, second in (("one", "two"), ("three", "four")):
        out = ranges(equal.get_submodule(first))
        weight = weight_of(equal.get_submodule(second))
        if second == "two":
            into = ranges(equal.get_submodule(second))
        else:  # of 4 groups, each of 3 inputs and 2 outputs
            into = torch.stack([weight[2 * (i // 3) : 2 * (i // 3) + 2, i % 3].abs().max() for i in range(12)])
        assert torch.allclose(out, into.to(out), rtol=2e-3), (first, second)
    by_layer = {effect.layer: effect for effect in effects}
    assert by_layer["one"].before == pytest.approx(float(ranges(module.one).max() / ranges(module.one).median()))
    assert by_layer["one"].after == pytest.approx(
        float(ranges(equal.get_submodule("one")).max() / ranges(equal.get_submodule("one")).median())
    )
    assert by_layer["two"].after < 0.5 * by_layer["two"].before
    assert torch.equal(weight_of(equal.get_submodule("inner")), module.inner.weight)


def test_layers_of_the_networks_own_may_have_the_names_of_bounds() -> None:
    class Alike(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.one_bound, self.two = (nn.Conv2d(1, 1, 1) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(functional.relu6(self.one(torch.sigmoid(self.one_bound(x)))))

    module, images = Alike().eval(), 20 * torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        module.one.weight.fill_(10.0)
        module.two.weight.fill_(0.1)
        equal, found = _bounded(copy.deepcopy(module))
        equalize(equal, found)
        assert float(weight_of(equal.get_submodule("one"))) == pytest.approx(1.0)
        torch.testing.assert_close(equal(images), module(images))


def test_a_dead_channel_changes_nothing_and_breaks_nothing() -> None:
    module = chain()
    with torch.no_grad():
        module.one.weight[3] = 0
        module.three.weight[:, 5] = 0
    images = torch.randn(4, 1, 16, 16)
    equal, found = _bounded(copy.deepcopy(module))
    equalize(equal, found)
    with torch.no_grad():
        expected = module(images)
        assert torch.allclose(equal(images), expected, atol=1e-4 * float(expected.abs().max()))
    assert all(parameter.isfinite().all() for parameter in equal.parameters())


def test_in_mobilenet_v2_each_expansion_depthwise_and_projection_are_pairs() -> None:
    torch.manual_seed(0)
    module = with_running_statistics(MobileNetV2(num_classes=4, width_mult=0.25, dropout=0.0))
    images = torch.randn(2, 3, 32, 32)
    fused = fuse_module(module, images)
    equal, found = _bounded(copy.deepcopy(fused))
    # 17 blocks: in each the depthwise layer with the projection, in 16 the expansion with the depthwise layer. At this
    # width a residual leads around the first block, so that the stem has none; the last projection feeds one layer.
    depthwise = [pair for pair in found if layer(fused, pair.first, nn.Conv2d).groups > 1]
    assert len(depthwise) == 17
    assert sum(layer(fused, pair.second, nn.Conv2d).groups > 1 for pair in found) == 16
    assert len(found) == 17 + 16 + 1
    equalize(equal, found)
    with torch.no_grad():
        expected = fused(images)
        assert float((equal(images) - expected).abs().max()) < 1e-4 * float(expected.abs().max())


def test_a_child_finds_the_weights_with_their_bounds(tmp_path: Path) -> None:
    module, context = chain(), noise_context()
    EQUALIZE.apply(parent_of(module, context, tmp_path / "parent"), Equalize(), context, tmp_path)
    assert EQUALIZE.rebuild is not None
    again = EQUALIZE.rebuild(chain(seed=5), context.example())
    again.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    images = 3 * torch.randn(16, 1, 16, 16)
    with torch.no_grad():
        expected = module(images)
        assert torch.allclose(again(images), expected, atol=1e-4 * float(expected.abs().max()))


def test_it_stands_between_fuse_and_ptq(made, trained, digits_context) -> None:
    equal, packed = made("fuse", "equalize"), made("fuse", "equalize", "ptq")
    batch = digits_context.example(8)
    with torch.no_grad():
        expected = trained.module()(batch)
        assert torch.allclose(equal.module()(batch), expected, atol=1e-3 * float(expected.abs().max()))
    assert torch.allclose(run(equal, batch), expected, atol=1e-3 * float(expected.abs().max()))
    assert packed.card.notes[0].startswith("5 quantized layers")


def test_its_effect_on_each_layer_is_written(tmp_path: Path) -> None:
    module, context = unlike(), noise_context()
    product = EQUALIZE.apply(parent_of(module, context, tmp_path / "parent"), Equalize(), context, tmp_path)
    assert "pairs of layers equalized" in product.notes[0]
    assert "ReLU6" not in "".join(product.notes), "its only ReLU6 feeds two"
    assert {effect.layer for effect in read_effects(tmp_path)} == {"deep", "wide"}


def test_quantized_the_largest_bound_is_the_end_of_the_range(tmp_path: Path) -> None:
    module, context = chain(), noise_context()
    equal, found = _bounded(module)
    equalize(equal, found)
    bounds = float(equal.get_buffer("one_bound").max())
    with torch.no_grad():
        bias = layer(equal, "one", nn.Conv2d).bias
        assert bias is not None
        bias.add_(1000)  # far beyond
    PTQ.apply(
        parent_of(equal, context, tmp_path / "parent"),
        Ptq(observer="minmax", min_sqnr=-99, min_agreement=0),
        context,
        tmp_path,
    )
    scale, zero, _, high = quantizers(tmp_path)[1]
    assert (high - zero) * scale == pytest.approx(bounds, rel=5e-3)


def test_before_fuse_there_is_nothing_to_equalize(tmp_path: Path) -> None:
    context = noise_context()
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3)).eval()
    with pytest.raises(NotApplicableError, match="fuse"):
        EQUALIZE.apply(parent_of(module, context, tmp_path / "parent"), Equalize(), context, tmp_path)


class Skips(nn.Module):
    """Features of very different ranges are joined; one of the small ones has another reader."""

    def __init__(self, *, fixed: bool = False) -> None:
        super().__init__()
        self.wide, self.small = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(1, 4, 3, padding=1)
        self.below, self.after = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(16, 8, 3, padding=1)
        self.up, self.head = nn.Upsample(scale_factor=2), nn.Linear(8, 4)
        self.fixed = fixed
        with torch.no_grad():
            for layer, factor in ((self.small, 1e-3), (self.below, 1.0)):
                layer.weight.mul_(factor)
                assert layer.bias is not None
                layer.bias.mul_(0)
            self.after.weight[:, 8:].mul_(1e3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        small = torch.relu(self.small(x))
        if self.fixed:
            small = small + 1e-4  # a sum cannot take a factor
        below = self.up(self.below(functional.max_pool2d(small, 2)))
        joined = torch.relu(torch.cat((torch.relu(self.wide(x)), small, below), 1))
        logits: torch.Tensor = self.head(torch.relu(self.after(joined)).mean((2, 3)))
        return logits


def test_tensors_of_very_different_ranges_that_are_joined_get_similar_ones_and_int8_keeps_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, context = Skips().eval(), noise_context()
    images = context.example(16)
    parent = parent_of(module, context, tmp_path / "parent")
    made = applied(EQUALIZE, Equalize(), parent, context, tmp_path / "equalized")
    with torch.no_grad():
        expected = module(images)
    torch.testing.assert_close(run(made, images), expected, rtol=1e-6, atol=1e-6)
    (effect,) = [effect for effect in read_effects(made.folder) if effect.figure == FIGURE]
    assert effect.before > 500
    assert effect.after < 4
    levelled = trace(copy.deepcopy(module))
    level(levelled, images)
    with pytest.raises(PassError, match="this is broken") as refused:
        applied(PTQ, Ptq(images=16), parent, context, tmp_path / "refused")
    # The proposals are tried below.
    held = re.search(
        r"layers lose most: after \((-?[\d.]+) dB\).* this holds: equalize before it, ([\d.]+) dB; or "
        r"keep_float: \[after\], ([\d.]+) dB$",
        str(refused.value),
    )
    assert held, refused.value
    assert float(held[1]) < 20
    mixed = applied(PTQ, Ptq(images=16, keep_float=["after"]), parent, context, tmp_path / "mixed")
    assert decibels(expected, run(mixed, images)) == pytest.approx(float(held[3]), abs=2)
    base = parent_of(levelled, context, tmp_path / "levelled")
    quantized = applied(PTQ, Ptq(images=16), base, context, tmp_path / "int8")
    assert decibels(expected, run(quantized, images)) > 30


def test_what_a_sum_reads_is_left_as_it_is() -> None:
    torch.manual_seed(0)
    module = trace(Skips(fixed=True).eval())
    before = copy.deepcopy(module.state_dict())
    assert level(module, torch.rand(4, 1, 16, 16)) == []
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
