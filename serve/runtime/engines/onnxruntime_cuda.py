"""``onnxruntime-cuda``: an ONNX graph on the CUDA provider of ONNX Runtime, bound to torch's memory."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..card import Card
from ..errors import EngineError
from ..execution import Execution
from ..onnx_file import TINY_GRAPH, check_graph
from .base import Engine, EngineType, register

_PROVIDER = "CUDAExecutionProvider"


class OnnxRuntimeCudaEngine:
    """See `Engine`."""

    def __init__(self, folder: Path, card: Card, execution: Execution) -> None:
        path = folder / card.file
        check_graph(path, card)
        self.device = torch.device(execution.device)
        self._session = _session(str(path), self.device)
        self.provider = f"onnxruntime/{_PROVIDER}"
        self._input = self._session.get_inputs()[0].name
        self._output = self._session.get_outputs()[0].name
        self._half_out = self._session.get_outputs()[0].type == "tensor(float16)"
        self._classes = len(card.classes)

    def run(self, batch: torch.Tensor) -> torch.Tensor:
        """Logits ``(N, classes)`` of a batch."""
        batch = batch.contiguous()
        dtype = torch.float16 if self._half_out else torch.float32
        logits = torch.empty((len(batch), self._classes), dtype=dtype, device=self.device)
        binding = self._session.io_binding()
        index = self.device.index or 0
        binding.bind_input(self._input, "cuda", index, _NUMPY[batch.dtype], tuple(batch.shape), batch.data_ptr())
        binding.bind_output(self._output, "cuda", index, _NUMPY[logits.dtype], tuple(logits.shape), logits.data_ptr())
        # ONNX Runtime has a stream of its own: torch's writes must have landed before it reads.
        torch.cuda.current_stream(self.device).synchronize()
        self._session.run_with_iobinding(binding)
        return logits


_NUMPY = {torch.float32: np.float32, torch.float16: np.float16, torch.uint8: np.uint8}


def _session(model: str | bytes, device: torch.device) -> Any:
    """A session of a file or of a graph's bytes, all of it on the GPU.

    Raises:
        EngineError: the provider is not active. A list of those that are compiled in proves nothing.
    """
    runtime: Any = importlib.import_module("onnxruntime")
    if hasattr(runtime, "preload_dlls"):
        runtime.preload_dlls()  # CUDA and cuDNN come from torch's own wheels
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.load_model_format", "ONNX")
    session = runtime.InferenceSession(
        model, options, providers=[(_PROVIDER, {"device_id": device.index or 0}), "CPUExecutionProvider"]
    )
    active = session.get_providers()[0]
    if active != _PROVIDER:
        raise EngineError(
            f"ONNX Runtime {runtime.__version__} runs on {active}, not on {_PROVIDER} "
            f"(available here: {', '.join(runtime.get_available_providers())}); install what {_PROVIDER} needs"
        )
    return session


def _open(folder: Path, card: Card, execution: Execution) -> Engine:
    return OnnxRuntimeCudaEngine(folder, card, execution)


def _probe(device: torch.device) -> object:
    session = _session(TINY_GRAPH, device)
    return session.run(None, {session.get_inputs()[0].name: np.ones(1, dtype=np.float32)})


ONNXRUNTIME_CUDA = register(
    EngineType(
        "onnxruntime-cuda",
        formats=("onnx",),
        open=_open,
        probe=_probe,
        devices=("cuda",),
        rank=20,
        computes_with_torch=False,
        libraries=("onnxruntime-gpu",),
        companions=(".data",),
    )
)
