"""What the project's own small networks share: their block, and how they learn small data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from torch import nn

#: Few images make few steps, so a step has few images.
TRAINING: Final[Mapping[str, Any]] = {
    "optimizer": "adamw",
    "learning_rate": 4e-3,
    "weight_decay": 0.01,
    "batch_size": 16,
    "channels_last": True,
}


def block(into: int, out: int, stride: int = 1) -> nn.Sequential:
    """Return a 3x3 convolution with its batch norm and ReLU."""
    return nn.Sequential(
        nn.Conv2d(into, out, 3, stride, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True)
    )
