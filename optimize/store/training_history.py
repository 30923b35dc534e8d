"""How a training went: its curves, and where its time went. An artifact keeps it for its report; no key has it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from serve.runtime.display import Described

#: The parts of an epoch's time, and what they are called.
PARTS: Final = {
    "data": "data",
    "compute": "compute",
    "communication": "communication",
    "judgement": "held-out images",
    "checkpoints": "checkpoints",
}


@dataclass(frozen=True, repr=False)
class Times(Described):
    """Where an epoch's time went, seconds; of several processes the first's.

    Attributes:
        data: waiting for images, and changing them at random.
        compute: forward, backward and the optimizer.
        communication: waiting for the other processes: what they send, and that they come so far.
        judgement: top-1 on the held-out images.
        checkpoints: writing how far the run has come.
    """

    data: float = 0.0
    compute: float = 0.0
    communication: float = 0.0
    judgement: float = 0.0
    checkpoints: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.data + self.compute + self.communication + self.judgement + self.checkpoints

    def __add__(self, other: Times) -> Times:
        return Times(
            *(one + more for one, more in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True))
        )

    def _facts(self) -> dict[str, str]:
        return {words: f"{getattr(self, name):.3g} s" for name, words in PARTS.items()}


@dataclass(frozen=True, repr=False)
class Epoch(Described):
    """One epoch: mean training loss (nats), top-1 on the held-out images (fraction), and where its time went."""

    loss: float
    held_out_top1: float
    times: Times

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Epoch:
        """What ``dataclasses.asdict`` gave."""
        return cls(**{**body, "times": Times(**body["times"])})

    def _facts(self) -> dict[str, str]:
        top1, seconds = f"{100 * self.held_out_top1:.2f} %", f"{self.times.total:.3g} s"
        return {"loss": f"{self.loss:.4g}", "held-out top-1": top1, "time": seconds}


@dataclass(frozen=True, repr=False)
class Point(Described):
    """Some steps of an epoch, one after the other.

    Attributes:
        step: how many steps of the training are done after them.
        loss: mean over their images (nats).
        learning_rate: of the last of them.
    """

    step: int
    loss: float
    learning_rate: float


@dataclass(frozen=True, repr=False)
class History(Described):
    """A training, from the first epoch to the last.

    Attributes:
        epochs: one after the other.
        points: the loss in more detail than by epochs.
        steps: how many an epoch has.
        best: number of the kept epoch, from 0; None: none was better than the network as it came.
        before: top-1 on the held-out images before the first epoch (fraction), where that was judged.
        processes: how many trained together.
    """

    epochs: tuple[Epoch, ...]
    points: tuple[Point, ...]
    steps: int
    best: int | None
    before: float | None = None
    processes: int = 1

    @property
    def times(self) -> Times:
        """Of all epochs."""
        return sum((epoch.times for epoch in self.epochs), Times())

    @property
    def split(self) -> str:
        """Where an epoch's time went, in words."""
        parts = [f"{PARTS[name]} {100 * share:.0f} %" for name, share in shares(self.times).items() if share]
        return f"{self.times.total / len(self.epochs):.3g} s an epoch: {', '.join(parts)}"

    def _facts(self) -> dict[str, str]:
        kept = "as it came" if self.best is None else str(self.best + 1)
        return {"epochs": str(len(self.epochs)), "kept": kept}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> History:
        """What ``dataclasses.asdict`` gave, out of JSON."""
        epochs = tuple(map(Epoch.from_json, body["epochs"]))
        return cls(**{**body, "epochs": epochs, "points": tuple(Point(**point) for point in body["points"])})


def shares(times: Times) -> dict[str, float]:
    """Each part of `PARTS` as a share of the whole, in [0, 1]."""
    return {name: getattr(times, name) / (times.total or 1.0) for name in PARTS}
