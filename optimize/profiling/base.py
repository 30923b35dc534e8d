"""What a reader is: how one engine is made to tell what its layers take. And the registry of them."""

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

#: Calls before the first that counts: TorchScript optimises on its second.
WARM_CALLS: Final = 3


@dataclass(frozen=True)
class Subject:
    """What a reader is to look at.

    Attributes:
        folder: the artifact's.
        card: its card, whose files were checked.
        execution: what runs it.
        images: the batch, ``uint8 (N, C, H, W)``.
        calls: how many calls are to count.
        floats: names and MACs of the layers of the float program that it was made from, in order, if that is known.
    """

    folder: Path
    card: Card
    execution: Execution
    images: torch.Tensor
    calls: int
    floats: tuple[tuple[str, int], ...] = ()

    def open(self) -> Engine:
        """The engine, as a server opens it."""
        return open_engine(self.folder, self.card, self.execution)

    def call(self, engine: Engine) -> None:
        """One call: all that a request pays for once its image is decoded."""
        infer(engine, self.images, self.card.preprocessing, getattr(torch, self.card.input_dtype))


@dataclass(frozen=True)
class Piece:
    """What an engine executes as one.

    Attributes:
        name: of the layer as the model has it, or else as the engine calls it.
        kind: the engine's word for what it does.
        ms: what each call took.
        precision: of its arithmetic: ``float32``, ``int8`` …; None where the engine does not say.
        work: MACs and bytes; None where they cannot be known.
        start_ms: when it began in the last call, from that call's beginning; None where the engine does not say.
        after: names of the pieces whose answers it is given.
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
    """What an engine told: its pieces in order of execution, and MACs of the network that could be given to none."""

    pieces: tuple[Piece, ...]
    left_macs: int = 0
    note: str = ""


@dataclass(frozen=True)
class Reader:
    """How one engine is read. It runs in a process of its own: what it does to a library, it does to that process.

    Attributes:
        name: the engine's.
        read: opens the artifact so that the engine tells, calls it, and gives what was told.
        int8_product: from a side and the number of threads to a call that multiplies two square int8 matrices with the
            engine's own kernels, for the peak of the machine; None where the engine computes no integers.
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
        ValueError: there is one of this engine.
    """
    return _REGISTRY.register(entry)


def readers() -> dict[str, Reader]:
    """All readers by their engine's name."""
    return _REGISTRY.all()
