"""What an engine is: which files it opens and what it needs for that; and the registry of them.

An engine is one file of this package; the registry finds it because it is there, the archive packs it, the keys cover
its source and the machine's versions list its libraries because it declares them. It tells the truth about where it
runs: a provider that was asked for and is not active is an error, never a silent fallback.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from ..card import Card
from ..errors import EngineError
from ..registry import Registry


class Engine(Protocol):
    """An opened model file. Called from one thread at a time.

    ``run`` maps the network's input, ``(N, C, H, W)`` of the card's input dtype on ``device``, to
    logits ``(N, classes)``. ``provider`` names what really executes it.
    """

    device: torch.device
    provider: str

    def run(self, batch: torch.Tensor) -> torch.Tensor:
        """Logits ``(N, classes)`` of a batch."""
        ...


@dataclass(frozen=True)
class Opening:
    """How a model file is to be opened.

    Attributes:
        device: where to run.
        threads: intra-op threads of engines with a pool of their own (PyTorch's are a setting of the process);
            None leaves the engine's default, one per core.
        allow_fallback: let it run on the CPU where what ``device`` needs is not active; ``provider`` then says so.
    """

    device: torch.device
    threads: int | None = None
    allow_fallback: bool = False


@dataclass(frozen=True)
class EngineType:
    """One registered engine.

    Attributes:
        name: the word for it in messages.
        formats: formats of model files that it opens; of two engines for one format the first by name is taken.
        open: opens the card's model file in a folder, whose files were verified.
        libraries: distributions that it runs with, beside torch.
        companions: endings of the files that may lie beside a model file of these formats and belong to it.
        falls_back: whether it can run on the CPU where a GPU was asked for.
    """

    name: str
    formats: tuple[str, ...]
    open: Callable[[Path, Card, Opening], Engine]
    libraries: tuple[str, ...] = ()
    companions: tuple[str, ...] = ()
    falls_back: bool = False

    @property
    def module(self) -> str:
        """The module that the engine is written in: what an archive packs and a key covers."""
        return self.open.__module__


_REGISTRY: Registry[EngineType] = Registry("engine", package=__package__, group="serve.engines")


def register(entry: EngineType) -> EngineType:
    """Add an engine to the registry.

    Raises:
        ValueError: its name is taken, or it opens nothing.
    """
    if not entry.formats:
        raise ValueError(f"the engine {entry.name!r} must say which formats it opens")
    return _REGISTRY.register(entry)


def engines() -> dict[str, EngineType]:
    """All engines by name."""
    return _REGISTRY.all()


def engine_for(card: Card) -> EngineType:
    """The engine that opens the card's model file.

    Raises:
        EngineError: there is none for its format.
    """
    known = engines().values()
    for entry in known:
        if card.format in entry.formats:
            return entry
    formats = sorted({format_ for entry in known for format_ in entry.formats})
    raise EngineError(
        f"{card.name}: no engine here opens {card.format!r} files; there are engines for {', '.join(formats)}"
    )


def open_engine(folder: Path, card: Card, opening: Opening) -> Engine:
    """Open the card's model file.

    Args:
        folder: the artifact's folder.
        card: its card, already verified.
        opening: where and how.

    Raises:
        EngineError: no engine opens its format, it cannot run on the device, or its provider is not active.
    """
    entry, device = engine_for(card), opening.device
    if card.device not in ("any", device.type):
        raise EngineError(f"{card.name}: this artifact runs on {card.device} only, not on {device.type}")
    may_fall_back = opening.allow_fallback and entry.falls_back
    if device.type == "cuda" and not torch.cuda.is_available() and not may_fall_back:
        raise EngineError(f"{card.name}: CUDA was asked for and this machine has no usable CUDA device")
    return entry.open(folder, card, opening)
