"""The settings that all steps of a run share: data, preprocessing, device, seed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from optimize.data.loading import Loader, loader
from optimize.data.records import ImageData
from optimize.listener import SILENT, Listener
from optimize.models.teacher import Teacher
from optimize.store.objects import Store
from optimize.tasks.base import Task, find_task
from serve.runtime.card.card import Preprocessing, Probabilities
from serve.runtime.display import Described
from serve.runtime.images.image_preprocessing import normalise

#: The largest share of the calibration images that may be unreadable.
_CALIBRATION_UNREADABLE = 0.05


@dataclass(frozen=True, repr=False)
class Context(Described):
    """The settings that all steps of a run share.

    Attributes:
        data: the images for training, calibration and measurement.
        preprocessing: turns an image's bytes into the network's input. All artifacts of the run share it.
        device: where the run trains, calibrates and measures.
        seed: the seed of every random choice.
        listener: receives the progress of long steps.
        skip_unreadable: leave out validation images that cannot be read, instead of raising an error.
        scratch: folder for decoded pixels that do not fit into memory. By default the user's cache folder.
        unfinished: folder for the checkpoints of a step, from which it resumes after an interruption. With None no
            checkpoints are written.
        checkpoint_seconds: seconds between two such checkpoints.
        processes: the number of processes that train together.
        tensorboard: folder for TensorBoard events of training. With None no events are written.
        teacher: the teacher of the network that is trained, if it has one.
        store: keeps the answers of a teacher. With None they are not kept.
        probabilities: how the trained network's logits become probabilities. This decides the loss.
        outputs: names of the network's outputs, the logits first. Empty: its only one. See `with_outputs`.
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
    outputs: tuple[str, ...] = ()

    @cached_property
    def task(self) -> Task:
        """What the network is for, as the data say.

        Raises:
            UserError: there is no such task.
        """
        return find_task(self.data.task).of(self.data)

    @property
    def width(self) -> int:
        """The number of outputs that a network is built with."""
        return self.task.outputs(len(self.data.classes))

    def _facts(self) -> dict[str, str]:
        shape = " × ".join(map(str, self.preprocessing.shape))
        return {"data": self.data.name, "input": shape, "device": str(self.device), "seed": str(self.seed)}

    def calibration(self, images: int, batch_size: int = 32) -> Loader:
        """Return a loader of ``images`` training images for calibration, stratified by class and seeded.

        It never contains images that accuracy is measured on. Up to one image in twenty may be unreadable: these are
        reported and left out.
        """
        return loader(
            self.data.train,
            self.preprocessing,
            batch_size=batch_size,
            device=self.device,
            seed=self.seed,
            limit=images,
            skip_unreadable=_CALIBRATION_UNREADABLE,
            remedy="at most one in twenty calibration images may be unreadable",
            said=self.listener.said,
        )

    def evaluation(self, batch_size: int, device: torch.device) -> Loader:
        """Return a loader of the validation images in their order. They are decoded once for all measurements.

        Unreadable images raise an error that names all of them. With ``skip_unreadable`` they are left out.
        """
        return loader(
            self.data.val,
            self.preprocessing,
            batch_size=batch_size,
            device=device,
            skip_unreadable=1.0 if self.skip_unreadable else 0.0,
            remedy="repair or remove them, or measure without them: --skip-unreadable (skip_unreadable=True in Python)",
            scratch=self.scratch,
            told=lambda share: self.listener.progressed(share, "decoding"),
            said=self.listener.said,
        )

    def pixels(self, images: int = 4) -> torch.Tensor:
        """Return a batch of real training images, ``uint8 (images, C, H, W)`` on the CPU."""
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
        """Return the images of `pixels` normalised: ``float32 (images, C, H, W)`` on the CPU."""
        return normalise(self.pixels(images), self.preprocessing, torch.device("cpu"), torch.float32)
