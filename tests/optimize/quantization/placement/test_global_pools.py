"""The pool in front of the answer: its integers have a scale of their own, and every engine gives the same ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional

from optimize.lint.base import lint
from optimize.passes.ptq import PTQ, Ptq
from optimize.passes.qat import QAT, Qat
from optimize.quantization.convert import trace_calls
from optimize.quantization.placement.global_pools import free_last_pool
from serve.runtime.card.execution import Execution
from serve.runtime.engines.base import execution_id
from serve.runtime.engines.torchscript import use_int8_kernels
from tests.optimize.certify.test_certify_layers import GRAPHS, TORCH, Made, quantized
from tests.optimize.workbench import noise_context, parent_of, quantizers
from tests.processor import NEEDS_VNNI


class Pooled(nn.Module):
    """Convolutions, an average over 2×2 or 4×4 places, and a layer."""

    def __init__(self, pool: Callable[[torch.Tensor], torch.Tensor], side: int = 4) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 8 // side, 1), nn.ReLU())
        self.pool = pool
        self.head: nn.Module = nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(torch.flatten(self.pool(self.conv(x)), 1))
        return logits


#: Ways to ask for the mean of all places.
POOLS: dict[str, Callable[[], Callable[[torch.Tensor], torch.Tensor]]] = {
    "module": lambda: nn.AdaptiveAvgPool2d(1),
    "window": lambda: nn.AvgPool2d(4),
    "function": lambda: lambda x: functional.adaptive_avg_pool2d(x, (1, 1)),
    "function of a window": lambda: lambda x: functional.avg_pool2d(x, x.size()[2:]),
    "method": lambda: lambda x: x.mean([2, 3]),
    "mean": lambda: lambda x: torch.mean(x, dim=(-1, -2), keepdim=True),
}


def traced(module: nn.Module) -> torch.fx.GraphModule:
    return trace_calls(module.eval(), torch.zeros(2, 1, 16, 16))


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("training", [False, True])
def test_every_way_to_ask_for_the_mean_of_all_places_is_known_and_changes_no_answer(
    name: str, *, training: bool
) -> None:
    torch.manual_seed(0)
    module, images = Pooled(POOLS[name]()), torch.randn(3, 1, 16, 16)
    found = traced(module).train(training)
    with torch.no_grad():
        expected = found(images)
        assert free_last_pool(found, images) == 1
        torch.testing.assert_close(found(images), expected, rtol=1e-5, atol=1e-6)
    assert found.training == training


class Squeezed(nn.Module):
    """Squeeze and excitation: a pool beside which the image goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gate = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        return torch.flatten(x * torch.sigmoid(self.gate(functional.adaptive_avg_pool2d(x, 1))), 1)


@pytest.mark.parametrize(
    "module",
    [
        Squeezed(),
        Pooled(nn.AdaptiveAvgPool2d(2)),
        Pooled(nn.AvgPool2d(3)),  # of 4×4 places
        Pooled(nn.MaxPool2d(4)),
        Pooled(lambda x: x.mean([1, 2])),
        nn.Sequential(nn.Conv2d(1, 4, 16), nn.AdaptiveAvgPool2d(1)),  # of one place
    ],
)
def test_a_pool_that_something_goes_around_or_that_gives_anything_else_stays(module: nn.Module) -> None:
    if isinstance(module, Pooled):
        module.head = nn.Identity()
    assert free_last_pool(traced(module), torch.randn(2, 1, 16, 16)) == 0


@pytest.mark.parametrize("name", ["ptq", "qat"])
def test_its_integers_span_what_it_gives_and_not_what_it_is_given(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    context, module = noise_context(), Pooled(nn.AdaptiveAvgPool2d(1)).eval()
    parent = parent_of(module, context, tmp_path / "parent")
    if name == "ptq":
        PTQ.apply(parent, Ptq(observer="minmax", images=64, min_agreement=0.0), context, tmp_path)
    else:
        QAT.apply(parent, Qat(epochs=1, images=64, batch_size=16, min_agreement=0.0), context, tmp_path)
    (given, zero, _, _), (scale, own_zero, _, high), flat, _ = quantizers(tmp_path)[-4:]
    assert flat[:2] == (scale, own_zero)
    assert (zero, own_zero) == (0, 0)
    assert scale < 0.8 * given
    if name == "ptq":
        with torch.no_grad():
            means = module.conv(context.example(64)).mean((2, 3))
        assert high * scale >= means.max() * 0.99


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A pool of 2×2 places: of four sums one lies halfway between two integers of what it is given."""
    torch.manual_seed(0)
    return quantized(Pooled(nn.AdaptiveAvgPool2d(1), side=2), tmp_path_factory.mktemp("halves"))


@NEEDS_VNNI
@pytest.mark.parametrize("execution", [TORCH, *GRAPHS], ids=execution_id)
def test_all_engines_give_its_integers(halves: Made, execution: Execution) -> None:
    found = halves.checked(execution)
    (pool,) = [layer for layer in found.layers if "pool" in layer.name]
    assert pool.outputs == 64 * len(halves.pixels)
    assert pool.different == 0
    assert all(layer.holds for layer in found.layers)


def test_the_packed_program_averages_floats_and_the_graph_integers(halves: Made) -> None:
    use_int8_kernels()
    kinds = [node.kind() for node in torch.jit.load(str(halves.packed / "model.pt")).inlined_graph.nodes()]
    place = kinds.index("aten::adaptive_avg_pool2d")
    assert kinds.index("aten::dequantize") < place
    assert kinds.index("aten::quantize_per_tensor", place) > place
    model = onnx.load(halves.graph / "model.onnx")
    assert {finding.rule for finding in lint(model, "cpu")} == set()
    (pool,) = [node for node in model.graph.node if node.op_type in ("GlobalAveragePool", "ReduceMean")]
    (before,) = [node for node in model.graph.node if node.output[0] == pool.input[0]]
    behind = [node for node in model.graph.node if pool.output[0] in node.input]
    assert before.op_type == "DequantizeLinear"
    assert [node.op_type for node in behind] == ["QuantizeLinear"]
