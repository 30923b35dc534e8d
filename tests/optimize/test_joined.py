"""A ReLU or a constant behind a concatenation: OpenVINO opens its graph, which means what it meant."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import onnx
import torch
from torch import nn

from optimize.export.onnx import run_onnx

from .workbench import decibels, lowered, noise_context

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
)


def test_what_is_put_together_and_scaled_or_cut_off_is_opened_and_means_what_it_meant(tmp_path: Path) -> None:
    batch = noise_context().example(16)
    np.save(tmp_path / "batch.npy", batch.numpy())
    paths = []
    for number, (axis, then) in enumerate(CASES):
        torch.manual_seed(0)
        folder = tmp_path / str(number)
        folder.mkdir()
        _, path = lowered(Joined(then, axis).eval(), folder)
        assert [node.op_type for node in onnx.load(path).graph.node].count("Concat") == 1
        paths.append(path)
    words = [sys.executable, "-c", OPENED, str(tmp_path / "batch.npy"), *map(str, paths)]
    subprocess.run(words, check=True, timeout=300)
    for path in paths:
        found = torch.from_numpy(np.load(f"{path}.npy"))
        assert decibels(run_onnx(path, batch), found) > 30
