"""Residual sums are in OpenVINO what the graph says where that is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from optimize.errors import PassError
from optimize.export.onnx_graph.write import run_onnx
from optimize.passes.onnx_int8 import OnnxInt8
from optimize.passes.ptq import Ptq
from optimize.quantization.lowering.openvino.residual_sums import keep_sums
from optimize.quantization.targets import TargetName
from serve.runtime.engines.openvino import compile_bytes
from tests.optimize.explicit_nets import Int8Linear, kept
from tests.optimize.workbench import noise_context, through_int8


class Residual(nn.Module):
    """Two blocks, the second of which has a layer in its shortcut, and a map of their answers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.second = nn.Conv2d(1, 16, 3), nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 24, 1)
        self.shortcut, self.head = nn.Conv2d(16, 24, 1), nn.Linear(24 * 4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        x = torch.relu(x + self.first(x))
        x = torch.relu(self.second(x) + self.shortcut(x))
        found: torch.Tensor = self.head(functional.adaptive_avg_pool2d(x, 2).flatten(1))
        return found


def lowered(folder: Path, exact_sums: bool, target: TargetName = "auto") -> Path:
    torch.manual_seed(0)
    config = OnnxInt8(input="float", exact_sums=exact_sums)
    return through_int8(Residual().eval(), folder, Ptq(observer="minmax", target=target), config, noise_context())[1]


def test_openvino_gives_other_answers_less_often_where_sums_are_exact(tmp_path: Path) -> None:
    batch, different = noise_context().example(64), []
    for exact_sums in (False, True):
        folder = tmp_path / str(exact_sums)
        folder.mkdir()
        path = lowered(folder, exact_sums)
        (found,) = compile_bytes(path.read_bytes(), 1)(batch.numpy()).values()
        meant = run_onnx(path, batch, literal=True)
        different.append(float((meant != torch.from_numpy(found)).float().mean()))
    # The image's ties are left, of which some pixels are a few millionths off.
    assert different[1] < different[0] / 2


def test_graphs_for_tensorrt_have_no_such_sums(tmp_path: Path) -> None:
    with pytest.raises(PassError, match="exact_sums is for graphs for CPUs, but these integers are for tensorrt"):
        lowered(tmp_path, exact_sums=True, target="tensorrt")


def test_what_is_read_by_more_than_a_sum_is_no_part_of_one() -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Int8Linear(6, 6, 0.0137, 118), Int8Linear(6, 6, 0.0137, 0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x, y = self.first(x), self.second(x)
            return (x + y) * x + x.sin()

    x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0))
    assert kept(Network(), keep_sums, x) == (1, 1)  # of the second's answer alone
