"""Graphs are the same whether torch decomposes a program or what it would write is written, and mostly it is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.onnx._internal.exporter import _fx_passes

from optimize.export.onnx_graph import exported_table
from optimize.export.onnx_graph import write as exporting
from optimize.export.onnx_graph.write import run_onnx
from tests.optimize.workbench import with_running_statistics

EXAMPLE = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


class Usual(nn.Module):
    """Batch norms, activations and a sum in place, dropouts and a flattening: what most networks are made of."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), activation)
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
        self.last = nn.Sequential(nn.Dropout(0.2, inplace=True), nn.Linear(8, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        y = self.second(x)
        y += x
        y = functional.dropout(functional.relu(y, inplace=True), training=self.training)
        return self.last(torch.flatten(functional.adaptive_avg_pool2d(y, 1), 1))


class Tokens(nn.Module):
    """Attention between patches and a class token, with the ways to change a shape that networks use."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.word = nn.Conv2d(3, 8, 4, 4), nn.Parameter(torch.randn(1, 1, 8))
        self.all, self.last = nn.Linear(8, 24), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).swapaxes(1, 2)
        x = torch.cat([self.word.expand(x.shape[0], -1, -1), x], 1)
        queries, keys, values = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.all(x).chunk(3, -1))
        scores = (queries @ keys.transpose(-2, -1)).softmax(-1)
        x = x + (scores @ values).transpose(1, 2).contiguous().view(x.shape)
        return self.last(x.transpose(1, 2).reshape(x.shape[0], -1).view(-1, 8, 17).mean(2))


class Cast(nn.Module):
    """Images of other numbers, as pixels are; torch asserts of which type they are."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Conv2d(3, 5, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x.to(torch.float64).mul(1 / 255).float()).flatten(1)


class ReadByTheOldName(nn.Module):
    """What is computed in place is read under the name that it had before."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.between = nn.Conv2d(3, 8, 3), nn.Linear(8, 5), between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        y = self.between(x)
        return self.last((x + 2 * y).mean((2, 3)))


def exported(module: nn.Module, path: Path) -> onnx.ModelProto:
    return exporting.export_onnx(with_running_statistics(module), EXAMPLE, path)


def renamed(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph with its values numbered as nodes read them: their names, and the constants' order, mean nothing."""
    graph, names = model.graph, {"": ""}

    def number(name: str) -> str:
        return names.setdefault(name, f"v{len(names)}")

    graph.input[0].name = number(graph.input[0].name)
    for node in graph.node:
        node.name = ""
        node.input[:] = [number(name) for name in node.input]
        node.output[:] = [number(name) for name in node.output]
    for value in (*graph.output, *graph.initializer):
        value.name = number(value.name)
    graph.initializer.sort(key=lambda tensor: tensor.name)
    return model


def never(*given: Any) -> Any:
    raise AssertionError("torch decomposed it")


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "ReLU": lambda: Usual(nn.ReLU(inplace=True)),
    "ReLU6": lambda: Usual(nn.ReLU6(inplace=True)),
    "Hardswish": lambda: Usual(nn.Hardswish(inplace=True)),
    "SiLU": lambda: Usual(nn.SiLU(inplace=True)),
    "GELU": lambda: Usual(nn.GELU()),
    "tokens": Tokens,
    "cast": Cast,
}


@pytest.mark.parametrize("network", NETWORKS)
def test_the_graph_is_the_one_of_torchs_decomposition_without_it(
    network: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = NETWORKS[network]()
    with monkeypatch.context() as patch:
        patch.setattr(exported_table, "decomposed_where_needed", contextlib.nullcontext)
        expected = exported(module, tmp_path / "torch.onnx")
    monkeypatch.setattr(_fx_passes, "decompose_with_registry", never)
    found = exported(module, tmp_path / "ours.onnx")
    assert renamed(found) == renamed(expected)


@pytest.mark.parametrize(
    "between",
    [
        lambda x: x.relu_(),
        lambda x: functional.dropout(x, training=False).relu_(),
        lambda x: functional.dropout(x, training=False, inplace=True).relu_(),
        lambda x: x.view(x.shape).mul_(3.0),
        lambda x: x[:, :, 1:].mul_(0.5).sum() + x,
    ],
    ids=["itself", "behind a dropout", "behind one in place", "a view", "a part"],
)
def test_what_is_written_in_place_and_read_by_its_old_name_is_what_torch_computes(
    between: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    module = ReadByTheOldName(between)
    with torch.no_grad():
        expected = module(EXAMPLE)
    exported(module, tmp_path / "model.onnx")
    torch.testing.assert_close(run_onnx(tmp_path / "model.onnx", EXAMPLE), expected, rtol=1e-4, atol=1e-5)


def test_what_an_export_patches_is_as_before_when_it_ends(tmp_path: Path) -> None:
    before = _fx_passes.decompose_with_registry
    exported(Usual(nn.ReLU()), tmp_path / "model.onnx")
    assert _fx_passes.decompose_with_registry is before
