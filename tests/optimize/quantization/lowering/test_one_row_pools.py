"""Pools along one axis: what is written for TensorRT is what torch's own operators give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional

from optimize.quantization.lowering.tensorrt.one_row_pools import write_out_lines
from tests.optimize.workbench import Between, is_meant

POOLS = {
    "mean": nn.AvgPool1d(2),
    "mean, with all settings": nn.AvgPool1d(3, 2, 1, ceil_mode=True, count_include_pad=False),
    "largest": nn.MaxPool1d(3, stride=1),
    "largest, with all settings": nn.MaxPool1d(3, 2, 1, 2, ceil_mode=True),
}


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("length", [8, 13])
def test_a_pool_along_a_line_is_one_of_a_map_of_one_row(name: str, length: int) -> None:
    x = torch.randn(2, 3, length, generator=torch.Generator().manual_seed(0))
    program = torch.export.export(nn.Sequential(POOLS[name], nn.Identity()).eval(), (x,)).module()
    assert isinstance(program, torch.fx.GraphModule)
    assert write_out_lines(program) == 1
    torch.testing.assert_close(program(x), POOLS[name](x), rtol=0, atol=0)
    assert not any("1d" in str(node.target) for node in program.graph.nodes)


@pytest.mark.parametrize("pool", [functional.avg_pool1d, functional.max_pool1d])
def test_it_reaches_the_graph_of_tensorrt(pool: Callable[[torch.Tensor, int], torch.Tensor], tmp_path: Path) -> None:
    torch.manual_seed(0)
    is_meant(Between(lambda x: pool(x.flatten(2), 2).unsqueeze(2).repeat(1, 1, 3, 1)), tmp_path, "tensorrt", above=25)
    (path,) = tmp_path.rglob("*.onnx")
    (found,) = [node for node in onnx.load(path).graph.node if node.op_type.endswith("Pool")]
    assert [list(entry.ints) for entry in found.attribute if entry.name == "kernel_shape"] == [[1, 2]]
