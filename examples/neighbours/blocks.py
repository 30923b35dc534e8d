"""The parts."""

from __future__ import annotations

import torch
from torch import nn


class Residual(nn.Module):
    """Two convolutions and a shortcut, a 1x1 convolution where the shape changes: ``(N, C, H, W)``."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        alike = stride == 1 and inputs == outputs
        self.shortcut = (
            nn.Identity()
            if alike
            else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs))
        )
        self.end = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(N, inputs, H, W)`` to ``(N, outputs, H / stride, W / stride)``."""
        answer: torch.Tensor = self.end(self.body(x) + self.shortcut(x))
        return answer
