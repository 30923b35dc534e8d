"""One small class per file format: a model file and its card become a function from batch to logits.

An engine tells the truth about where it runs: a provider that was asked for and is not active is an
error, never a silent fallback.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from .card import Card
from .errors import EngineError
from .onnx_file import check_graph
from .program_file import load_program
from .script_file import load_script


class Engine(Protocol):
    """What every format offers.

    ``run`` maps the network's input, ``(N, C, H, W)`` of the card's input dtype on ``device``, to
    logits ``(N, classes)``. ``provider`` names what really executes it.
    """

    device: torch.device
    provider: str

    def run(self, batch: torch.Tensor) -> torch.Tensor:
        """Logits ``(N, classes)`` of a batch."""
        ...


def open_engine(
    folder: Path, card: Card, device: torch.device, *, threads: int | None = None, allow_fallback: bool = False
) -> Engine:
    """Open the card's model file on ``device``.

    Args:
        folder: the artifact's folder.
        card: its card, already verified.
        device: where to run.
        threads: intra-op threads of ONNX Runtime (PyTorch's own are a setting of the process);
            None leaves its default, one per core.
        allow_fallback: let an ONNX artifact run on the CPU provider where the one for ``device`` is
            not active; ``provider`` then says so.

    Raises:
        EngineError: the artifact cannot run on ``device``, or its provider is not active.
    """
    if card.device not in ("any", device.type):
        raise EngineError(f"{card.name}: this artifact runs on {card.device} only, not on {device.type}")
    may_fall_back = allow_fallback and card.format == "onnx"
    if device.type == "cuda" and not torch.cuda.is_available() and not may_fall_back:
        raise EngineError(f"{card.name}: CUDA was asked for and this machine has no usable CUDA device")
    path = folder / card.file
    if card.format == "onnx":
        return OnnxEngine(path, card, device, threads=threads, allow_fallback=allow_fallback)
    if card.format == "exported_program":
        return ExportedProgramEngine(path, device)
    return TorchScriptEngine(path, card, device)


class TorchScriptEngine:
    """A ``torch.jit`` file, float or quantized."""

    def __init__(self, path: Path, card: Card, device: torch.device) -> None:
        if card.precision == "int8" and device.type == "cpu":
            use_x86_kernels()
        self.device = device
        self.provider = f"torchscript/{device.type}"
        self._module = load_script(path, device)

    def run(self, batch: torch.Tensor) -> torch.Tensor:
        """Logits ``(N, classes)`` of a batch."""
        logits: torch.Tensor = self._module(batch)
        return logits


class ExportedProgramEngine:
    """A ``torch.export`` archive (``.pt2``): the model's ATen graph, run operator by operator."""

    def __init__(self, path: Path, device: torch.device) -> None:
        program = load_program(path)
        if device.type != "cpu":
            from torch.export.passes import move_to_device_pass

            program = move_to_device_pass(program, str(device))
        self.device = device
        self.provider = f"aten/{device.type}"
        self._module = program.module()

    def run(self, batch: torch.Tensor) -> torch.Tensor:
        """Logits ``(N, classes)`` of a batch."""
        logits: torch.Tensor = self._module(batch)
        return logits


class OnnxEngine:
    """An ONNX graph in ONNX Runtime; on CUDA it is bound to torch's memory, so nothing is copied."""

    def __init__(
        self, path: Path, card: Card, device: torch.device, *, threads: int | None, allow_fallback: bool
    ) -> None:
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
        if threads is not None:
            options.intra_op_num_threads = threads
        providers: list[Any] = ["CPUExecutionProvider"]
        if wanted in runtime.get_available_providers() and device.type == "cuda":
            if hasattr(runtime, "preload_dlls"):
                runtime.preload_dlls()  # CUDA and cuDNN come from torch's own wheels
            providers.insert(0, (wanted, {"device_id": device.index or 0}))
        self._session = runtime.InferenceSession(str(path), options, providers=providers)
        active = self._session.get_providers()[0]
        if active != wanted and not allow_fallback:
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


def use_x86_kernels() -> None:
    """Select torch's x86 quantized kernels for this process.

    Quantized weights are packed for the engine that is selected while the file is read, so this comes
    before `torch.jit.load` and before ``convert_fx``.
    """
    supported = torch.backends.quantized.supported_engines
    if "x86" not in supported:
        raise EngineError(f"torch has no x86 quantized kernels on this machine (it has: {', '.join(supported)})")
    torch.backends.quantized.engine = "x86"


def _numpy_type(tensor: torch.Tensor) -> type[np.generic]:
    return np.float16 if tensor.dtype == torch.float16 else np.float32
