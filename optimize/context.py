"""What every step of a run shares: data, preprocessing, device, seed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from optimize.data.loading import Loader, loader
from optimize.data.records import ImageData
from optimize.listener import SILENT, Listener
from optimize.models.teacher import Teacher
from optimize.store.objects import Store
from serve.runtime.card.card import Preprocessing, Probabilities
from serve.runtime.display import Described
from serve.runtime.images.image_preprocessing import normalise

#: Share of the calibration images that may be unreadable.
_CALIBRATION_UNREADABLE = 0.05


@dataclass(frozen=True, repr=False)
class Context(Described):
    """What every step of a run shares.

    Attributes:
        data: images to train, calibrate and measure with.
        preprocessing: bytes to the network's input, the same for all artifacts of the run.
        device: where training, calibration and measurement happen.
        seed: of every random choice.
        listener: told how far a long step is.
        skip_unreadable: measure without those validation images that cannot be read, instead of refusing.
        scratch: folder for pixels that memory does not hold; the user's cache folder by default.
        unfinished: folder in which what is being made keeps how far it has come, to go on after an interruption; None:
            nowhere.
        checkpoint_seconds: how long after one such checkpoint the next is due.
        processes: how many train together.
        tensorboard: folder for the events of what trains; None: none are written.
        teacher: of what is being made, where its training has one.
        store: where a teacher's answers are kept; None: nowhere.
        probabilities: what the logits of the network that is trained become, which decides the loss.
    """

    data: ImageData
    preprocessing: Preprocessing
    device: torch.device
    seed: int = 0
    listener: Listener = SILENT
    skip_unreadable: bool = False
    scratch: Path | None = None
    unfinished: Path | None = None
    checkpoint_seconds: float = 60.0
    processes: int = 1
    tensorboard: Path | None = None
    teacher: Teacher | None = None
    store: Store | None = None
    probabilities: Probabilities = "softmax"

    def _facts(self) -> dict[str, str]:
        shape = " × ".join(map(str, self.preprocessing.shape))
        return {"data": self.data.name, "input": shape, "device": str(self.device), "seed": str(self.seed)}

    def calibration(self, images: int, batch_size: int = 32) -> Loader:
        """``images`` training images (never those that accuracy is measured on), stratified and seeded.

        Up to a twentieth of them may be unreadable; they are said and left out.
        """
        return loader(
            self.data.train,
            self.preprocessing,
            batch_size=batch_size,
            device=self.device,
            seed=self.seed,
            limit=images,
            skip_unreadable=_CALIBRATION_UNREADABLE,
            remedy="of the images to calibrate with, one in twenty may be",
            said=self.listener.said,
        )

    def evaluation(self, batch_size: int, device: torch.device) -> Loader:
        """The validation images in their order, decoded once for all that are measured.

        Images that cannot be read are refused, all that there are, or left out with ``skip_unreadable``.
        """
        return loader(
            self.data.val,
            self.preprocessing,
            batch_size=batch_size,
            device=device,
            skip_unreadable=1.0 if self.skip_unreadable else 0.0,
            remedy="mend or remove them, or measure without them: --skip-unreadable (skip_unreadable=True in Python)",
            scratch=self.scratch,
            told=lambda share: self.listener.progressed(share, "decoding"),
            said=self.listener.said,
        )

    def pixels(self, images: int = 4) -> torch.Tensor:
        """A batch of real training images, ``uint8 (images, C, H, W)`` on the CPU."""
        batch, _ = next(
            iter(
                loader(
                    self.data.train,
                    self.preprocessing,
                    batch_size=images,
                    device=self.device,
                    seed=self.seed,
                    limit=images,
                    skip_unreadable=1.0,
                )
            )
        )
        return batch.repeat(-(-images // len(batch)), 1, 1, 1)[:images].cpu()  # some may be unreadable

    def example(self, images: int = 4) -> torch.Tensor:
        """The same images as `pixels`, normalised: ``float32 (images, C, H, W)`` on the CPU."""
        return normalise(self.pixels(images), self.preprocessing, torch.device("cpu"), torch.float32)
