"""Fake-quantize modules in mixed precision, and with ranges over the images of all processes."""

from __future__ import annotations

import torch
from torch import nn
from torch.ao.quantization.fake_quantize import FusedMovingAvgObsFakeQuantize

from optimize.training.distributed import group


class Float32FakeQuantize(FusedMovingAvgObsFakeQuantize):
    """torch's, in float32 whatever comes in, and with what all processes see where the ranges are shared.

    The fused operation itself refuses what autocast on a CPU gives it (torch 2.14, pytorch issue 94371), and
    DistributedDataParallel would give all processes the first one's ranges (pytorch issue 85627).

    Attributes:
        shared: whether an activation's range is that of all processes' images.
    """

    shared = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` as its integers mean it, in float32; the range follows it where it is observed."""
        with torch.autocast(x.device.type, enabled=False):
            values = x.float()
            # Of held-out images each process has another number of batches; a weight is the same in all processes.
            together = self.shared and self.training and not self.is_per_channel
            if not together or self.observer_enabled[0] != 1:
                quantized: torch.Tensor = super().forward(values)
                return quantized
            with torch.no_grad():
                super().forward(_extremes(values))  # all that a range is made of
            if self.fake_quant_enabled[0] != 1:
                return values
            observer = self.activation_post_process
            return torch.fake_quantize_per_tensor_affine(
                values, self.scale, self.zero_point, observer.quant_min, observer.quant_max
            )


def in_float32(module: nn.Module) -> None:
    """Make the fused fake-quantize modules of ``module`` `Float32FakeQuantize`, in place; their state stays."""
    for layer in module.modules():
        if type(layer) is FusedMovingAvgObsFakeQuantize:
            layer.__class__ = Float32FakeQuantize


def share_ranges(module: nn.Module) -> None:
    """Let each range of an activation be that of the least and the largest value that any process sees."""
    in_float32(module)
    for layer in module.modules():
        if isinstance(layer, Float32FakeQuantize):
            layer.shared = True


def _extremes(values: torch.Tensor) -> torch.Tensor:
    """The least and the largest of all processes' values, ``float32 (2,)``."""
    low, high = torch.aminmax(values)
    ends = group.largest(torch.stack((-low, high)))
    return ends * torch.tensor([-1.0, 1.0], device=ends.device)
