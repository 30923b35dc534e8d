"""Convolutions of wide patches: the same products, in torch's int8 kernels and in engines."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn

from optimize.export.onnx_graph.write import run_onnx
from optimize.passes.onnx_int8 import OnnxInt8
from optimize.passes.ptq import Ptq
from optimize.quantization.convert import trace_calls
from optimize.quantization.rewrites.wide_patches import unfold_patches
from serve.runtime.engines.openvino import compile_bytes
from tests.optimize.workbench import decibels, noise_context, through_int8


def network(channels: int, **convolution: Any) -> nn.Sequential:
    """Maps of 16 x 16 places and what reads them; `convolution` is the settings of the layer between."""
    torch.manual_seed(0)
    between = nn.Conv2d(channels, 8, **convolution)
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1), nn.ReLU(), between, nn.ReLU(), nn.Flatten(), nn.LazyLinear(4)
    ).eval()


def traced(module: nn.Module) -> torch.fx.GraphModule:
    images = noise_context().example(2)
    module(images)
    return trace_calls(copy.deepcopy(module), images)


@pytest.mark.parametrize(
    ("channels", "convolution"),
    [
        (16, {"kernel_size": 8, "stride": 8}),
        (32, {"kernel_size": 4, "stride": 4, "bias": False}),
        (6, {"kernel_size": (2, 8), "stride": (2, 8), "padding": "valid"}),
    ],
)
def test_a_patch_is_read_as_one_place_and_gives_the_same_numbers(channels: int, convolution: dict[str, Any]) -> None:
    module = network(channels, **convolution)
    images = torch.randn(3, 1, 16, 16)
    expected = module(images)
    found = traced(module)
    layer = found.get_submodule("2")
    assert isinstance(layer, nn.Conv2d)
    assert (layer.kernel_size, layer.stride) == ((1, 1), (1, 1))
    torch.testing.assert_close(found(images), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("channels", "convolution"),
    [
        (16, {"kernel_size": 8, "stride": 4}),
        (16, {"kernel_size": 8, "stride": 8, "padding": 4}),
        (16, {"kernel_size": 5, "stride": 5}),  # 16 places are no patches of 5
        (16, {"kernel_size": 8, "stride": 8, "groups": 2}),
        (16, {"kernel_size": 4, "stride": 4, "dilation": 2}),
        (16, {"kernel_size": 2, "stride": 2}),
        (64, {"kernel_size": 4, "stride": 4}),
        (3, {"kernel_size": 8, "stride": 8}),
    ],
)
def test_others_are_left_as_they_are(channels: int, convolution: dict[str, Any]) -> None:
    found = traced(network(channels, **convolution))
    layer = found.get_submodule("2")
    assert isinstance(layer, nn.Conv2d)
    assert layer.in_channels == channels
    assert unfold_patches(found) == 0


@pytest.mark.parametrize(("channels", "side"), [(16, 8), (32, 4), (48, 4)])
def test_its_int8_is_what_the_integers_mean_in_torch_and_in_engines(channels: int, side: int, tmp_path: Path) -> None:
    # On a CPU with AMX the gate refused two of the three: torch had 2 dB of 32 and of 37.
    module = network(channels, kernel_size=side, stride=side)
    module(noise_context().example(2))
    _, path = through_int8(module, tmp_path, Ptq(images=16), OnnxInt8(input="float"), noise_context())
    batch = noise_context().example(16)
    with torch.no_grad():
        expected = module(batch)
    (answer,) = compile_bytes(path.read_bytes(), 1)(batch.numpy()).values()
    for found in (run_onnx(path, batch), torch.from_numpy(answer)):
        assert decibels(expected, found) > 30
    kernels = [node for node in onnx.load(path).graph.node if node.op_type == "Conv"]
    assert len(kernels) == 2
