"""Maps of overlapping patches: what is written for TensorRT is what torch's own operator gives."""

from __future__ import annotations

from typing import Any

import onnx
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from optimize.quantization.lowering.tensorrt.overlapping_patches import write_out_folds
from serve.runtime.device.cpu_integers import ANY_X86, TENSORRT
from tests.optimize.workbench import Between, is_meant

TWO = st.tuples(st.integers(1, 3), st.integers(1, 3))


class Folded(nn.Module):
    def __init__(self, size: tuple[int, int], **patches: Any) -> None:
        super().__init__()
        self.size, self.patches = size, patches

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.fold(x, self.size, **self.patches)


@settings(max_examples=25, deadline=None)
@given(
    size=st.tuples(st.integers(4, 9), st.integers(4, 9)),
    kernel_size=TWO,
    stride=TWO,
    dilation=TWO,
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    channels=st.integers(1, 3),
)
def test_a_map_is_the_same_however_its_patches_lie(size, channels, **patches):
    images = torch.arange(2.0 * channels * size[0] * size[1]).reshape(2, channels, *size)
    try:
        given_patches = functional.unfold(images, **patches)
    except RuntimeError:
        assume(False)
    program = torch.export.export(Folded(size, **patches), (given_patches,))
    module = program.module()
    wanted = functional.fold(given_patches, size, **patches)
    assert write_out_folds(module) == 1
    assert torch.equal(module(given_patches), wanted)


class Patched(nn.Module):
    """A map taken apart and put together again, as VOLO's attention to its surroundings does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = functional.unfold(x, 3, padding=1, stride=2)
        return functional.fold(patches * 0.5, x.shape[-2:], 3, padding=1, stride=2)


@pytest.mark.parametrize("target", [ANY_X86, TENSORRT])
def test_a_map_of_patches_is_in_int8_what_it_is_in_float(target, tmp_path):
    torch.manual_seed(0)
    is_meant(Between(Patched()), tmp_path, target, above=18)
    operators = {node.op_type for path in tmp_path.rglob("*.onnx") for node in onnx.load(path).graph.node}
    assert ("Col2Im" in operators) is (target == ANY_X86)
