"""A compact network for small images: torchvision's MobileNetV2 (Sandler et al. 2018, arXiv 1801.04381), half as wide.

Depthwise convolutions and ReLU6: what int8 with one scale a tensor is hardest on, see docs/design/recovery.md.
"""

from __future__ import annotations

from torch import nn
from torchvision.models.mobilenetv2 import MobileNetV2

PREPROCESSING = {
    "resize": 32,
    "crop": [32, 32],
    "mean": [0.485, 0.456, 0.406],
    "std": [0.229, 0.224, 0.225],
}

#: Expansion, channels at full width, blocks, stride of the first: the last two groups keep the size, 2x2 from 32x32.
_GROUPS = [[1, 16, 1, 1], [6, 24, 2, 2], [6, 32, 3, 2], [6, 64, 4, 2], [6, 96, 3, 1], [6, 160, 3, 1], [6, 320, 1, 1]]


def mobilenet_v2(num_classes: int = 10) -> nn.Module:
    """``(N, 3, 32, 32)`` normalised floats to ``(N, num_classes)`` logits."""
    network: nn.Module = MobileNetV2(num_classes, width_mult=0.5, inverted_residual_setting=_GROUPS, dropout=0.0)
    return network
