"""Convolutions in narrow groups are in torch's kernels and OpenVINO what their integers mean, with AMX, too."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional

from optimize.export.onnx_graph.write import run_onnx
from optimize.lint.base import lint
from optimize.store.artifact import REFERENCE_FILE
from serve.runtime.engines.openvino import compile_bytes
from serve.runtime.engines.torchscript import use_int8_kernels
from serve.runtime.model_files.program_file import load_program
from tests.optimize.workbench import decibels, lowered, noise_context, packed_in_torchscript


class Grouped(nn.Module):
    """A convolution in groups of so many channels, with so many answers each, between two others."""

    def __init__(self, groups: int, *shape: int, as_function: bool = False, positive: bool = False) -> None:
        super().__init__()
        channels, answers, kernel = shape
        self.positive = positive
        self.stem, self.as_function, self.groups = nn.Conv2d(1, groups * channels, 3, padding=1), as_function, groups
        self.grouped = nn.Conv2d(groups * channels, groups * answers, kernel, padding=kernel // 2, groups=groups)
        self.last, self.head = nn.Conv2d(groups * answers, 8, 1), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = functional.relu(x) if self.positive else functional.gelu(x)
        layer = self.grouped
        if self.as_function:
            x = functional.conv2d(x, layer.weight, layer.bias, padding=layer.padding, groups=self.groups)
        else:
            x = layer(x)
        found: torch.Tensor = self.head(functional.relu(self.last(x)).mean((2, 3)))
        return found


def of_grouped(groups: int, *shape: int, folder: Path, **ways: bool) -> tuple[torch.Tensor, float]:
    """The packed weight of the convolution in groups, and decibels of the packed program against its integers."""
    torch.manual_seed(0)
    packed, _ = lowered(Grouped(groups, *shape, **ways).eval(), folder)
    (file,) = packed.glob("*.pt")
    use_int8_kernels()
    batch = noise_context().example(8)
    with torch.no_grad():
        meant, found = load_program(packed / REFERENCE_FILE).module()(batch), torch.jit.load(str(file))(batch)
    return packed_in_torchscript(file)[1][0], decibels(meant, found)


@pytest.mark.parametrize("as_function", [False, True])
@pytest.mark.parametrize(
    ("groups", "shape", "together"),
    [
        (2, (24, 96, 3), 2),
        (6, (12, 40, 3), 3),
        (5, (24, 24, 3), 5),
        (4, (3, 48, 5), 4),  # all of them are too few
        (4, (28, 17, 2), 2),
    ],
)
def test_narrow_groups_are_put_together(groups, shape, together, as_function, tmp_path):
    weight, found = of_grouped(groups, *shape, folder=tmp_path, as_function=as_function)
    channels, answers, kernel = shape
    assert weight.shape == (groups * answers, together * channels, kernel, kernel)
    assert int((weight != 0).sum()) <= groups * answers * channels * kernel**2
    assert found > 25


@pytest.mark.parametrize(("groups", "shape"), [(2, (24, 96, 3)), (4, (3, 48, 5)), (6, (12, 40, 3))])
def test_in_openvino_as_well(groups: int, shape: tuple[int, ...], tmp_path: Path) -> None:
    torch.manual_seed(0)
    _, path = lowered(Grouped(groups, *shape).eval(), tmp_path)
    batch = noise_context().example(8)
    (found,) = compile_bytes(path.read_bytes(), 1)(batch.numpy()).values()
    meant = run_onnx(path, batch, literal=True)
    assert decibels(meant, torch.from_numpy(found)) > 45
    assert decibels(meant, run_onnx(path, batch)) > 45
    assert not [finding for finding in lint(onnx.load(path), "cpu") if finding.rule == "narrow-groups"]


def test_what_would_be_too_large_a_graph_is_left_and_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    _, path = lowered(Grouped(5, 24, 24, 3).eval(), tmp_path)
    assert [finding.rule for finding in lint(onnx.load(path), "cpu")] == ["narrow-groups"]


@pytest.mark.parametrize(
    ("groups", "shape", "positive"),
    [
        (4, (8, 8, 3), False),
        (2, (32, 96, 3), False),
        (2, (24, 96, 1), False),
        (4, (16, 32, 3), False),
        (1, (8, 48, 3), False),
        (24, (1, 1, 3), False),
        (2, (24, 96, 3), True),  # behind a ReLU zero is 0, and nothing to take off
    ],
)
def test_others_are_as_they_were(groups, shape, positive, tmp_path):
    weight, found = of_grouped(groups, *shape, folder=tmp_path, positive=positive)
    channels, answers, kernel = shape
    assert weight.shape == (groups * answers, channels, kernel, kernel)
    assert found > 25
