"""A RepVGG of your own, as ``merge`` takes it: blocks of three branches to train with, one convolution to run.

Ding et al. 2021, RepVGG: Making VGG-style ConvNets Great Again (arXiv:2101.03697), sections 3.3 and 3.4, small enough
for the handwritten digits. Nothing here knows of merging: the blocks are found by their structure.
"""

from __future__ import annotations

import torch
from torch import nn

PREPROCESSING = {"resize": 32, "crop": [32, 32], "mean": [0.5], "std": [0.25]}


class RepVGGBlock(nn.Module):
    """``(N, in, H, W)`` to ``(N, out, H / stride, W / stride)``: 3x3, 1x1 and, where the shape stays, a norm alone."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.dense = nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs))
        self.point = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.identity = nn.BatchNorm2d(inputs) if inputs == outputs and stride == 1 else None

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """The sum of the branches, behind a ReLU."""
        total = self.dense(images) + self.point(images)
        if self.identity is not None:
            total = total + self.identity(images)
        return torch.relu(total)


def repvgg(num_classes: int = 10) -> nn.Module:
    """Ten blocks in three stages of 16, 32 and 64 channels: ``(N, 1, 32, 32)`` to ``(N, num_classes)``."""
    blocks: list[nn.Module] = [RepVGGBlock(1, 16)]
    for inputs, outputs in ((16, 16), (16, 32), (32, 64)):
        blocks += [RepVGGBlock(inputs, outputs, 2), RepVGGBlock(outputs, outputs), RepVGGBlock(outputs, outputs)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, num_classes))
