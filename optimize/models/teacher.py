"""A teacher: a network from whose answers another learns, with everything that its answers depend on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from serve.runtime.card.card import Card, Preprocessing
from serve.runtime.card.execution import Execution
from serve.runtime.display import Described
from serve.runtime.engines.base import Engine, open_engine


@dataclass(frozen=True, repr=False)
class Teacher(Described):
    """A network that answers a student's images.

    Attributes:
        name: its name for people. No key depends on it.
        digest: SHA-256 of everything that its answers depend on besides the images.
        module: maps ``float32 (N, C, H, W)`` to logits ``(N, classes)``, in eval mode, on the CPU.
        mean: mean of each channel that its own images are normalised with.
        std: standard deviation of each channel, likewise.
    """

    name: str
    digest: str
    module: nn.Module
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def _facts(self) -> dict[str, str]:
        return {"name": self.name, "mean": str(self.mean), "std": str(self.std), "digest": self.digest}

    def renormalised(self, inputs: torch.Tensor, student: Preprocessing) -> torch.Tensor:
        """Convert images ``(N, C, H, W)`` from the student's normalisation to this network's."""
        if (self.mean, self.std) == (student.mean, student.std):
            return inputs
        mean, std, own_mean, own_std = (
            torch.tensor(numbers, dtype=inputs.dtype, device=inputs.device).view(-1, 1, 1)
            for numbers in (student.mean, student.std, self.mean, self.std)
        )
        return (inputs * std + (mean - own_mean)) / own_std


class Served(nn.Module):
    """An artifact without an eager module as a network: it answers with its file, as the server does.

    It is copied and pickled closed, and opened at its first call. If its file takes pixels, images are rounded to the
    nearest ones. These are the images' own pixels unless the images were mixed.

    Args:
        folder: the artifact's folder.
        card: its card.
        execution: its execution.
    """

    def __init__(self, folder: Path, card: Card, execution: Execution) -> None:
        super().__init__()
        self._opens = folder, card, execution
        self._engine: Engine | None = None

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits ``float32 (N, classes)``, on the images' device."""
        if self._engine is None:
            self._engine = open_engine(*self._opens)
        card = self._opens[1]
        if card.input_dtype == "uint8":
            batch = _pixels(images, card.preprocessing)
        else:
            batch = images.to(getattr(torch, card.input_dtype))
        logits, *_ = self._engine.run(batch.to(self._engine.device).contiguous())
        return logits.to(images.device, torch.float32)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_engine": None}


def _pixels(images: torch.Tensor, preprocessing: Preprocessing) -> torch.Tensor:
    """Convert normalised images, ``(N, C, H, W)``, back to ``uint8``."""
    mean, std = (
        torch.tensor(each, device=images.device).view(-1, 1, 1) for each in (preprocessing.mean, preprocessing.std)
    )
    return ((images.float() * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)


@dataclass(frozen=True)
class Teaching:
    """A suitable teacher that is not open yet. It need not be opened if the store has its student already.

    Attributes:
        digest: see `Teacher`.
        open: opens it.
    """

    digest: str
    open: Callable[[], Teacher]
