"""ReLU6 behind quantized layers: in the integers' own end, with the answers of the float network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from optimize.context import Context
from optimize.passes.ptq import PTQ, Ptq
from optimize.passes.qat import QAT, Qat
from optimize.quantization.convert import prepare, trace_calls
from optimize.quantization.placement.relu6 import bound_relus
from optimize.quantization.targets import TargetName, target_named
from serve.runtime.engines.torchscript import use_int8_kernels
from tests.optimize.workbench import noise_context, parent_of, quantizers


class Blocks(nn.Module):
    """Every form of a bounded ReLU; the last of them shares its range with what goes far beyond its bound."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3, padding=1)
        self.clip = nn.ReLU6()  # called twice
        self.deep = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.norm = nn.BatchNorm2d(8)
        self.wide = nn.Conv2d(8, 8, 1)
        self.tanh = nn.Hardtanh(0.0, 2.0)
        self.joined = nn.Conv2d(8, 8, 1)
        self.open = nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(16, 4)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        batch = self.clip(self.norm(self.deep(self.clip(self.first(batch)))))
        batch = self.tanh(self.wide(batch))
        bounded = nn.functional.relu6(self.joined(batch))
        batch = torch.cat([bounded, torch.relu(self.open(batch))], dim=1)
        logits: torch.Tensor = self.head(batch.mean((2, 3)))
        return logits


def blocks() -> nn.Module:
    """Half of what each layer gives is beyond its bound: lost, the bounds would change every answer."""
    torch.manual_seed(0)
    module = Blocks().eval()
    with torch.no_grad():
        for name, layer in module.named_children():
            if isinstance(layer, nn.Conv2d):
                layer.weight.mul_(4)
                layer.bias.fill_(40.0 if name == "open" else 4.0)  # type: ignore[union-attr]
    return module


def written(name: str, module: nn.Module, context: Context, folder: Path, target: TargetName = "auto") -> Path:
    folder.mkdir()
    parent: Any = parent_of(module, context, folder / "parent")
    if name == "ptq":
        PTQ.apply(parent, Ptq(observer="minmax", min_sqnr=0.0, target=target), context, folder)
    else:
        QAT.apply(parent, Qat(epochs=1, learning_rate=1e-6, min_sqnr=0.0, target=target), context, folder)
    return folder


@pytest.mark.parametrize(("name", "target"), [("ptq", "auto"), ("qat", "auto"), ("ptq", "x86")])
def test_a_bound_is_the_end_of_the_integers_and_the_answers_stay(name: str, target: TargetName, tmp_path: Path) -> None:
    context, module = noise_context(), blocks()
    folder = written(name, module, context, tmp_path / name, target)
    ends = [((high - zero) * scale, zero) for scale, zero, _, high in quantizers(folder)]
    # In the graph's order: input, first, deep, wide; joined has a range of its own before its ReLU6 and after.
    assert [zero for _, zero in ends[1:4]] == [0, 0, 0]
    for (end, _), bound in zip(ends[1:4], (6.0, 6.0, 2.0), strict=True):
        assert end == pytest.approx(bound, rel=5e-3)
        assert end <= bound * (1 + 1e-6)
    use_int8_kernels()
    program = torch.jit.load(str(folder / "model.pt"))
    images = context.example(16)
    with torch.no_grad():
        wanted, found = module(images), program(images)
        module.clip.max_val = module.tanh.max_val = float("inf")  # type: ignore[union-attr]
        boundless = module(images)
    assert (found - wanted).abs().max() < 0.05 * (boundless - wanted).abs().max()
    # Nothing clamps but where the range is shared with the tensor beyond the bound.
    kinds = [node.kind().partition("::")[2] for node in program.inlined_graph.nodes()]
    narrow = any(high < 255 for *_, high in quantizers(folder))  # torch's kernels need a clamp for each such range
    assert [kind for kind in kinds if kind in ("hardtanh", "relu6", "clamp")[: 2 if narrow else 3]] == ["relu6"]


