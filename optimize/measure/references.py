"""The eager references that artifacts are compared with: the model as people run it before optimising.

The module travels by value to the reference's own process. This project pickles it and reads it (`pickled`).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, cast

import torch
from torch import nn

from optimize.measure.latency import Call
from optimize.models.pickling import pickled_by_value
from serve.runtime.card.card import Preprocessing
from serve.runtime.card.execution import keep_memory
from serve.runtime.device.cores import cores
from serve.runtime.device.transfer import open_transfer
from serve.runtime.errors import EngineError
from serve.runtime.outputs import Outputs, as_outputs
from serve.runtime.service.predictor import infer
from serve.runtime.tasks.base import find_task


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


#: Variables that make `torch.compile` return the module unchanged (torch 2.14), without a message.
_SWITCHES: Final = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")


def references_on(devices: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return kind and device of each reference by name. On the fastest device the name is the kind alone."""
    plain = next((device for device in devices if device != "cpu"), "cpu")
    return {
        kind if device == plain else f"{kind}[{device}]": (kind, device)
        for device in sorted(devices, key=lambda device: device != plain)
        for kind in REFERENCES
    }


class ModuleEngine:
    """An eager (or compiled) module with the interface of an engine."""

    def __init__(self, module: nn.Module, device: torch.device, reference: Reference) -> None:
        self.device = device
        self.provider = f"{'inductor' if reference.compiled else 'eager'}/{device.type}"
        self._memory_format = reference.memory_format
        self._module: nn.Module = module.to(device).to(memory_format=reference.memory_format)
        if reference.compiled:
            if switch := next((name for name in _SWITCHES if os.environ.get(name) == "1"), None):
                raise EngineError(f"torch.compile is switched off by {switch}=1")
            from torch._inductor import config

            # torch's documentation recommends this for inference: weights become constants of the compiled code. There
            # are few batch sizes, and each gets its own code.
            config.freezing = True
            self._module = cast("nn.Module", torch.compile(self._module, dynamic=False))

    def run(self, batch: torch.Tensor) -> Outputs:
        """Return the outputs for a batch."""
        return as_outputs(self._module(batch.contiguous(memory_format=self._memory_format)))


def open_reference(
    name: str, module: nn.Module, preprocessing: Preprocessing, task: str, device: str
) -> tuple[Call, str]:
    """Open a module as the reference of this name, in its own process.

    Args:
        name: one of `REFERENCES`.
        module: eager, float32.
        preprocessing: the preprocessing of the batches.
        task: what the network is for.
        device: where to run it.

    Returns:
        A function from ``uint8`` images to the tensors of which answers are made, and the name of what executes it.
    """
    torch.set_num_threads(cores())
    if torch.device(device).type == "cpu":
        keep_memory()  # as `settle` does for the artifacts that it is compared with
    engine = ModuleEngine(module.eval(), torch.device(device), REFERENCES[name])
    transfer = open_transfer(engine.device, preprocessing.shape)  # as the server does
    ending = find_task(task).ending

    def call(batch: torch.Tensor) -> Outputs:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of the compiler
            return infer(engine, batch, preprocessing, torch.float32, transfer, ending=ending)

    return call, engine.provider


def pickled(build: Callable[[], nn.Module], preprocessing: Preprocessing, task: str) -> bytes:
    """Pickle a module, its preprocessing and its task's name for `open_reference`.

    The process that opens them cannot import the user's code. Classes and functions of installed libraries are pickled
    by name, all others by value.

    Raises:
        Exception: any exception that pickling the module raises.
    """
    return pickled_by_value((build(), preprocessing, task))
