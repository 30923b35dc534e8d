"""Shares of a softmax between integers are in ONNX Runtime what the graph means, also those beyond their range."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from optimize.export.onnx_graph.write import run_onnx
from optimize.quantization.lowering.qdq import explicit_form, lower, reference_program
from optimize.quantization.lowering.softmax_shares import keep_shares
from optimize.quantization.targets import target_named
from tests.optimize.explicit_nets import Int8Linear, kept, rounded

STEP = 0.0137


class Sharing(nn.Module):
    """A layer over the last axis, quantized, its shares, and these quantized, or not."""

    def __init__(
        self, scale: float | None, between: Callable[[torch.Tensor], torch.Tensor] = lambda x: x, axis: int = 1
    ) -> None:
        super().__init__()
        self.layer, self.between, self.scale, self.axis = Int8Linear(6, 6, STEP, 118), between, scale, axis

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.between(self.layer(x)).softmax(self.axis)
        return found if self.scale is None else rounded(found.unsqueeze(-1), self.scale, 0)


EXAMPLE = 3 * torch.randn(5, 2, 6, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("scale", [0.5 / 255, 0.9 / 255, 1 / 255])
def test_in_onnx_runtime_shares_end_where_their_range_does(scale, axis, tmp_path):
    module = Sharing(scale, axis=axis)
    program = reference_program(explicit_form(module, EXAMPLE), EXAMPLE)
    with torch.no_grad():
        meant = program.module()(EXAMPLE)
    lower(program, EXAMPLE, tmp_path / "model.onnx", target_named("x86-vnni"))
    found = run_onnx(tmp_path / "model.onnx", EXAMPLE)
    # Values of the layer in the middle of two integers may become either.
    assert (meant - found).abs().max() < 0.02


@pytest.mark.parametrize(
    ("module", "count"),
    [
        (Sharing(0.5 / 255), 1),
        (Sharing(0.5 / 255, lambda x: x.transpose(1, 2).unsqueeze(1)), 1),
        (Sharing(1 / 256), 0),
        (Sharing(0.5 / 255, torch.tanh), 0),  # of floats
        (Sharing(None), 0),
    ],
    ids=["integers", "moved integers", "in steps of a 256th", "floats", "the answer"],
)
def test_in_front_of_others_nothing_is_put(module, count):
    assert kept(module, keep_shares, EXAMPLE) == (count, count)
