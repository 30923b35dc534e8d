"""Operators that torch's exporter does not know become graphs of others that compute what torch does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from optimize.errors import PassError
from optimize.export.onnx_graph.write import export_onnx, run_onnx
from serve.runtime.device.cpu_integers import ANY_X86, TENSORRT, VNNI_X86
from serve.runtime.engines.openvino import compile_bytes
from tests.optimize.workbench import Between, decibels, is_meant, lowered, noise_context

WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "hypotenuse": lambda x: torch.hypot(x, x.flip(1)),
    "products": lambda x: x.cumprod(1),
    "products of a lone place": lambda x: x[..., :1].cumprod(-1),
    "products in a row": lambda x: torch.cumprod(x, -1),
    "median": lambda x: x.median(1, keepdim=True)[0] + x,
    "median of an even number": lambda x: torch.median(x, dim=3).values,
    "quantile": lambda x: x.quantile(0.3, 1, keepdim=True) * x,
    "quantile in a row": lambda x: torch.quantile(x, 0.5, dim=-1, interpolation="midpoint"),
    "quantile that is a number": lambda x: torch.quantile(x, 0.8, dim=2, interpolation="higher"),
    "kth value": lambda x: x.kthvalue(2, -1)[0],
    "kth value kept": lambda x: torch.kthvalue(x, k=3, dim=2, keepdim=True).values * x,
}


class Computing(nn.Module):
    """What it is told to compute, one row for each image."""

    def __init__(self, told: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.told = told

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.told(x).flatten(1)


@pytest.mark.parametrize("way", WAYS)
def test_a_graph_computes_what_torch_does(way, tmp_path):
    module, batch = Computing(WAYS[way]).eval(), torch.randn(5, 5, 7, 6, generator=torch.Generator().manual_seed(0))
    batch[0, :, 0] = 0.0
    batch[1, :, 1] = batch[1, :1, 1]  # equal numbers
    export_onnx(module, batch[:2], tmp_path / "model.onnx")
    torch.testing.assert_close(run_onnx(tmp_path / "model.onnx", batch), module(batch), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [1e30, 1e-30, 1e-44, 0.0])
def test_no_square_of_a_hypotenuses_sides_overflows(size, tmp_path):
    module = Computing(WAYS["hypotenuse"]).eval()
    batch = size * torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    export_onnx(module, batch, tmp_path / "model.onnx")
    found = run_onnx(tmp_path / "model.onnx", batch)
    assert found.isfinite().all()
    torch.testing.assert_close(found, module(batch), rtol=1e-5, atol=1e-38)


@pytest.mark.parametrize("way", ["hypotenuse", "products", "median", "quantile", "kth value kept"])
@pytest.mark.parametrize("target", [ANY_X86, TENSORRT])
def test_they_are_meant_in_int8(way, target, tmp_path):
    torch.manual_seed(0)
    is_meant(Between(lambda x: WAYS[way](0.3 * x + 1)), tmp_path, target, above=25)


def test_openvino_answers_as_the_integers_of_a_network_with_a_quantile(tmp_path):
    torch.manual_seed(0)
    batch = noise_context().example(32)
    _, path = lowered(Between(WAYS["quantile"]).eval(), tmp_path, VNNI_X86)
    (found,) = compile_bytes(path.read_bytes(), 1)(batch.numpy()).values()
    assert decibels(run_onnx(path, batch, literal=True), torch.from_numpy(found)) > 25


def test_a_median_of_all_images_is_refused_in_a_line(tmp_path):
    module, batch = Computing(lambda x: x - x.median()).eval(), torch.randn(2, 3, 4, 4)
    with pytest.raises(PassError, match=r"cannot translate this model: aten\.median\.default: .*") as raised:
        export_onnx(module, batch, tmp_path / "model.onnx")
    assert "\n" not in str(raised.value)
