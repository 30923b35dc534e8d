"""Fake-quantize modules for mixed precision, and with ranges over the images of all processes."""

from __future__ import annotations

import torch
from torch import nn
from torch.ao.quantization.fake_quantize import FusedMovingAvgObsFakeQuantize

from optimize.training.distributed import group


class Float32FakeQuantize(FusedMovingAvgObsFakeQuantize):
    """torch's fake quantizer, in float32 for any input, with the ranges of all processes if they are shared.

    The fused operation itself refuses what autocast on a CPU gives it (torch 2.14, pytorch issue 94371).
    DistributedDataParallel would give all processes the first one's ranges (pytorch issue 85627).

    Attributes:
        shared: whether an activation's range covers the images of all processes.
    """

    shared = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Fake-quantize ``x`` in float32. If the range is observed, it follows ``x``."""
        with torch.autocast(x.device.type, enabled=False):
            values = x.float()
            # On held-out images the processes have different numbers of batches. A weight is the same in all of them.
            together = self.shared and self.training and not self.is_per_channel
            if not together or self.observer_enabled[0] != 1:
                quantized: torch.Tensor = super().forward(values)
                return quantized
            with torch.no_grad():
                super().forward(_extremes(values))  # everything that a range depends on
            if self.fake_quant_enabled[0] != 1:
                return values
            observer = self.activation_post_process
            return torch.fake_quantize_per_tensor_affine(
                values, self.scale, self.zero_point, observer.quant_min, observer.quant_max
            )


def in_float32(module: nn.Module) -> None:
    """Turn the fused fake-quantize modules of ``module`` into `Float32FakeQuantize`, in place. Their state stays."""
    for layer in module.modules():
        if type(layer) is FusedMovingAvgObsFakeQuantize:
            layer.__class__ = Float32FakeQuantize


def share_ranges(module: nn.Module) -> None:
    """Let each activation's range cover the least and the largest value of any process."""
    in_float32(module)
    for layer in module.modules():
        if isinstance(layer, Float32FakeQuantize):
            layer.shared = True


def _extremes(values: torch.Tensor) -> torch.Tensor:
    """Return the least and the largest of all processes' values, ``float32 (2,)``."""
    low, high = torch.aminmax(values)
    ends = group.largest(torch.stack((-low, high)))
    return ends * torch.tensor([-1.0, 1.0], device=ends.device)
