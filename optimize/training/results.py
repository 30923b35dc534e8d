"""The results and the progress of a training run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from optimize.store.training_history import Epoch, History, Point, Times

#: Sets the modes of a module's parts, given the epoch's number from 0, and whether it is in training now.
SetMode = Callable[[nn.Module, int, bool], None]


class Penalty(Protocol):
    """Pulls weights besides the loss. It is pickled for the training processes."""

    def add(self, module: nn.Module) -> None:
        """Add its gradient to the loss's gradients of the parameters of ``module``."""


@dataclass(frozen=True)
class Manner:
    """How a module is trained besides the settings: the caller's arguments; see `loop.train`."""

    set_mode: SetMode | None = None
    from_start: bool = False
    keep_zeros: bool = False
    penalty: Penalty | None = None
    nodes: Mapping[str, str] | None = None
    auxiliary: tuple[float, ...] = ()


@dataclass(frozen=True)
class TrainingResult:
    """The result of a training run. The module has the weights of the epoch ``history.best``.

    Attributes:
        history: its epochs and curves.
        held_out_score: the score of the kept weights on the held-out images (fraction).
        held_out_images: the number of these images.
        metric: the title of the score.
        notes: the teacher, and the images that could not be read.
    """

    history: History
    held_out_score: float
    held_out_images: int
    metric: str
    notes: tuple[str, ...] = ()

    @property
    def epochs(self) -> tuple[Epoch, ...]:
        """Return the epochs in order."""
        return self.history.epochs

    @property
    def best(self) -> int | None:
        """Return the number of the kept epoch, from 0. None: no epoch was better than the initial module."""
        return self.history.best

    @property
    def kept(self) -> str:
        """Say which epoch was kept and how good it is, as a note."""
        which = "best of {} epochs: {}" if self.best is not None else "no better after any of {} epochs, kept {}"
        number = str(self.best + 1) if self.best is not None else "as it was before training"
        return (
            f"{which.format(len(self.epochs), number)}, "
            f"{self.metric} {self.held_out_score:.4f} on {self.held_out_images} held-out images"
        )


@dataclass
class Progress:
    """The progress of a run.

    Attributes:
        loss: sum of the losses of the images since the last point, in this process, as a float32 scalar on its device.
        images: the number of these images. Each counts once, in however many processes it is.
        epoch: number of the current epoch, from 0.
        place: the number of its batches that are done.
        epoch_loss: sum of the losses of its images up to the last point, in all processes.
        epoch_images: the number of these images.
        times: where the time of the epoch went, in this process.
        epochs: the finished epochs.
        points: see `History`.
        before: see `History`.
        best: number of the best epoch. None: the initial module.
        reached: the score of the best on the held-out images. Minus infinity: nothing was judged yet.
        kept: the best's state.
    """

    loss: torch.Tensor
    images: float = 0.0
    epoch: int = 0
    place: int = 0
    epoch_loss: float = 0.0
    epoch_images: float = 0.0
    times: Times = field(default_factory=Times)
    epochs: list[Epoch] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    before: float | None = None
    best: int | None = None
    reached: float = -math.inf
    kept: dict[str, Any] = field(default_factory=dict)

    def history(self, steps: int, processes: int) -> History:
        """Return the history, given the number of steps in an epoch."""
        return History(tuple(self.epochs), tuple(self.points), steps, self.best, self.before, processes)

    def next_epoch(self) -> None:
        """Begin the next epoch."""
        self.epoch, self.place = self.epoch + 1, 0
        self.epoch_loss = self.epoch_images = 0.0
        self.times = Times()

    def state(self) -> dict[str, Any]:
        """Return tensors and plain values, for a checkpoint."""
        return vars(self) | {
            "times": dataclasses.asdict(self.times),
            "epochs": [dataclasses.asdict(epoch) for epoch in self.epochs],
            "points": [dataclasses.asdict(point) for point in self.points],
        }

    @classmethod
    def of_state(cls, state: dict[str, Any], device: torch.device) -> Progress:
        """Restore the result of `state` on a device."""
        plain = {
            "loss": state["loss"].to(device),
            "times": Times(**state["times"]),
            "epochs": [Epoch.from_json(epoch) for epoch in state["epochs"]],
            "points": [Point(**point) for point in state["points"]],
        }
        return cls(**state | plain)
