"""A tanh or a sigmoid in front of a layer with weights: it has all 8 bits, and every engine sums its products."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional

from optimize.errors import PassError
from optimize.lint.base import lint
from serve.runtime.card.execution import Execution
from serve.runtime.device.cpu_integers import ANY_X86
from serve.runtime.engines.base import execution_id
from tests.optimize.certify.test_certify_layers import GRAPHS, TORCH, Made, quantized
from tests.optimize.workbench import Between, is_meant, quantizers


class Bounded(nn.Module):
    """All that has a known range: before a layer, on its way there, and before a product."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.tanh, self.sigmoid = nn.Conv2d(1, 64, 3), nn.Tanh(), nn.Sigmoid()
        self.second, self.third = nn.Conv2d(64, 64, 3, stride=2), nn.Conv2d(64, 64, 3, stride=2)
        self.gate, self.last = nn.Conv2d(64, 64, 1), nn.Linear(64 * 4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.tanh(5 * self.first(x)))
        x = self.third(functional.hardsigmoid(x + 3))
        x = x * self.sigmoid(self.gate(x))
        return self.last(torch.flatten((x + 5).sigmoid(), 1))


def summing() -> Bounded:
    """One whose weights, and what they read, are large and of one sign: pairs of products do not fit into 16 bits."""
    torch.manual_seed(0)
    module = Bounded()
    for layer in (module.second, module.third, module.last):
        layer.weight.data.abs_().clamp_(min=0.1)
    return module


@pytest.fixture(scope="module")
def bounded(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return quantized(summing(), tmp_path_factory.mktemp("bounded"), "x86")


@pytest.mark.parametrize("execution", [TORCH, *GRAPHS], ids=execution_id)
def test_no_engine_loses_a_product_of_what_has_a_known_range(bounded: Made, execution: Execution) -> None:
    found = bounded.checked(execution)
    assert found.layers
    assert [layer for layer in found.layers if layer.cause is not None and layer.cause.why != "rounding"] == []


def test_a_graph_of_which_sums_would_saturate_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optimize.quantization.targets.WEIGHT_MAX", 127)
    with pytest.raises(PassError, match="its input reaches 255 and its weight 127: two such products do not fit"):
        quantized(Bounded(), tmp_path, "x86")


def test_activations_have_eight_bits_and_weights_seven(bounded: Made) -> None:
    assert {high for _, _, _, high in quantizers(bounded.packed)} == {255}
    assert widest(bounded) == 63
    assert lint(onnx.load(bounded.graph / "model.onnx"), "x86") == ()


def widest(made: Made) -> int:
    """The largest integer of the graph's weights."""
    graph = onnx.load(made.graph / "model.onnx").graph
    stored = [onnx.numpy_helper.to_array(each) for each in graph.initializer if each.data_type == onnx.TensorProto.INT8]
    return max(int(abs(each.astype(int)).max()) for each in stored if each.ndim > 1)


class Together(nn.Module):
    """Gates and what is not one, put together, and multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other, self.head = nn.Conv2d(1, 8, 3), nn.Conv2d(1, 8, 3), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = 3 * self.first(x)
        gated = torch.cat([given[:, :4].sigmoid(), given[:, 4:]], 1)
        return self.head((gated * self.other(x)).mean((2, 3)))


@pytest.mark.parametrize(
    "kind",
    [
        lambda: Between(lambda x: x * torch.sigmoid(1.702 * x)),
        lambda: Between(lambda x: x * torch.sigmoid(functional.layer_norm(x, x.shape[1:]))),
        Together,
    ],
    ids=["gelu by a sigmoid", "of a norm", "put together"],
)
def test_what_a_known_range_does_not_hold_is_not_cut_off(kind, tmp_path) -> None:
    torch.manual_seed(0)
    is_meant(kind(), tmp_path, ANY_X86, above=30)


@pytest.mark.peers
def test_the_second_front_end_gives_no_operator_a_range_that_is_known(tmp_path: Path) -> None:
    """Its quantizer knows none of them: they give floats, which the quantizer of what reads them rounds."""
    pytest.importorskip("torchao")
    made = quantized(summing(), tmp_path, "x86", front_end="pt2e")
    assert {high for _, _, _, high in quantizers(made.packed)} == {255}
    assert widest(made) == 63
    for execution in GRAPHS:
        found = made.checked(execution)
        assert found.layers
        assert [layer for layer in found.layers if layer.cause is not None and layer.cause.why != "rounding"] == []
