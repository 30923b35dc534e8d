"""A layer that is quantized alone is alone: nothing between layers that stay in float is rounded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from optimize.passes.ptq import PTQ, Ptq
from optimize.passes.qat import QAT, Qat
from optimize.store.artifact import REFERENCE_FILE
from serve.runtime.program_file import load_program

from .tiny_net import tiny
from .workbench import noise_context, parent_of, quantizers, with_running_statistics

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
