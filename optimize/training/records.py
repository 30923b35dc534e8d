"""What a training run did, and how far one has come."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Epoch:
    """One epoch: mean training loss (nats) and top-1 on the held-out images (fraction)."""

    loss: float
    held_out_top1: float


@dataclass(frozen=True)
class TrainingResult:
    """What a training run did; the module is left with the weights of epoch ``best``.

    Attributes:
        epochs: one after the other.
        best: number of the kept one, from 0; None: no epoch was better than the module as it came, and that is kept.
        held_out_top1: of what is kept, on the held-out images (fraction).
        held_out_images: how many there are.
        notes: the images that could not be read.
    """

    epochs: tuple[Epoch, ...]
    best: int | None
    held_out_top1: float
    held_out_images: int
    notes: tuple[str, ...] = ()

    @property
    def kept(self) -> str:
        """Which epoch was kept and how good it is, as a note."""
        which = "best of {} epochs: {}" if self.best is not None else "no better after any of {} epochs, kept {}"
        number = str(self.best + 1) if self.best is not None else "as it was before them"
        return (
            f"{which.format(len(self.epochs), number)}, "
            f"top-1 {self.held_out_top1:.4f} on {self.held_out_images} held-out images"
        )


@dataclass
class Progress:
    """How far a run has come.

    Attributes:
        epoch: number of the epoch that is under way, from 0.
        place: batches of it that are done.
        loss: sum of its images' losses so far, a float32 scalar on the run's device.
        images: how many these are; each counts once, in however many processes it is.
        epochs: those that are done.
        best: number of the best of them; None: the module as it came.
        reached: top-1 of the best on the held-out images; -1: nothing was judged yet.
        kept: the best's state.
    """

    loss: torch.Tensor
    epoch: int = 0
    place: int = 0
    images: float = 0.0
    epochs: list[Epoch] = field(default_factory=list)
    best: int | None = None
    reached: float = -1.0
    kept: dict[str, Any] = field(default_factory=dict)

    def state(self) -> dict[str, Any]:
        """Tensors and plain values, for a checkpoint."""
        return {**vars(self), "epochs": [[epoch.loss, epoch.held_out_top1] for epoch in self.epochs]}

    @classmethod
    def of_state(cls, state: dict[str, Any], device: torch.device) -> Progress:
        """What `state` gave, on a device."""
        epochs = [Epoch(loss, top1) for loss, top1 in state["epochs"]]
        return cls(**{**state, "epochs": epochs, "loss": state["loss"].to(device)})
