"""A user's own model: the ResNets for CIFAR-10 of He et al. 2015 (arXiv 1512.03385), section 4.2.

Three stages of ``n`` basic blocks with 16, 32 and 64 channels; shortcuts without parameters (option A):
where a stage begins, every second pixel, and zeros for the new channels. 6n+2 layers.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

PREPROCESSING = {
    "resize": 32,
    "crop": [32, 32],
    "mean": [0.485, 0.456, 0.406],
    "std": [0.229, 0.224, 0.225],
}


class Shortcut(nn.Module):
    """Option A: subsample by 2 and pad ``added`` zero channels, half of them before and half after."""

    def __init__(self, added: int) -> None:
        super().__init__()
        self.added = added

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Every second pixel, with zeros in the added channels."""
        return functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.added // 2, self.added - self.added // 2))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with batch norm, and a shortcut around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity() if stride == 1 else Shortcut(outputs - inputs)
        self.relu2 = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(N, inputs, H, W)`` to ``(N, outputs, H / stride, W / stride)``."""
        residual = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x)))))
        answer: torch.Tensor = self.relu2(residual + self.shortcut(x))
        return answer


class CifarResNet(nn.Module):
    """``(N, 3, 32, 32)`` normalised floats to ``(N, num_classes)`` logits."""

    def __init__(self, blocks: int, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.relu = nn.ReLU()
        self.layer1 = self._stage(16, 16, blocks, 1)
        self.layer2 = self._stage(16, 32, blocks, 2)
        self.layer3 = self._stage(32, 64, blocks, 2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.linear = nn.Linear(64, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)

    @staticmethod
    def _stage(inputs: int, outputs: int, blocks: int, stride: int) -> nn.Sequential:
        first = BasicBlock(inputs, outputs, stride)
        return nn.Sequential(first, *(BasicBlock(outputs, outputs, 1) for _ in range(blocks - 1)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(N, 3, 32, 32)`` to logits ``(N, classes)``."""
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: torch.Tensor = self.linear(torch.flatten(self.pool(x), 1))
        return logits


def resnet20(num_classes: int = 10) -> nn.Module:
    """3 blocks a stage: 20 layers."""
    return CifarResNet(3, num_classes)


def resnet32(num_classes: int = 10) -> nn.Module:
    """5 blocks a stage: 32 layers."""
    return CifarResNet(5, num_classes)


def resnet44(num_classes: int = 10) -> nn.Module:
    """7 blocks a stage: 44 layers."""
    return CifarResNet(7, num_classes)


def resnet56(num_classes: int = 10) -> nn.Module:
    """9 blocks a stage: 56 layers."""
    return CifarResNet(9, num_classes)
