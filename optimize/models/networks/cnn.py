"""`cnn_small`: a convolutional network of about 290,000 parameters that gives a vector for each image.

It is for small data, for tests and for CPUs, and for any task with one vector for an image. Four convolutions halve the
sides, and behind each but the first is another, with batch norms and ReLUs.
"""

from __future__ import annotations

import torch
from torch import nn

from optimize.models.networks.small import TRAINING, block
from optimize.models.source import ModelSource
from optimize.store.sources import source_digest

NAME = "cnn_small"

#: Channels at each size, from a half of the input's to a sixteenth. Multiples of 16 are three times as fast on a CPU as
#: multiples of 8 (torch 2.14).
_WIDTHS = (16, 32, 64, 128)

_TRAINING = {**TRAINING, "epochs": 8}


def cnn_source() -> ModelSource:
    """Return `cnn_small` as a source. Its preprocessing follows from the data."""
    return ModelSource(
        reference=NAME,
        name=NAME,
        fingerprint=f"{NAME}/{source_digest(__name__)}",
        preprocessing=None,
        min_size=2 ** len(_WIDTHS),
        origin="own",
        task="classification",
        training=_TRAINING,
        factory=lambda outputs, _: CNN(outputs),
    )


class CNN(nn.Module):
    """See the module. Maps ``float32 (N, 3, H, W)`` with sides of at least 16 to ``(N, outputs)``."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(
                nn.Sequential(block(above, width, stride=2), *([block(width, width)] if above > 3 else []))
                for above, width in zip((3, *_WIDTHS), _WIDTHS, strict=False)
            )
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(_WIDTHS[-1], outputs)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return a vector for each image."""
        found: torch.Tensor = self.head(torch.flatten(self.pool(self.features(images)), 1))
        return found
