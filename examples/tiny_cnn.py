"""The smallest user's model that every pass has something to do on: for tests that run the whole pipeline."""

from __future__ import annotations

from torch import nn

PREPROCESSING = {
    "resize": 32,
    "crop": [32, 32],
    "mean": [0.5, 0.5, 0.5],
    "std": [0.25, 0.25, 0.25],
}


def tiny(num_classes: int = 10) -> nn.Module:
    """Three convolutions with batch norm, a pool and a linear layer: ``(N, 3, 32, 32)`` to ``(N, num_classes)``."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 8), (8, 16), (16, 32)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(32, num_classes))
