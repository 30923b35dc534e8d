"""A network's answer is rounded where a layer's integer kernel gives it, and not where it is computed of that."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

from optimize.export.onnx import run_onnx
from optimize.passes.onnx_int8 import ONNX_INT8, OnnxInt8
from optimize.passes.ptq import PTQ, Ptq
from optimize.store.artifact import Artifact
from serve.runtime.integers import ANY_X86, TENSORRT, VNNI_X86
from tests.optimize.workbench import GREY16, noise_context, parent_of

_TARGETS = (ANY_X86, VNNI_X86, TENSORRT)


class Headed(nn.Module):
    """Convolutions, and what makes an answer of their maps, ``(N, 16, H, W)``."""

    def __init__(self, *head: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU())
        self.head = nn.Sequential(*head)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


class Averaged(nn.Module):
    """The mean of what two heads say, as a distilled transformer's."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(16, 10), nn.Linear(16, 10)

    def forward(self, means: torch.Tensor) -> torch.Tensor:
        return (self.one(means) + self.other(means)) / 2


def means() -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten()]


def lowered(head: list[nn.Module], target: str, folder: Path) -> Path:
    torch.manual_seed(0)
    context = noise_context()
    parent = parent_of(Headed(*head).eval(), context, folder / "parent")
    for name in ("ptq", "int8"):
        (folder / name).mkdir()
    config = Ptq(images=8, observer="minmax", target=target)
    made = PTQ.apply(parent, config, context, folder / "ptq")
    card = dataclasses.replace(parent.card, target=made.target)
    quantized = Artifact("ptq", "quantized", "1" * 64, folder / "ptq", card, parent)
    graph = ONNX_INT8.apply(quantized, OnnxInt8(), context, folder / "int8")
    return folder / "int8" / graph.file


def last_operator(path: Path) -> str:
    """What gives the graph's answer, behind what only moves it."""
    graph = onnx.load(path).graph
    makers = {name: node for node in graph.node for name in node.output}
    node = makers[graph.output[0].name]
    while node.op_type in ("Reshape", "Flatten", "Squeeze", "Div"):
        node = makers[node.input[0]]
    return node.op_type


@pytest.mark.parametrize("target", _TARGETS)
@pytest.mark.parametrize(
    ("head", "operator"),
    [
        ([*means(), nn.Linear(16, 10), nn.Softmax(1)], "Softmax"),
        ([*means(), nn.Linear(16, 10), nn.Sigmoid()], "Sigmoid"),
        ([nn.Conv2d(16, 10, 1), nn.ReLU(), *means()], "ReduceMean"),
        ([*means(), Averaged()], "Add"),
    ],
    ids=["softmax", "sigmoid", "pool", "two heads"],
)
def test_what_is_computed_of_the_last_layers_is_not_rounded(head, operator, target, tmp_path):
    path = lowered(head, target, tmp_path)
    assert last_operator(path) == operator


@pytest.mark.parametrize("head", [[nn.Linear(16, 10)], [nn.Linear(16, 10), nn.ReLU()]], ids=["layer", "activated"])
@pytest.mark.parametrize("target", [ANY_X86, VNNI_X86])
def test_a_layers_own_answer_is_its_integer_kernels(head, target, tmp_path):
    assert last_operator(lowered([*means(), *head], target, tmp_path)) == "DequantizeLinear"


@pytest.mark.parametrize("target", _TARGETS)
def test_probabilities_add_up_to_one(target, tmp_path):
    path = lowered([*means(), nn.Linear(16, 10), nn.Softmax(1)], target, tmp_path)
    pixels = torch.randint(256, (16, *GREY16.shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    answers = run_onnx(path, pixels)
    torch.testing.assert_close(answers.sum(dim=1), torch.ones(16), rtol=0, atol=1e-5)
