"""Networks of parallel branches for the tests: as RepVGG and ACNet have them, small, on one channel."""

from __future__ import annotations

import torch
from torch import nn


def normed(
    out: int, into: int, size: tuple[int, int], *, stride: int = 1, groups: int = 1, eps: float = 1e-5
) -> nn.Module:
    padding = (size[0] // 2, size[1] // 2)
    convolution = nn.Conv2d(into, out, size, stride, padding, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(out, eps=eps))


class RepBlock(nn.Module):
    """Ding et al. 2021, figure 4: 3x3, 1x1 and, where the shape stays, the tensor itself; each with a norm."""

    def __init__(self, into: int, out: int, stride: int = 1, groups: int = 1, eps: float = 1e-5) -> None:
        super().__init__()
        self.dense = normed(out, into, (3, 3), stride=stride, groups=groups, eps=eps)
        self.point = normed(out, into, (1, 1), stride=stride, groups=groups, eps=1e-3)
        self.identity = nn.BatchNorm2d(into) if into == out and stride == 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        beside = 0 if self.identity is None else self.identity(x)
        return torch.relu(self.dense(x) + self.point(x) + beside)


class AsymmetricBlock(nn.Module):
    """Ding et al. 2019, figure 1: 3x3, 1x3 and 3x1, each with a norm."""

    def __init__(self, into: int, out: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.square, self.flat, self.high = (
            normed(out, into, size, stride=stride, groups=groups) for size in ((3, 3), (1, 3), (3, 1))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(sum((self.square(x), self.flat(x), self.high(x))))


class Net(nn.Module):
    def __init__(self, *blocks: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x).mean((2, 3)))


def repvgg(num_classes: int = 4) -> nn.Module:
    """A stem without identity, a plain block, a grouped one, one with a stride, norms of unlike eps."""
    blocks = (RepBlock(1, 8, 2), RepBlock(8, 8, eps=1e-2), RepBlock(8, 8, groups=4), RepBlock(8, 16, 2, groups=2))
    return Net(*blocks, RepBlock(16, 16), width=16, classes=num_classes)


def acnet(num_classes: int = 4) -> nn.Module:
    blocks = (AsymmetricBlock(1, 8), AsymmetricBlock(8, 8, 2, groups=2), AsymmetricBlock(8, 12))
    return Net(*blocks, width=12, classes=num_classes)


def plain(num_classes: int = 4) -> nn.Module:
    """3x3 convolutions with and without norm, depthwise, strided; a 1x1, and one whose answer two see."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
            self.deep = nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1, groups=8, bias=False), nn.BatchNorm2d(8), nn.ReLU())
            self.bare = nn.Conv2d(8, 8, 3, padding=1)
            self.point = nn.Conv2d(8, 8, 1)
            self.seen = nn.Conv2d(8, 8, 3, padding=1)
            self.head = nn.Linear(8, num_classes)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.seen(torch.relu(self.point(torch.relu(self.bare(self.deep(self.stem(x)))))))
            return self.head((x * torch.sigmoid(x)).mean((2, 3)))

    return Plain()
