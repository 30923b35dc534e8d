"""The interface of a reader, which makes one engine report its layers' times, and the registry of readers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from optimize.export.macs import Work
from serve.runtime.card.card import Card
from serve.runtime.card.execution import Execution
from serve.runtime.engines.base import Engine, open_engine
from serve.runtime.registry import Registry
from serve.runtime.service.predictor import infer

#: Untimed calls before the first timed one: TorchScript optimises on its second.
WARM_CALLS: Final = 3


@dataclass(frozen=True)
class Subject:
    """The artifact that a reader profiles.

    Attributes:
        folder: the artifact's folder.
        card: its card, whose files were checked.
        execution: its execution.
        images: the batch, ``uint8 (N, C, H, W)``.
        calls: the number of timed calls.
        floats: names and MACs of the layers of its float program, in order, if that is known.
    """

    folder: Path
    card: Card
    execution: Execution
    images: torch.Tensor
    calls: int
    floats: tuple[tuple[str, int], ...] = ()

    def open(self) -> Engine:
        """Open the engine as a server does."""
        return open_engine(self.folder, self.card.ended, self.execution)

    def call(self, engine: Engine) -> None:
        """Make one call, which does all the work of a request after decoding."""
        infer(engine, self.images, self.card.preprocessing, getattr(torch, self.card.input_dtype))


@dataclass(frozen=True)
class Piece:
    """A unit that an engine executes.

    Attributes:
        name: the layer's name in the model, or else the engine's name.
        kind: the engine's word for its operation.
        ms: the time of each call.
        precision: precision of its arithmetic: ``float32``, ``int8`` …. None if the engine does not report it.
        work: MACs and bytes. None if they are unknown.
        start_ms: when it began in the last call, from that call's beginning. None if the engine does not report it.
        after: names of the pieces that produce its inputs.
    """

    name: str
    kind: str
    ms: tuple[float, ...]
    precision: str | None = None
    work: Work | None = None
    start_ms: float | None = None
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reading:
    """An engine's report: its pieces in order of execution, and MACs of the network that belong to no piece."""

    pieces: tuple[Piece, ...]
    left_macs: int = 0
    note: str = ""


@dataclass(frozen=True)
class Reader:
    """How to read one engine. It runs in its own process, so that its changes to a library affect only that.

    Attributes:
        name: the engine's name.
        read: opens the artifact with measurement on, calls it, and returns the report.
        int8_product: maps a side and the number of threads to a call that multiplies two square int8 matrices with the
            engine's own kernels, for the machine's peak. None if the engine computes no integers.
    """

    name: str
    read: Callable[[Subject], Reading]
    int8_product: Callable[[int, int], Callable[[], object]] | None = None


_REGISTRY: Registry[Reader] = Registry(
    "reader of profiles", package="optimize.profiling.readers", group="optimize.profile_readers"
)


def register(entry: Reader) -> Reader:
    """Add a reader to the registry.

    Raises:
        ValueError: this engine has a reader.
    """
    return _REGISTRY.register(entry)


def readers() -> dict[str, Reader]:
    """Return all readers by their engine's name."""
    return _REGISTRY.all()
