"""``torchscript``: a ``torch.jit`` file, float or quantized."""

from __future__ import annotations

from pathlib import Path

import torch

from ..card import Card
from ..errors import EngineError
from ..script_file import load_script
from .base import Engine, EngineType, Opening, register


class TorchScriptEngine:
    """See `Engine`."""

    def __init__(self, folder: Path, card: Card, opening: Opening) -> None:
        if card.precision == "int8" and opening.device.type == "cpu":
            use_x86_kernels()
        self.device = opening.device
        self.provider = f"torchscript/{self.device.type}"
        self._module = load_script(folder / card.file, self.device)

    def run(self, batch: torch.Tensor) -> torch.Tensor:
        """Logits ``(N, classes)`` of a batch."""
        logits: torch.Tensor = self._module(batch)
        return logits


def use_x86_kernels() -> None:
    """Select torch's x86 quantized kernels for this process.

    Quantized weights are packed for the engine that is selected while the file is read, so this comes
    before `torch.jit.load` and before ``convert_fx``.
    """
    supported = torch.backends.quantized.supported_engines
    if "x86" not in supported:
        raise EngineError(f"torch has no x86 quantized kernels on this machine (it has: {', '.join(supported)})")
    torch.backends.quantized.engine = "x86"


def _open(folder: Path, card: Card, opening: Opening) -> Engine:
    return TorchScriptEngine(folder, card, opening)


TORCHSCRIPT = register(EngineType("torchscript", formats=("torchscript",), open=_open))
