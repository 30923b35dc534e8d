"""`unet_small`: a U-Net of about 120,000 parameters, for small data, for tests and for CPUs.

Ronneberger et al. 2015 (arXiv:1505.04597), with batch norms, strided convolutions instead of pools, one convolution
after each concatenation, and bilinear upsampling. All of its layers can be quantized: convolutions with their norms and
ReLUs, concatenations and interpolations of the same ranges. It has no transposed convolution, which stays in float.
"""

from __future__ import annotations

import torch
from torch import nn

from optimize.models.networks.small import TRAINING, block
from optimize.models.source import ModelSource
from optimize.store.sources import source_digest

NAME = "unet_small"

#: Channels at each size, from the input's own to an eighth of it.
_WIDTHS = (16, 24, 40, 48)

#: On `scenes` `make optimize` reached mIoU 0.66 in these 4 epochs, and 0.12 in 8 at SGD's usual rate.
_TRAINING = {**TRAINING, "epochs": 4, "crop_scale": None}


def unet_source() -> ModelSource:
    """Return `unet_small` as a source. Its preprocessing follows from the data."""
    return ModelSource(
        reference=NAME,
        name=NAME,
        fingerprint=f"{NAME}/{source_digest(__name__)}",
        preprocessing=None,
        min_size=2 ** (len(_WIDTHS) - 1),
        size_multiple=2 ** (len(_WIDTHS) - 1),
        origin="own",
        task="segmentation",
        training=_TRAINING,
        factory=lambda classes, _: UNet(classes),
    )


class UNet(nn.Module):
    """See the module. Maps ``float32 (N, 3, H, W)`` with sides that are multiples of 8 to ``(N, classes, H, W)``."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        first, *others = _WIDTHS
        self.stem = nn.Sequential(block(3, first), block(first, first))
        self.down = nn.ModuleList(
            nn.Sequential(block(above, width, stride=2), block(width, width))
            for above, width in zip(_WIDTHS, others, strict=False)
        )
        self.up = nn.ModuleList(
            block(below + width, width) for width, below in zip(_WIDTHS[-2::-1], _WIDTHS[:0:-1], strict=True)
        )
        self.upsample = nn.ModuleList(nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False) for _ in others)
        self.head = nn.Conv2d(first, classes, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits of the input's size."""
        x = self.stem(images)
        levels = []
        for down in self.down:
            levels.append(x)
            x = down(x)
        for upsample, up in zip(self.upsample, self.up, strict=True):
            x = up(torch.cat((upsample(x), levels.pop()), 1))
        logits: torch.Tensor = self.head(x)
        return logits