def test_a_layer_of_the_networks_own_is_not_lost_to_a_relu_in_the_place_of_a_relu6() -> None:
    class Alike(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.first_relu = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.first_relu(nn.functional.relu6(self.first(batch)))
            return found

    torch.manual_seed(0)
    module, images, target = Alike().eval(), torch.randn(2, 1, 8, 8), target_named("auto")
    traced = trace_calls(module, images)
    assert bound_relus(traced, target.post_training("minmax")) == {"first": 6.0}
    with torch.no_grad():  # nothing here is beyond the bound
        torch.testing.assert_close(traced(images), module(images))


class Pooled(nn.Module):
    """A ReLU6 in front of a pool; torch.ao gives all between the convolution and the last layer one range."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.clip = nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU6()
        self.classifier = nn.Sequential(nn.Dropout(0.5), nn.Linear(32, 4))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        pooled = nn.functional.adaptive_avg_pool2d(self.clip(self.norm(self.conv(batch))), (2, 2))
        logits: torch.Tensor = self.classifier(torch.flatten(pooled, 1))
        return logits


def pooled() -> Pooled:
    """Much of what the convolution gives is negative, and much beyond 6."""
    torch.manual_seed(0)
    module = Pooled().eval()
    with torch.no_grad():
        module.conv.weight.mul_(20)
        module.norm.bias.fill_(3.0)
    return module


def test_a_relu6_in_front_of_a_pool_spends_no_integers_on_negatives(tmp_path: Path) -> None:
    context, module = noise_context(), pooled()
    images = context.example(16)
    with torch.no_grad():
        given = module.norm(module.conv(images))
        assert given.min() < -3
        assert given.max() > 9
    folder = written("ptq", module, context, tmp_path / "ptq")
    _, (scale, zero, _, high), *shared, _ = quantizers(folder)
    assert zero == 0
    assert (high - zero) * scale == pytest.approx(6.0, rel=5e-3)
    assert shared, "the pool has the range of what it is given"
    assert {found[:2] for found in shared} == {(scale, zero)}
    use_int8_kernels()
    program = torch.jit.load(str(folder / "model.pt"))
    assert not {"aten::relu6", "aten::hardtanh"} & {node.kind() for node in program.inlined_graph.nodes()}
    with torch.no_grad():
        wanted, found = module(images), program(images)
        module.clip.max_val = float("inf")
        boundless = module(images)
    assert (found - wanted).abs().max() < 0.2 * (boundless - wanted).abs().max(), "the bound is not lost"


@pytest.mark.parametrize(
    ("between", "training", "kept"),
    [
        (nn.MaxPool2d(2), False, False),
        (nn.AvgPool2d(2), False, False),
        (nn.AdaptiveAvgPool2d(7), True, False),
        (nn.Dropout(0.5), False, False),
        (nn.Dropout(0.5), True, True),  # it makes up for what it drops: twice what it is given
        (nn.AvgPool2d(2, divisor_override=2), False, True),
    ],
)
def test_a_bound_stays_a_relu6_where_the_shared_range_may_go_beyond_it(
    between: nn.Module, *, training: bool, kept: bool
) -> None:
    module = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU6(), between, nn.Conv2d(4, 4, 3)).eval()
    target = target_named("x86")
    example = noise_context().example(2)
    traced = trace_calls(module, example).train(training)
    mapping = target.quantization_aware(10) if training else target.post_training("minmax")
    prepared = prepare(traced, mapping, example, target)
    called = [prepared.get_submodule(str(node.target)) for node in prepared.graph.nodes if node.op == "call_module"]
    assert any(type(layer) is nn.ReLU6 for layer in called) == kept


def test_a_layer_that_is_kept_in_float_keeps_its_relu6(tmp_path: Path) -> None:
    context, module = noise_context(), nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU6(), nn.Flatten(), nn.Linear(784, 4))
    with torch.no_grad():
        module.get_parameter("0.weight").mul_(50)
    (tmp_path / "ptq").mkdir()
    parent = parent_of(module.eval(), context, tmp_path / "ptq" / "parent")
    PTQ.apply(parent, Ptq(keep_float=("0",), min_sqnr=0.0), context, tmp_path / "ptq")
    program = torch.jit.load(str(tmp_path / "ptq" / "model.pt"))
    images = context.example(8)
    with torch.no_grad():
        wanted, found = module(images), program(images)
    assert (found - wanted).abs().max() < 0.1 * wanted.abs().max()
