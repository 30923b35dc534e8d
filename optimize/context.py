"""What every step of a run shares: data, preprocessing, device, seed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from optimize.data.loading import Loader, loader
from optimize.data.records import ImageData
from optimize.listener import SILENT, Listener
from serve.runtime.card import Preprocessing
from serve.runtime.images import normalise


@dataclass(frozen=True)
class Context:
    """What every step of a run shares.

    Attributes:
        data: images to train, calibrate and measure with.
        preprocessing: bytes to the network's input, the same for all artifacts of the run.
        device: where training, calibration and measurement happen.
        seed: of every random choice.
        listener: told how far a long step is.
    """

    data: ImageData
    preprocessing: Preprocessing
    device: torch.device
    seed: int = 0
    listener: Listener = SILENT

    def calibration(self, images: int, batch_size: int = 32) -> Loader:
        """``images`` training images (never those that accuracy is measured on), stratified and seeded."""
        return loader(
            self.data.train,
            self.preprocessing,
            batch_size=batch_size,
            device=self.device,
            seed=self.seed,
            limit=images,
        )

    def example(self, images: int = 4) -> torch.Tensor:
        """A batch of real, normalised training images, ``float32 (images, C, H, W)`` on the CPU."""
        batch, _ = next(iter(self.calibration(images, images)))
        return normalise(batch, self.preprocessing, torch.device("cpu"), torch.float32)
