"""Who reads what is put together of integers: OpenVINO opens the graph, which means what it meant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import onnx
import torch
from torch import nn

from optimize.export.onnx_graph.write import run_onnx
from tests.optimize.workbench import decibels, lowered, noise_context
from tests.programs import Programs

# In a process of its own: what is tested is that it lives.
OPENED = """
import sys
import numpy
from pathlib import Path
from serve.runtime.engines.openvino import compile_bytes
for path in sys.argv[2:]:
    compiled = compile_bytes(Path(path).read_bytes(), 1)
    numpy.save(path + ".npy", compiled(numpy.load(sys.argv[1]))[0])
"""


class Joined(nn.Module):
    """What two layers give, put together along an axis, and what is done to it in front of the next layer."""

    def __init__(self, then: Callable[[torch.Tensor], torch.Tensor], axis: int) -> None:
        super().__init__()
        self.then, self.axis = then, axis
        self.first, self.second = nn.Conv2d(1, 8, 3), nn.Conv2d(1, 8, 3)
        self.behind, self.head = nn.Conv2d(16 if axis == 1 else 8, 8, 3), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.then(torch.cat([self.first(x), self.second(x)], self.axis))
        return cast("torch.Tensor", self.head(self.behind(x).mean((2, 3))))


CASES: tuple[tuple[int, Callable[[torch.Tensor], torch.Tensor]], ...] = (
    (1, lambda x: x * 0.7),
    (2, lambda x: x + 0.7),
    (1, lambda x: x / 0.7),
    (1, lambda x: x * 0.7 + 0.2),
    (1, lambda x: torch.full((1, 1, 1, 1), 0.7) * x),
    (3, lambda x: (x * 0.7).relu()),
    (1, torch.relu),
    (2, lambda x: x.relu() * 0.7),
    (1, torch.relu_),
    (2, lambda x: nn.functional.relu(x, inplace=True)),
)


def test_what_is_put_together_and_scaled_or_cut_off_is_opened_and_means_what_it_meant(
    tmp_path: Path, programs: Programs
) -> None:
    batch = noise_context().example(16)
    paths = []
    for number, (axis, then) in enumerate(CASES):
        torch.manual_seed(0)
        folder = tmp_path / str(number)
        folder.mkdir()
        _, path = lowered(Joined(then, axis).eval(), folder)
        assert [node.op_type for node in onnx.load(path).graph.node].count("Concat") == 1
        paths.append(path)
    assert all(found > 30 for found in in_openvino(tmp_path, paths, batch, programs))


def in_openvino(folder: Path, paths: Sequence[Path], batch: torch.Tensor, programs: Programs) -> list[float]:
    """How many decibels each graph's answers in OpenVINO have of those in ONNX Runtime; it runs in another process."""
    np.save(folder / "batch.npy", batch.numpy())
    ended = programs.run("-c", OPENED, folder / "batch.npy", *paths)
    assert ended.returncode == 0, ended.stderr
    return [decibels(run_onnx(path, batch), torch.from_numpy(np.load(f"{path}.npy"))) for path in paths]


class Tokens(nn.Module):
    """What two layers give as tokens, put together along an axis, and read in some way."""

    def __init__(self, axis: int, read: Callable[[Tokens, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.axis, self.read = axis, read
        self.first, self.second = nn.Conv2d(1, 8, 4, 4), nn.Conv2d(1, 8, 4, 4)
        self.linear, self.line = nn.Linear(8 * axis, 8), nn.Conv1d(32, 8, 1)
        self.map, self.head = nn.Conv2d(2 * axis, 8, 1), nn.LazyLinear(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([layer(x).flatten(2).mT for layer in (self.first, self.second)], self.axis)
        return cast("torch.Tensor", self.head(self.read(self, x).relu().flatten(1)))


READ: dict[str, tuple[int, Callable[[Tokens, torch.Tensor], torch.Tensor]]] = {
    "linear": (1, lambda net, x: net.linear(x)),
    "linear, of channels": (2, lambda net, x: net.linear(x)),
    "negated": (1, lambda net, x: net.linear(-x)),
    "rolled": (1, lambda net, x: net.linear(x.roll(1, 1))),
    "twice": (1, lambda net, x: net.linear(torch.cat([x, x * 0.3], 1))),
    "by two": (1, lambda net, x: net.linear(x) * net.linear(x).mean(1, keepdim=True)),
    "a line": (1, lambda net, x: net.line(x.flatten(2))),
    "shuffled": (1, lambda net, x: net.map(nn.functional.pixel_shuffle(x.mT.unflatten(2, (4, 8)), 2))),
}


def test_tokens_that_are_put_together_are_read_by_layers(tmp_path: Path, programs: Programs) -> None:
    batch = noise_context().example(16)
    paths = []
    for way, (axis, read) in READ.items():
        torch.manual_seed(0)
        (folder := tmp_path / way).mkdir()
        module = Tokens(axis, read)
        with torch.no_grad():
            module(batch)
        paths.append(lowered(module.eval(), folder)[1])
    found = dict(zip(READ, in_openvino(tmp_path, paths, batch, programs), strict=True))
    assert all(decibels > 28 for decibels in found.values()), found
    # Along its own axis, as DenseNet's channels are, nothing is put in between.
    operators = [[node.op_type for node in onnx.load(path).graph.node] for path in paths]
    assert ["Max" in each for each in operators[:2]] == [True, False]
