"""``exported``: a ``torch.export`` archive (``.pt2``), the model's ATen graph, run operator by operator."""

from __future__ import annotations

from pathlib import Path

import torch

from ..card import Card
from ..program_file import load_program
from .base import Engine, EngineType, Opening, register


class ExportedProgramEngine:
    """See `Engine`."""

    def __init__(self, folder: Path, card: Card, opening: Opening) -> None:
        program = load_program(folder / card.file)
        self.device = opening.device
        if self.device.type != "cpu":
            from torch.export.passes import move_to_device_pass

            program = move_to_device_pass(program, str(self.device))
        self.provider = f"aten/{self.device.type}"
        self._module = program.module()

    def run(self, batch: torch.Tensor) -> torch.Tensor:
        """Logits ``(N, classes)`` of a batch."""
        logits: torch.Tensor = self._module(batch)
        return logits


def _open(folder: Path, card: Card, opening: Opening) -> Engine:
    return ExportedProgramEngine(folder, card, opening)


EXPORTED = register(EngineType("exported", formats=("exported_program",), open=_open))
