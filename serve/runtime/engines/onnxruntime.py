"""``onnxruntime``: an ONNX graph on the CPU provider of ONNX Runtime."""

from __future__ import annotations

from pathlib import Path

import torch

from ..card.card import Card
from ..card.execution import Execution
from ..errors import EngineError
from ..model_files.onnx_file import TINY_GRAPH, check_graph
from ..model_files.onnx_session import CPU_PROVIDER, cpu_session, run_tiny
from ..outputs import Outputs, wanted_outputs
from .base import Engine, EngineOption, EngineType, register


class OnnxRuntimeEngine:
    """See `Engine`."""

    def __init__(self, folder: Path, card: Card, execution: Execution) -> None:
        path = folder / card.file
        check_graph(path, card)
        self.device = torch.device("cpu")
        settings = ONNXRUNTIME.settings(execution.options)
        self._session = cpu_session(
            str(path),
            half=card.precision == "float16",
            threads=execution.cores,
            optimized=settings["optimizations"],
        )
        active = self._session.get_providers()[0]
        if active != CPU_PROVIDER:
            raise EngineError(f"{card.name}: ONNX Runtime runs this model on {active}, not on {CPU_PROVIDER}")
        self.provider = f"onnxruntime/{active}"
        self._input = self._session.get_inputs()[0].name
        self._outputs = wanted_outputs(card, (output.name for output in self._session.get_outputs()))

    def run(self, batch: torch.Tensor) -> Outputs:
        """Return the outputs for a batch."""
        found = self._session.run(self._outputs, {self._input: batch.numpy()})
        return tuple(torch.from_numpy(output) for output in found)


def _open(folder: Path, card: Card, execution: Execution) -> Engine:
    return OnnxRuntimeEngine(folder, card, execution)


def _probe(device: torch.device) -> object:
    return run_tiny(cpu_session(TINY_GRAPH, half=False, threads=1))


ONNXRUNTIME = register(
    EngineType(
        "onnxruntime",
        formats=("onnx",),
        open=_open,
        probe=_probe,
        rank=20,
        computes_with_torch=False,
        any_thread=True,
        options={
            "optimizations": EngineOption(
                True,
                "let ONNX Runtime optimize the graph; otherwise every node runs as it is written, and quantized "
                "layers run in float",
            )
        },
        # Two distributions of one library. The machine's versions show the installed one.
        libraries=("onnxruntime", "onnxruntime-gpu"),
        companions=(".data",),  # a graph's large weights
    )
)
