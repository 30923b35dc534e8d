"""``onnxruntime``: an ONNX graph on the CPU provider of ONNX Runtime."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

from ..card import Card
from ..errors import EngineError
from ..execution import Execution
from ..onnx_file import TINY_GRAPH, check_graph
from .base import Engine, EngineType, register

_PROVIDER = "CPUExecutionProvider"


class OnnxRuntimeEngine:
    """See `Engine`."""

    def __init__(self, folder: Path, card: Card, execution: Execution) -> None:
        path = folder / card.file
        check_graph(path, card)
        self.device = torch.device("cpu")
        self._session = _session(str(path), execution.cores)
        active = self._session.get_providers()[0]
        if active != _PROVIDER:
            raise EngineError(f"{card.name}: ONNX Runtime runs this model on {active}, not on {_PROVIDER}")
        self.provider = f"onnxruntime/{active}"
        self._input = self._session.get_inputs()[0].name
        self._output = self._session.get_outputs()[0].name

    def run(self, batch: torch.Tensor) -> torch.Tensor:
        """Logits ``(N, classes)`` of a batch."""
        (logits,) = self._session.run([self._output], {self._input: batch.numpy()})
        return torch.from_numpy(logits)


def _session(model: str | bytes, threads: int) -> Any:
    """An ONNX Runtime session on the CPU, of a file or of a graph's bytes."""
    # Imported only for what it runs: the other artifacts run where it is not installed.
    runtime: Any = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    # By its name's ending a file could also be of ONNX Runtime's own format, which is not checked.
    options.add_session_config_entry("session.load_model_format", "ONNX")
    # Threads that spin between requests starve the other workers of the machine.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.intra_op_num_threads = threads
    return runtime.InferenceSession(model, options, providers=[_PROVIDER])


def _open(folder: Path, card: Card, execution: Execution) -> Engine:
    return OnnxRuntimeEngine(folder, card, execution)


def _probe(device: torch.device) -> object:
    session = _session(TINY_GRAPH, 1)
    return session.run(None, {session.get_inputs()[0].name: torch.ones(1).numpy()})


ONNXRUNTIME = register(
    EngineType(
        "onnxruntime",
        formats=("onnx",),
        open=_open,
        probe=_probe,
        rank=20,
        computes_with_torch=False,
        # Two distributions of one library; which of them is installed, the machine's versions say.
        libraries=("onnxruntime", "onnxruntime-gpu"),
        companions=(".data",),  # where a graph keeps large weights beside it
    )
)
