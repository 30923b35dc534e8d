"""Weights that hooks compute before each call, as torch's norms of weights did before it had parametrisations."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from optimize.export.onnx_graph.write import run_onnx
from optimize.passes.half import HALF, Half
from optimize.passes.onnx_half import ONNX_HALF, OnnxHalf
from optimize.passes.ptq import PTQ, Ptq
from optimize.passes.qat import QAT, Qat
from optimize.quantization.rewrites.computed_weights import store_weights
from optimize.quantization.targets import TargetName
from optimize.store.artifact import REFERENCE_FILE, Artifact
from serve.runtime.model_files.program_file import load_program
from tests.optimize.workbench import decibels, noise_context, parent_of


class Hooked(nn.Module):
    """Two layers with normed weights, of which the second is called twice, and a head."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch 2.14 wants parametrisations
            self.first = nn.utils.weight_norm(nn.Conv2d(1, 8, 3, padding=1))
            self.head = nn.utils.weight_norm(nn.Linear(8, 4))
        self.second = nn.utils.spectral_norm(nn.Conv2d(8, 8, 3, padding=1), n_power_iterations=3)
        with torch.no_grad():
            self.first.get_parameter("weight_g").mul_(3)  # the weight that was made with the layer is another

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.second(self.first(x)).relu())
        answer: torch.Tensor = self.head(x.relu().mean((2, 3)))
        return answer


def hooked() -> Hooked:
    torch.manual_seed(0)
    network = Hooked()
    network(torch.randn(2, 1, 8, 8))  # in training: the spectral norm looks for its vectors
    return network.eval()


def test_what_is_computed_is_stored_and_the_answers_are_the_same() -> None:
    network, batch = hooked(), torch.randn(3, 1, 8, 8)
    with torch.no_grad():
        expected = network(batch)
        store_weights(network)
        torch.testing.assert_close(network(batch), expected, rtol=0, atol=0)
    names = {name for name, _ in network.named_parameters()} | {name for name, _ in network.named_buffers()}
    assert names == {f"{layer}.{kind}" for layer in ("first", "second", "head") for kind in ("weight", "bias")}
    again = hooked()
    store_weights(again)
    again.load_state_dict(network.state_dict())


@pytest.fixture
def parent(tmp_path: Path) -> Artifact:
    """Built anew each time: such a weight is one that torch cannot copy."""
    return dataclasses.replace(parent_of(hooked(), noise_context(), tmp_path / "parent"), build_module=hooked)


@pytest.mark.parametrize("name", ["ptq", "qat"])
@pytest.mark.parametrize("target", ["auto", "tensorrt"])
def test_its_integers_are_those_of_what_is_computed(
    name: str, target: TargetName, parent: Artifact, tmp_path: Path
) -> None:
    made, context = tmp_path / name, noise_context()
    made.mkdir()
    if name == "ptq":
        PTQ.apply(parent, Ptq(observer="minmax", target=target), context, made)
    else:
        settings = {"epochs": 1, "freeze_observers_at": 0, "images": 64, "augment": False, "learning_rate": 1e-6}
        QAT.apply(parent, Qat(target=target, **settings), context, made)
    program = load_program(made / REFERENCE_FILE).module()
    batch = context.example(32)
    with torch.no_grad():
        found = decibels(hooked()(batch), program(batch))
    assert found > 20, f"{found:.1f} dB"


def test_it_has_sixteen_bits(parent: Artifact, tmp_path: Path) -> None:
    context = noise_context()
    for name in ("half", "onnx"):
        (tmp_path / name).mkdir()
    HALF.apply(parent, Half(), context, tmp_path / "half")
    product = ONNX_HALF.apply(parent, OnnxHalf(input="float"), context, tmp_path / "onnx")
    batch = context.example(8)
    with torch.no_grad():
        expected = hooked()(batch)
    torch.testing.assert_close(run_onnx(tmp_path / "onnx" / product.file, batch), expected, rtol=1e-2, atol=1e-2)
