"""The model: ``MODEL=examples/neighbours/net.py:build`` finds the package's root, and `blocks` with it."""

from __future__ import annotations

from torch import nn

from .blocks import Residual


def build(num_classes: int = 10) -> nn.Module:
    """Four residual blocks behind a stem: ``(N, 3, H, W)`` to ``(N, num_classes)``."""
    return nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1, bias=False),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        Residual(24, 24),
        Residual(24, 48, stride=2),
        Residual(48, 96, stride=2),
        Residual(96, 96),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(96, num_classes),
    )
