"""A layer that is quantized alone is alone: nothing between layers that stay in float is rounded."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from optimize.export.onnx_graph.write import run_onnx
from optimize.passes.onnx_int8 import OnnxInt8
from optimize.passes.ptq import PTQ, Ptq
from optimize.passes.qat import QAT, Qat
from optimize.quantization.convert import trace_calls
from optimize.quantization.targets import TargetName
from optimize.store.artifact import REFERENCE_FILE
from serve.runtime.model_files.program_file import load_program
from tests.optimize.tiny_net import tiny
from tests.optimize.workbench import (
    decibels,
    is_meant,
    noise_context,
    parent_of,
    quantizers,
    through_int8,
    with_running_statistics,
)

LAYERS = ("stem.0", "depthwise.0", "expand.0", "residual.0", "head")
OPEN = {"min_sqnr": -1e6, "min_agreement": 0.0}


def made(module: nn.Module, folder: Path, kept: tuple[str, ...], name: str = "ptq", target: str = "auto") -> Path:
    context = noise_context()
    parent = parent_of(module, context, folder / "parent")
    if name == "ptq":
        PTQ.apply(parent, Ptq(images=64, observer="minmax", keep_float=kept, target=target, **OPEN), context, folder)
    else:
        settings = {"epochs": 1, "freeze_observers_at": 0, "images": 64, "augment": False, **OPEN}
        QAT.apply(parent, Qat(keep_float=kept, target=target, **settings), context, folder)
    return folder


def reads(folder: Path, operator: str) -> list[bool]:
    """Of each call of an operator whether all that it is given was dequantized."""
    graph = load_program(folder / REFERENCE_FILE).graph
    return [
        all("dequantize" in str(given.target) for given in node.all_input_nodes)
        for node in graph.nodes
        if node.op == "call_function" and str(node.target).startswith(f"aten.{operator}.")
    ]


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("name", ["ptq", "qat"])
def test_of_a_layer_alone_only_what_it_reads_and_gives_is_rounded(name: str, layer: str, tmp_path: Path) -> None:
    kept = tuple(other for other in LAYERS if other != layer)
    folder = made(with_running_statistics(tiny(4), 0), tmp_path, kept, name)
    assert len(quantizers(folder)) == 2


def test_of_a_layer_alone_for_tensorrt_only_what_it_reads_is_rounded(tmp_path: Path) -> None:
    kept = tuple(other for other in LAYERS if other != "residual.0")
    assert len(quantizers(made(with_running_statistics(tiny(4), 0), tmp_path, kept, target="tensorrt"))) == 1


def test_a_sum_between_quantized_layers_stays_in_integers(tmp_path: Path) -> None:
    folder = made(with_running_statistics(tiny(4), 0), tmp_path, ("depthwise.0",))
    assert reads(folder, "add") == [True]


class Summed(nn.Module):
    """A ReLU6 and a sum between four layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(c, 4, 3, padding=1) for c in (1, 4, 4))
        self.bounded = nn.ReLU6()
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bounded(self.first(x))
        x = self.second(x) + self.third(x)
        return self.head(torch.nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))


def test_a_sum_of_float_layers_stays_in_float_and_what_is_quantized_behind_it_is_still_right(tmp_path: Path) -> None:
    torch.manual_seed(0)
    folder = made(Summed().eval(), tmp_path, ("first", "second", "third"))
    assert reads(folder, "add") == [False]
    assert len(quantizers(folder)) == 2  # what the head reads, once, and what it gives
    context = noise_context()
    given = context.example(16)
    with torch.no_grad():
        torch.manual_seed(0)
        expected = Summed().eval()
        answers = torch.jit.load(str(folder / "model.pt"))(given)
        assert torch.allclose(answers, expected(given), atol=0.05 * float(expected(given).abs().max()))


class OfFrequencies(nn.Module):
    """A cosine transform of blocks of 8 x 8 pixels, each coefficient brought to one size, in front of its layers.

    Args:
        how: the transform is written.
        learned: the transform is trained.
    """

    transposed: torch.Tensor
    mean: torch.Tensor
    deviation: torch.Tensor

    def __init__(self, how: str, *, learned: bool = False) -> None:
        super().__init__()
        self.how = how
        place = torch.arange(8.0)
        transform = torch.cos(math.pi / 8 * (place + 0.5) * place[:, None])  # DCT-II: frequency, place
        if how == "convolution":
            transform = torch.einsum("ab,cd->acbd", transform, transform).reshape(64, 1, 8, 8)
        if learned:
            self.transform = nn.Parameter(transform)
        else:
            self.register_buffer("transform", transform)
        self.register_buffer("transposed", transform.mT.contiguous())
        with torch.no_grad():
            coefficients = self.coefficients(noise_context().example(64))
        self.register_buffer("mean", coefficients.mean((0, 2, 3), keepdim=True))
        self.register_buffer("deviation", coefficients.std((0, 2, 3), keepdim=True) + 1e-3)
        self.layer, self.head = nn.Conv2d(64, 16, 1), nn.Linear(16, 4)

    def coefficients(self, x: torch.Tensor) -> torch.Tensor:
        x = 3 + 0.02 * x  # grey, with a little on it
        if self.how == "convolution":
            return functional.conv2d(x, self.transform, stride=8)
        x = x.reshape(-1, 2, 8, 2, 8).permute(0, 1, 3, 2, 4)
        if self.how == "linear":
            x = functional.linear(functional.linear(x, self.transform).transpose(-1, -2), self.transform)
        else:
            x = torch.matmul(self.transform, x @ self.transposed)
        return x.flatten(3).permute(0, 3, 1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (self.coefficients(x) - self.mean) / self.deviation
        return self.head(self.layer(x).relu().mean((2, 3)))


@pytest.mark.parametrize("how", ["linear", "convolution", "product"])
@pytest.mark.parametrize("target", ["auto", "tensorrt"])
def test_a_fixed_transform_of_the_image_in_front_of_every_layer_stays_in_float(
    how: str, target: TargetName, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    is_meant(OfFrequencies(how), tmp_path, target, above=25)


@pytest.mark.parametrize("how", ["linear", "convolution", "product"])
def test_it_stays_in_float_for_pt2e_too(how: str, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    network = OfFrequencies(how).eval()
    ptq = Ptq(observer="minmax", front_end="pt2e")
    _, path = through_int8(network, tmp_path, ptq, OnnxInt8(input="float"), noise_context())
    batch = noise_context().example(32)
    with torch.no_grad():
        found = decibels(network(batch), run_onnx(path, batch))
    assert found > 25, f"{found:.1f} dB"


def test_one_that_is_learned_is_a_layer() -> None:
    fixed, learned = (
        trace_calls(OfFrequencies("convolution", learned=each).eval(), torch.randn(2, 1, 16, 16))
        for each in (False, True)
    )
    found = [sum(type(layer) is nn.Conv2d for layer in network.modules()) for network in (fixed, learned)]
    assert found == [1, 2]
