"""Maps that are scaled: cubic curves and blurred resizes are lowered, and are what torch's own operators give."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from optimize.quantization.rewrites.resizes import write_out_resizes
from serve.runtime.device.cpu_integers import ANY_X86, TENSORRT
from tests.optimize.workbench import Between, is_meant

CURVES: dict[str, dict[str, Any]] = {
    "cubic, one side smaller": {"size": (10, 20), "mode": "bicubic"},
    "cubic, by its corners": {"scale_factor": 1.5, "mode": "bicubic", "align_corners": True},
    "cubic, by factors that leave a rest": {"scale_factor": (1.3, 0.6), "mode": "bicubic"},
    "cubic, blurred": {"size": (7, 9), "mode": "bicubic", "antialias": True},
    "linear, blurred": {"size": (7, 9), "mode": "bilinear", "antialias": True},
}
KERNELS: dict[str, dict[str, Any]] = {
    "linear": {"size": (10, 20), "mode": "bilinear"},
    "nearest": {"scale_factor": 2},
    "area": {"size": (5, 7), "mode": "area"},
}


@pytest.mark.parametrize("target", [ANY_X86, TENSORRT])
@pytest.mark.parametrize("name", ["cubic, one side smaller", "cubic, by factors that leave a rest", "linear, blurred"])
def test_a_map_is_scaled_in_int8_as_in_float(name, target, tmp_path):
    torch.manual_seed(0)
    is_meant(Between(functools.partial(functional.interpolate, **CURVES[name])), tmp_path, target, above=18)


def test_a_layer_that_scales_is_as_the_function(tmp_path):
    torch.manual_seed(0)
    is_meant(Between(nn.Upsample(scale_factor=1.5, mode="bicubic")), tmp_path, ANY_X86, above=18)


@pytest.mark.parametrize("target", [ANY_X86, TENSORRT])
def test_the_image_is_scaled_for_one_branch_of_two(target, tmp_path):
    """As CrossViT does."""

    class Branched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.whole, self.scaled, self.head = nn.Conv2d(1, 8, 4, 4), nn.Conv2d(1, 8, 3, 3), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scaled = functional.interpolate(x, size=(12, 12), mode="bicubic")
            return self.head(torch.cat([self.whole(x).mean((2, 3)), self.scaled(scaled).mean((2, 3))], 1))

    torch.manual_seed(0)
    is_meant(Branched(), tmp_path, target, above=18)


class Scaled(nn.Module):
    def __init__(self, **way: Any) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.interpolate(x, **self.way)


@pytest.mark.parametrize("way", CURVES.values(), ids=CURVES)
def test_the_products_are_what_the_operator_gives(way):
    images = torch.randn(3, 2, 14, 16)
    module = torch.export.export(Scaled(**way), (images,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)).module()
    assert write_out_resizes(module) == 1
    assert not any("upsample" in str(node.target) for node in module.graph.nodes)
    torch.testing.assert_close(module(images), functional.interpolate(images, **way), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", KERNELS.values(), ids=KERNELS)
def test_what_every_engine_has_stays_as_it_is(way):
    images = torch.randn(3, 2, 14, 16)
    module = torch.export.export(Scaled(**way), (images,)).module()
    assert write_out_resizes(module) == 0
