"""``torchscript``: a ``torch.jit`` file, float or quantized."""

from __future__ import annotations

from pathlib import Path

import torch

from ..card.card import Card
from ..card.execution import Execution
from ..device.cpu_integers import has_vnni
from ..errors import EngineError
from ..model_files.script_file import load_script
from ..outputs import Outputs, as_outputs
from .base import Engine, EngineType, register


class TorchScriptEngine:
    """See `Engine`."""

    def __init__(self, folder: Path, card: Card, execution: Execution) -> None:
        self.device = torch.device(execution.device)
        if card.precision.startswith("int8") and self.device.type == "cpu":
            use_int8_kernels()
        self.provider = f"torchscript/{self.device.type}"
        self._module = load_script(folder / card.file, self.device)

    def run(self, batch: torch.Tensor) -> Outputs:
        """Return the outputs for a batch."""
        return as_outputs(self._module(batch))


def use_int8_kernels() -> None:
    """Select torch's quantized kernels for this process: oneDNN's with VNNI, else those of the ``x86`` engine.

    Call it before `torch.jit.load` and ``convert_fx``. Quantized weights are packed for the engine that is selected
    while the file is read. A file from one engine is packed again by another.

    torch's ``x86`` engine (2.11 to 2.14) gives convolutions of more than 100 groups to fbgemm. Its fast depthwise
    kernels (3x3 and 5x5, padded, channels a multiple of 8) add products in 16 bits, with or without VNNI. With
    activations of 8 bits they saturate, up to 43 steps off. oneDNN is exact, and was as fast or faster in every
    measurement. Without VNNI both add in 16 bits, which is safe for activations of 7 bits.
    """
    engine = "onednn" if has_vnni() else "x86"
    supported = torch.backends.quantized.supported_engines
    if engine not in supported:
        raise EngineError(f"torch has no {engine} quantized kernels on this machine (it has: {', '.join(supported)})")
    torch.backends.quantized.engine = engine


def _open(folder: Path, card: Card, execution: Execution) -> Engine:
    return TorchScriptEngine(folder, card, execution)


def _probe(device: torch.device) -> torch.Tensor:
    unit = torch.jit.CompilationUnit("def negative(x):\n    return -x\n")
    negative: torch.Tensor = unit.negative(torch.ones(1, device=device))
    return negative


TORCHSCRIPT = register(
    EngineType("torchscript", formats=("torchscript",), open=_open, probe=_probe, devices=("cpu", "cuda"))
)
