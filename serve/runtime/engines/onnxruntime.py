"""``onnxruntime``: an ONNX graph in ONNX Runtime; on CUDA it is bound to torch's memory, so nothing is copied."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..card import Card
from ..errors import EngineError
from ..onnx_file import check_graph
from .base import Engine, EngineType, Opening, register


class OnnxEngine:
    """See `Engine`."""

    def __init__(self, folder: Path, card: Card, opening: Opening) -> None:
        path, device = folder / card.file, opening.device
        check_graph(path, card)
        # Imported only for ONNX artifacts: the others run where it is not installed.
        runtime: Any = importlib.import_module("onnxruntime")
        wanted = "CUDAExecutionProvider" if device.type == "cuda" else "CPUExecutionProvider"
        options = runtime.SessionOptions()
        options.log_severity_level = 3
        # By its name's ending a file could also be of ONNX Runtime's own format, which is not checked.
        options.add_session_config_entry("session.load_model_format", "ONNX")
        # Threads that spin between requests starve the other workers of the machine.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        if opening.threads is not None:
            options.intra_op_num_threads = opening.threads
        providers: list[Any] = ["CPUExecutionProvider"]
        if wanted in runtime.get_available_providers() and device.type == "cuda":
            if hasattr(runtime, "preload_dlls"):
                runtime.preload_dlls()  # CUDA and cuDNN come from torch's own wheels
            providers.insert(0, (wanted, {"device_id": device.index or 0}))
        self._session = runtime.InferenceSession(str(path), options, providers=providers)
        active = self._session.get_providers()[0]
        if active != wanted and not opening.allow_fallback:
            raise EngineError(
                f"{card.name}: ONNX Runtime {runtime.__version__} runs this model on {active}, not on {wanted} "
                f"(available here: {', '.join(runtime.get_available_providers())}); install what {wanted} needs, "
                f"or allow the fallback in the artifact's configuration"
            )
        self.provider = f"onnxruntime/{active}"
        self.device = device if active == wanted else torch.device("cpu")
        self._input = self._session.get_inputs()[0].name
        self._output = self._session.get_outputs()[0].name
        self._half_out = self._session.get_outputs()[0].type == "tensor(float16)"
        self._classes = len(card.classes)

    def run(self, batch: torch.Tensor) -> torch.Tensor:
        """Logits ``(N, classes)`` of a batch."""
        if self.device.type == "cuda":
            return self._run_bound(batch)
        (logits,) = self._session.run([self._output], {self._input: batch.numpy()})
        return torch.from_numpy(logits)

    def _run_bound(self, batch: torch.Tensor) -> torch.Tensor:
        batch = batch.contiguous()
        dtype = torch.float16 if self._half_out else torch.float32
        logits = torch.empty((len(batch), self._classes), dtype=dtype, device=self.device)
        binding = self._session.io_binding()
        index = self.device.index or 0
        binding.bind_input(self._input, "cuda", index, _numpy_type(batch), tuple(batch.shape), batch.data_ptr())
        binding.bind_output(self._output, "cuda", index, _numpy_type(logits), tuple(logits.shape), logits.data_ptr())
        # ONNX Runtime has a stream of its own: torch's writes must have landed before it reads.
        torch.cuda.current_stream(self.device).synchronize()
        self._session.run_with_iobinding(binding)
        return logits


def _numpy_type(tensor: torch.Tensor) -> type[np.generic]:
    return np.float16 if tensor.dtype == torch.float16 else np.float32


def _open(folder: Path, card: Card, opening: Opening) -> Engine:
    return OnnxEngine(folder, card, opening)


ONNXRUNTIME = register(
    EngineType(
        "onnxruntime",
        formats=("onnx",),
        open=_open,
        # Two distributions of one library; which of them is installed, the machine's versions say.
        libraries=("onnxruntime", "onnxruntime-gpu"),
        companions=(".data",),  # where a graph keeps large weights beside it
        falls_back=True,
    )
)
