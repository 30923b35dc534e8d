"""Subclasses of torch's layers of the shapes that other libraries have, timm's above all."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional


class NamedNorm(nn.BatchNorm2d):
    """A subclass that adds nothing."""


class NamedConv(nn.Conv2d):
    """A subclass that adds nothing."""


class NormAct(nn.BatchNorm2d):
    """As timm's ``BatchNormAct2d``: the norm's function, dropout and an activation inside, and a check of the shape."""

    def __init__(self, features: int, act: nn.Module | None = None) -> None:
        super().__init__(features)
        self.drop = nn.Identity()
        self.act = act or nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._assert(x.ndim == 4, f"expected 4D input (got {x.ndim}D input)")
        exponential_average_factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        statistics = (self.running_mean, self.running_var)
        training = self.training or (self.running_mean is None and self.running_var is None)
        x = functional.batch_norm(
            x, *statistics, self.weight, self.bias, training, exponential_average_factor, self.eps
        )
        return self.act(self.drop(x))


class StandardisedConv(nn.Conv2d):
    """As timm's ``StdConv2d``: the weight is standardised before it is used."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = self.weight.reshape(1, self.out_channels, -1)
        weight = functional.batch_norm(flat, None, None, training=True, momentum=0.0, eps=1e-6)
        return functional.conv2d(
            x, weight.reshape_as(self.weight), self.bias, self.stride, self.padding, self.dilation, self.groups
        )


class SameConv(nn.Conv2d):
    """As timm's ``Conv2dSame``: pads by the size of its input, which tracing does not know."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sides: list[int] = []
        for size, kernel, stride in zip(x.shape[-2:], self.kernel_size, self.stride, strict=True):
            wanted = max((math.ceil(size / stride) - 1) * stride + kernel - size, 0)
            sides = [wanted // 2, wanted - wanted // 2, *sides]
        x = functional.pad(x, sides)
        return functional.conv2d(x, self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


class GatedSameConv(SameConv):
    """Uses its weight for more than the convolution, so that nothing can be folded into it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = torch.sigmoid(self.weight.sum()) if max(x.shape) > 0 else 1.0
        return super().forward(x) * gate


class UnbiasedConv(nn.Conv2d):
    """A convolution that cannot be traced, and can take no bias."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias is not None:
            raise NotImplementedError
        return super().forward(x) if x.sum() > -1e9 else x


class BranchingNorm(nn.BatchNorm2d):
    """A norm that cannot be traced, and does more than a norm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).abs() if x.sum() > -1e9 else x


class Sharp(torch.autograd.Function):
    """An activation that keeps what it was given for the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(2 * x)


#: As other modules import it.
sharp = Sharp.apply
