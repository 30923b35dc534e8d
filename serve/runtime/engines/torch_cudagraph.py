"""``torch-cudagraph``: a ``torch.export`` program on CUDA, channels-last, captured once for each batch bucket.

The kernels are the same as in ``exported``, but launched together. Small batches mostly wait for launches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from ..card.card import Card
from ..card.execution import Execution
from ..device.buckets import DEFAULT_BUCKETS, StaticBatches
from ..device.cuda_graphs import CudaGraphs
from ..model_files.program_file import program_on
from ..outputs import Outputs
from .base import Engine, EngineOption, EngineType, register


class TorchCudaGraphEngine:
    """See `Engine`. The thread that opens it warms up, captures and runs."""

    def __init__(self, folder: Path, card: Card, execution: Execution) -> None:
        settings = TORCH_CUDAGRAPH.settings(execution.options)
        self.device = torch.device(execution.device)
        memory_format = torch.channels_last if settings["channels_last"] else torch.contiguous_format
        # Weights from inference mode could not run outside it.
        with torch.inference_mode(False), torch.no_grad():
            module = program_on(folder / card.file, self.device).module()
            to_memory_format(module, memory_format)
        batches = StaticBatches(
            execution.buckets or DEFAULT_BUCKETS,
            card.preprocessing.shape,
            getattr(torch, card.input_dtype),
            self.device,
            memory_format,
        )
        with searching(settings["search"]):
            self._graphs = CudaGraphs(module, batches, self.device, card.name)
        self.provider = f"cudagraph/{str(memory_format).removeprefix('torch.')}"

    def run(self, batch: torch.Tensor) -> Outputs:
        """Return the outputs for a batch."""
        return self._graphs.run(batch)


def to_memory_format(module: torch.nn.Module, memory_format: torch.memory_format) -> None:
    """Change the memory format of a module's convolution weights, in place.

    Not by ``module.to(memory_format=…)``: modules of exported programs share tensors with their program.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.dim() == 4:
            tensor.data = tensor.data.contiguous(memory_format=memory_format)


@contextlib.contextmanager
def searching(search: bool) -> Iterator[None]:
    """Set for a block whether cuDNN times its algorithms for each new shape. The thread keeps the chosen ones."""
    # Not by `torch.backends.cudnn.flags`, which would also set all other flags.
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = search
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _open(folder: Path, card: Card, execution: Execution) -> Engine:
    return TorchCudaGraphEngine(folder, card, execution)


def _probe(device: torch.device) -> torch.Tensor:
    convolution = torch.nn.Conv2d(3, 8, 3, device=device).to(memory_format=torch.channels_last).requires_grad_(False)
    batches = StaticBatches((1, 2), (3, 8, 8), torch.float32, device, torch.channels_last)
    graphs = CudaGraphs(lambda batch: convolution(batch).flatten(1), batches, device, "a convolution")
    batch = torch.randn(3, 3, 8, 8, device=device)
    (logits,) = graphs.run(batch)
    torch.testing.assert_close(logits, convolution(batch).flatten(1), rtol=0.01, atol=0.01)
    return logits


TORCH_CUDAGRAPH = register(
    EngineType(
        "torch-cudagraph",
        keeps_buckets=True,
        formats=("exported_program",),
        open=_open,
        probe=_probe,
        devices=("cuda",),
        rank=10,
        options={
            "channels_last": EngineOption(
                True, "store activations and weights as NHWC, the layout that tensor cores read"
            ),
            "search": EngineOption(True, "let cuDNN time its algorithms for every bucket while the engine opens"),
        },
    )
)
