"""The history of a training: its curves and where its time went. It is kept for reports and is no part of a key."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from serve.runtime.display import Described

#: The parts of an epoch's time and their names.
PARTS: Final = {
    "data": "data",
    "compute": "compute",
    "communication": "communication",
    "judgement": "held-out images",
    "checkpoints": "checkpoints",
}


@dataclass(frozen=True, repr=False)
class Times(Described):
    """Where an epoch's time went, in seconds. With several processes these are the times of the first.

    Attributes:
        data: waiting for images, and changing them at random.
        compute: forward, backward and the optimizer.
        communication: waiting for the other processes and for what they send.
        judgement: computing the score on the held-out images.
        checkpoints: writing checkpoints.
    """

    data: float = 0.0
    compute: float = 0.0
    communication: float = 0.0
    judgement: float = 0.0
    checkpoints: float = 0.0

    @property
    def total(self) -> float:
        """The sum of all parts, in seconds."""
        return self.data + self.compute + self.communication + self.judgement + self.checkpoints

    def __add__(self, other: Times) -> Times:
        return Times(
            *(one + more for one, more in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True))
        )

    def _facts(self) -> dict[str, str]:
        return {words: f"{getattr(self, name):.3g} s" for name, words in PARTS.items()}


@dataclass(frozen=True, repr=False)
class Epoch(Described):
    """One epoch: mean training loss (nats), the score on the held-out images (fraction), and where its time went."""

    loss: float
    held_out_score: float
    times: Times

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Epoch:
        """Return the epoch that ``dataclasses.asdict`` turned into ``body``."""
        return cls(**{**body, "times": Times(**body["times"])})

    def _facts(self) -> dict[str, str]:
        score, seconds = f"{100 * self.held_out_score:.2f} %", f"{self.times.total:.3g} s"
        return {"loss": f"{self.loss:.4g}", "held-out score": score, "time": seconds}


@dataclass(frozen=True, repr=False)
class Point(Described):
    """Some consecutive steps of an epoch.

    Attributes:
        step: the number of training steps that are done after them.
        loss: mean over their images (nats).
        learning_rate: the learning rate of the last of them.
    """

    step: int
    loss: float
    learning_rate: float


@dataclass(frozen=True, repr=False)
class History(Described):
    """A training from its first epoch to its last.

    Attributes:
        epochs: the epochs in order.
        points: the loss in finer steps than epochs.
        steps: the number of steps in an epoch.
        best: number of the kept epoch, from 0. None if none was better than the initial network.
        before: the score on the held-out images before the first epoch (fraction), if it was measured.
        processes: the number of processes that trained together.
    """

    epochs: tuple[Epoch, ...]
    points: tuple[Point, ...]
    steps: int
    best: int | None
    before: float | None = None
    processes: int = 1

    @property
    def times(self) -> Times:
        """The sum over all epochs."""
        return sum((epoch.times for epoch in self.epochs), Times())

    @property
    def split(self) -> str:
        """Describe where an epoch's time went."""
        parts = [f"{PARTS[name]} {100 * share:.0f} %" for name, share in shares(self.times).items() if share]
        return f"{self.times.total / len(self.epochs):.3g} s an epoch: {', '.join(parts)}"

    def _facts(self) -> dict[str, str]:
        kept = "unchanged" if self.best is None else str(self.best + 1)
        return {"epochs": str(len(self.epochs)), "kept": kept}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> History:
        """Return the history that ``dataclasses.asdict`` and JSON turned into ``body``."""
        epochs = tuple(map(Epoch.from_json, body["epochs"]))
        return cls(**{**body, "epochs": epochs, "points": tuple(Point(**point) for point in body["points"])})


def shares(times: Times) -> dict[str, float]:
    """Return each part of `PARTS` as a share of the whole, in [0, 1]."""
    return {name: getattr(times, name) / (times.total or 1.0) for name in PARTS}
