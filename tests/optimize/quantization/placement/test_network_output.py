"""A network's answer is rounded where a layer's integer kernel gives it, and not where it is computed of that."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

from optimize.export.onnx_graph.write import run_onnx
from optimize.quantization.targets import TargetName
from serve.runtime.device.cpu_integers import ANY_X86, TENSORRT, VNNI_X86
from tests.optimize.workbench import lowered, noise_context

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


def answering(head: list[nn.Module], target: TargetName, folder: Path) -> Path:
    torch.manual_seed(0)
    return lowered(Headed(*head).eval(), folder, target)[1]


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
    assert last_operator(answering(head, target, tmp_path)) == operator


@pytest.mark.parametrize("head", [[nn.Linear(16, 10)], [nn.Linear(16, 10), nn.ReLU()]], ids=["layer", "activated"])
@pytest.mark.parametrize("target", [ANY_X86, VNNI_X86])
def test_a_layers_own_answer_is_its_integer_kernels(head, target, tmp_path):
    assert last_operator(answering([*means(), *head], target, tmp_path)) == "DequantizeLinear"


@pytest.mark.parametrize("target", _TARGETS)
def test_probabilities_add_up_to_one(target, tmp_path):
    path = answering([*means(), nn.Linear(16, 10), nn.Softmax(1)], target, tmp_path)
    answers = run_onnx(path, noise_context().example(16))
    torch.testing.assert_close(answers.sum(dim=1), torch.ones(16), rtol=0, atol=1e-5)
