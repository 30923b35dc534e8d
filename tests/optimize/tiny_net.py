"""A user's model for the tests: every structure that the passes treat specially, and small enough for seconds."""

import torch
from torch import nn
from torch.nn import functional


class Tiny(nn.Module):
    """Conv-BN-ReLU, depthwise conv-BN, a residual sum, dropout as module and as function, a linear head."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.depthwise = nn.Sequential(
            nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False), nn.BatchNorm2d(16), nn.ReLU()
        )
        self.expand = nn.Sequential(
            nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()
        )
        self.residual = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32))
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(128, num_classes)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = self.expand(self.depthwise(self.stem(batch)))
        x = torch.relu(x + self.residual(x))
        x = functional.dropout(x, 0.1, training=self.training)
        return self.head(self.dropout(torch.flatten(self.pool(x), 1)))


def tiny(num_classes: int = 10) -> nn.Module:
    return Tiny(num_classes)


def tiny_without_linear(num_classes: int = 10) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, num_classes, 3), nn.BatchNorm2d(num_classes), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )


def speck(num_classes: int = 10) -> nn.Module:
    """Two layers of which each takes less than a microsecond, at 16 x 16."""
    return nn.Sequential(nn.Conv2d(1, 1, 2, stride=16), nn.Flatten(), nn.Linear(1, num_classes))


def wide_depthwise(num_classes: int = 10) -> nn.Module:
    """Depthwise convolutions of 128 channels, as compact networks have them."""

    def block(channels: int, stride: int) -> list[nn.Module]:
        depthwise = nn.Conv2d(channels, channels, 3, stride, padding=1, groups=channels, bias=False)
        pointwise = nn.Conv2d(channels, channels, 1, bias=False)
        return [
            *(depthwise, nn.BatchNorm2d(channels), nn.ReLU6()),
            *(pointwise, nn.BatchNorm2d(channels), nn.ReLU6()),
        ]

    stem = nn.Conv2d(1, 128, 3, stride=2, padding=1, bias=False)
    return nn.Sequential(
        *(stem, nn.BatchNorm2d(128), nn.ReLU6()),
        *block(128, 1),
        *block(128, 2),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, num_classes)),
    )
