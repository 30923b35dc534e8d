"""``exported``: a ``torch.export`` archive (``.pt2``), the model's ATen graph, run operator by operator."""

from __future__ import annotations

import importlib
from pathlib import Path

import torch

from ..card.card import Card
from ..card.execution import Execution
from ..device.cpu_integers import ANY_X86, TENSORRT, VNNI_X86
from ..model_files.program_file import program_on
from ..outputs import Outputs, as_outputs
from .base import Engine, EngineType, register


class ExportedProgramEngine:
    """See `Engine`. ``module`` is the graph that it runs, for inspection."""

    def __init__(self, folder: Path, card: Card, execution: Execution) -> None:
        self.device = torch.device(execution.device)
        self.provider = f"aten/{self.device.type}"
        if card.target is not None:
            # This registers the operators quantized_decomposed (torch 2.11 to 2.14).
            importlib.import_module("torch.ao.quantization.fx._decomposed")
        self.module = program_on(folder / card.file, self.device).module()

    def run(self, batch: torch.Tensor) -> Outputs:
        """Return the outputs for a batch."""
        return as_outputs(self.module(batch))


def _open(folder: Path, card: Card, execution: Execution) -> Engine:
    return ExportedProgramEngine(folder, card, execution)


def _probe(device: torch.device) -> torch.Tensor:
    return torch.nn.functional.conv2d(torch.ones(1, 1, 2, 2, device=device), torch.ones(1, 1, 2, 2, device=device))


EXPORTED = register(
    EngineType(
        "exported",
        formats=("exported_program",),
        open=_open,
        probe=_probe,
        devices=("cpu", "cuda"),
        # Operator by operator, explicit quantizers compute any integers exactly.
        targets=(ANY_X86, VNNI_X86, TENSORRT),
    )
)
