"""Graphs are the same whether torch runs a program to see which types it promotes, or what is noted tells it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn
from torch.onnx._internal.exporter import _fx_passes
from torch.onnx._internal.fx.passes import type_promotion

from optimize.export.onnx_graph import exported_table
from optimize.export.onnx_graph import write as exporting

EXAMPLE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Computes(nn.Module):
    """A layer, and what a function computes of what it gives."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.function = nn.Conv2d(3, 5, 8), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer = self.function(self.layer(x).flatten(1))
        return answer.float()


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nothing to promote": lambda x: (x + x).relu() * 0.5,
    "a number": lambda x: (x + 1) * 3,
    "integers and a float": lambda x: x.to(torch.int32) * 1.5 + x,
    "a clamp of integers": lambda x: x.to(torch.uint8).clamp(3, 100),
    "a clamp of integers by floats": lambda x: x.to(torch.int32).clamp(0.5, 6.5) * 2,
    "one end of a clamp": lambda x: x.to(torch.int8).clamp(max=5),
    "two clamps": lambda x: x.to(torch.uint8).clamp(0, 127).float().add(1).to(torch.uint8).clamp(2, 9),
    "a choice": lambda x: torch.where(x > 0, x, 0),
    "a comparison of two types": lambda x: (x > x.to(torch.int64)) & (x.to(torch.int32) == 3),
    "a root of integers": lambda x: x.to(torch.int64).abs().sqrt(),
    "halves": lambda x: x.half() + x,
}


def exported(function: Callable[[torch.Tensor], torch.Tensor], path: Path) -> onnx.ModelProto:
    torch.manual_seed(0)
    return exporting.export_onnx(Computes(function).eval(), EXAMPLE, path)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_graph_is_the_one_that_torch_writes_when_it_runs_the_program(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(exported_table, "promoted_by_notes", contextlib.nullcontext)
        expected = exported(FUNCTIONS[function], tmp_path / "torch.onnx")

    def never(*given: object) -> None:
        raise AssertionError("torch ran it")

    monkeypatch.setattr(type_promotion._TypePromotionInterpreter, "run", never)
    assert exported(FUNCTIONS[function], tmp_path / "ours.onnx") == expected


def test_torchs_own_pass_is_back_afterwards(tmp_path: Path) -> None:
    before = _fx_passes.insert_type_promotion_nodes
    exported(FUNCTIONS["a number"], tmp_path / "graph.onnx")
    assert _fx_passes.insert_type_promotion_nodes is before
