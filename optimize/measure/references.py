"""What the artifacts are compared with besides each other: the eager model as people run it before optimising."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import nn

from optimize.measure.latency import Call
from serve.runtime.card import Preprocessing
from serve.runtime.errors import one_line
from serve.runtime.predictor import infer


class Reference(NamedTuple):
    """How an eager module is run."""

    memory_format: torch.memory_format
    compiled: bool


#: The references by name.
REFERENCES = {
    "eager": Reference(torch.contiguous_format, compiled=False),
    "eager channels-last": Reference(torch.channels_last, compiled=False),
    "torch.compile": Reference(torch.contiguous_format, compiled=True),
}


class ModuleEngine:
    """An eager (or compiled) module behind the engines' interface."""

    def __init__(
        self, module: nn.Module, device: torch.device, memory_format: torch.memory_format, *, compiled: bool
    ) -> None:
        self.device = device
        self.provider = f"eager/{device.type}"
        self._module: Call = module.to(device)
        if compiled:
            self._module = torch.compile(self._module)
        self._memory_format = memory_format

    def run(self, batch: torch.Tensor) -> torch.Tensor:
        """Logits ``(N, classes)`` of a batch."""
        return self._module(batch.contiguous(memory_format=self._memory_format))


def references(
    build: Callable[[], nn.Module], preprocessing: Preprocessing, device: torch.device, warm: Callable[[Call], None]
) -> Iterator[tuple[str, Call | str]]:
    """Each reference's name, and its call or the reason why it cannot be measured here.

    Args:
        build: makes the eager float32 module.
        preprocessing: of the batches.
        device: where to run.
        warm: runs a call at every batch size that will be timed.
    """
    for name, (memory_format, compiled) in REFERENCES.items():
        module = build().eval().to(memory_format=memory_format)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                engine = ModuleEngine(module, device, memory_format, compiled=compiled)
                call = _call(engine, preprocessing)
                warm(call)
        except Exception as error:  # noqa: BLE001 - Inductor raises whatever its compiler does
            yield name, f"does not run here: {one_line(error)}"
        else:
            yield name, call


def _call(engine: ModuleEngine, preprocessing: Preprocessing) -> Call:
    return lambda batch: infer(engine, batch, preprocessing, torch.float32)
