"""What the artifacts are compared with besides each other: the eager model as people run it before optimising.

The module travels to the reference's own process by value, pickled by us and read by us (`pickled`).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch
from torch import nn

from optimize.measure.latency import Call
from optimize.models.pickling import pickled_by_value
from serve.runtime.card.card import Preprocessing
from serve.runtime.card.execution import keep_memory
from serve.runtime.device.cores import cores
from serve.runtime.device.transfer import open_transfer
from serve.runtime.errors import EngineError
from serve.runtime.service.predictor import infer


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


#: Variables that make `torch.compile` return the module as it is (torch 2.14), without a word.
_SWITCHES: Final = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")


def references_on(devices: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Kind and device of each reference, by name; on the fastest of the devices it has the plain one."""
    plain = next((device for device in devices if device != "cpu"), "cpu")
    return {
        kind if device == plain else f"{kind}[{device}]": (kind, device)
        for device in sorted(devices, key=lambda device: device != plain)
        for kind in REFERENCES
    }


class ModuleEngine:
    """An eager (or compiled) module behind the engines' interface."""

    def __init__(self, module: nn.Module, device: torch.device, reference: Reference) -> None:
        self.device = device
        self.provider = f"{'inductor' if reference.compiled else 'eager'}/{device.type}"
        self._memory_format = reference.memory_format
        self._module: Call = module.to(device).to(memory_format=reference.memory_format)
        if reference.compiled:
            if switch := next((name for name in _SWITCHES if os.environ.get(name) == "1"), None):
                raise EngineError(f"torch.compile is switched off by {switch}=1")
            from torch._inductor import config

            # As torch's documentation has it for inference: weights become constants of the compiled code, and each
            # batch size, of which there are few, has code of its own.
            config.freezing = True
            self._module = torch.compile(self._module, dynamic=False)

    def run(self, batch: torch.Tensor) -> torch.Tensor:
        """Logits ``(N, classes)`` of a batch."""
        return self._module(batch.contiguous(memory_format=self._memory_format))


def open_reference(name: str, module: nn.Module, preprocessing: Preprocessing, device: str) -> tuple[Call, str]:
    """A module as the reference of this name runs it, in a process of its own.

    Args:
        name: one of `REFERENCES`.
        module: eager, float32.
        preprocessing: of the batches.
        device: where to run it.

    Returns:
        ``uint8`` images to logits, and what executes it.
    """
    torch.set_num_threads(cores())
    if torch.device(device).type == "cpu":
        keep_memory()  # as `settle` has it for what is compared with it
    engine = ModuleEngine(module.eval(), torch.device(device), REFERENCES[name])
    transfer = open_transfer(engine.device, preprocessing.shape)  # as what is served has it

    def call(batch: torch.Tensor) -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the compiler
            return infer(engine, batch, preprocessing, torch.float32, transfer)

    return call, engine.provider


def pickled(build: Callable[[], nn.Module], preprocessing: Preprocessing) -> bytes:
    """A module and its preprocessing, for `open_reference` in another process that cannot import the user's code.

    Classes and functions of installed libraries are named, all others are written out.

    Raises:
        Exception: whatever the module refuses to be pickled with.
    """
    return pickled_by_value((build(), preprocessing))
