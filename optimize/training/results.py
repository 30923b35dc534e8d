"""What a training run did, and how far one has come."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from optimize.store.training_history import Epoch, History, Point, Times

#: Puts a module's parts into modes of their own, given the epoch's number, from 0, and whether it is trained now.
SetMode = Callable[[nn.Module, int, bool], None]


class Penalty(Protocol):
    """What pulls weights beside the loss. It travels to the processes that train, pickled."""

    def add(self, module: nn.Module) -> None:
        """Add its gradient to those that the loss has given to the parameters of ``module``."""


@dataclass(frozen=True)
class Manner:
    """How a module is trained beside the settings: what whoever has it trained knows of it; see `loop.train`."""

    set_mode: SetMode | None = None
    from_start: bool = False
    keep_zeros: bool = False
    penalty: Penalty | None = None
    nodes: Mapping[str, str] | None = None


@dataclass(frozen=True)
class TrainingResult:
    """What a training run did; the module is left with the weights of the epoch ``history.best``.

    Attributes:
        history: its epochs and curves.
        held_out_top1: of what is kept, on the held-out images (fraction).
        held_out_images: how many there are.
        notes: who taught, and the images that could not be read.
    """

    history: History
    held_out_top1: float
    held_out_images: int
    notes: tuple[str, ...] = ()

    @property
    def epochs(self) -> tuple[Epoch, ...]:
        """One after the other."""
        return self.history.epochs

    @property
    def best(self) -> int | None:
        """Number of the kept one, from 0; None: no epoch was better than the module as it came, and that is kept."""
        return self.history.best

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
        loss: sum of the losses of the images since the last point, in this process; a float32 scalar on its device.
        images: how many these are; each counts once, in however many processes it is.
        epoch: number of the epoch that is under way, from 0.
        place: batches of it that are done.
        epoch_loss: sum of the losses of its images up to the last point, in all processes.
        epoch_images: how many these are.
        times: where the time of the epoch went, in this process.
        epochs: those that are done.
        points: see `History`.
        before: see `History`.
        best: number of the best epoch; None: the module as it came.
        reached: top-1 of the best on the held-out images; -1: nothing was judged yet.
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
    reached: float = -1.0
    kept: dict[str, Any] = field(default_factory=dict)

    def history(self, steps: int, processes: int) -> History:
        """What is kept of it, with how many steps an epoch has."""
        return History(tuple(self.epochs), tuple(self.points), steps, self.best, self.before, processes)

    def next_epoch(self) -> None:
        """Begin on the next epoch."""
        self.epoch, self.place = self.epoch + 1, 0
        self.epoch_loss = self.epoch_images = 0.0
        self.times = Times()

    def state(self) -> dict[str, Any]:
        """Tensors and plain values, for a checkpoint."""
        return vars(self) | {
            "times": dataclasses.asdict(self.times),
            "epochs": [dataclasses.asdict(epoch) for epoch in self.epochs],
            "points": [dataclasses.asdict(point) for point in self.points],
        }

    @classmethod
    def of_state(cls, state: dict[str, Any], device: torch.device) -> Progress:
        """What `state` gave, on a device."""
        plain = {
            "loss": state["loss"].to(device),
            "times": Times(**state["times"]),
            "epochs": [Epoch.from_json(epoch) for epoch in state["epochs"]],
            "points": [Point(**point) for point in state["points"]],
        }
        return cls(**state | plain)
