"""ONNX Runtime sessions: how every engine makes one, what a provider really took, and binding to torch's GPU memory.

ONNX Runtime falls back in three ways without a word: a provider whose library does not load is left out, a node that
a provider does not take goes to the CPU's, and a Python session that fails is made again without the provider.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..errors import EngineError, one_line
from .telemetry import import_onnxruntime

CPU_PROVIDER = "CPUExecutionProvider"

#: Leaves Q/DQ nodes as they are: by itself ONNX Runtime rewrites them for kernels of its own.
LITERAL_QDQ = {"session.disable_quant_qdq": "1"}

#: Arithmetic on shapes, which ONNX Runtime puts on the CPU on purpose (`GetCpuPreferredNodes`).
_SHAPE_OPERATORS = frozenset(
    {
        "Shape",
        "Size",
        "Gather",
        "Slice",
        "Concat",
        "Reshape",
        "Squeeze",
        "Unsqueeze",
        "Cast",
        "Add",
        "Sub",
        "Mul",
        "Div",
        "Range",
    }
    | {"Constant", "ConstantOfShape", "Equal", "Where", "Expand", "ReduceProd", "Identity"}
)
_NUMPY = {torch.float32: np.float32, torch.float16: np.float16, torch.uint8: np.uint8}


def runtime() -> Any:
    """The library, imported only for what it runs: the other artifacts run where it is not installed."""
    return import_onnxruntime()


def make_session(
    model: str | bytes,
    providers: list[tuple[str, dict[str, Any]]],
    *,
    threads: int | None = None,
    entries: Mapping[str, str] | None = None,
    without: Sequence[str] = (),
    optimized: bool = True,
) -> Any:
    """An ``onnxruntime.InferenceSession`` of a file or of a graph's bytes, that does not fall back by itself.

    Args:
        model: path or bytes; an ONNX graph, whatever the file's name.
        providers: names with their options, the first preferred; a session always has the CPU's besides.
        threads: intra-op threads on the CPU; None: the library's default.
        entries: further session configuration.
        without: graph optimizers that are left out.
        optimized: whether the graph may be rewritten at all; else every node runs as it is written.
    """
    library = runtime()
    options = library.SessionOptions()
    options.log_severity_level = 3
    # By its name's ending a file could also be of ONNX Runtime's own format, which is not checked.
    options.add_session_config_entry("session.load_model_format", "ONNX")
    # Threads that spin between requests starve the other workers of the machine.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    for name, value in (entries or {}).items():
        options.add_session_config_entry(name, value)
    if threads is not None:
        options.intra_op_num_threads = threads
    if not optimized:
        options.graph_optimization_level = library.GraphOptimizationLevel.ORT_DISABLE_ALL
    return library.InferenceSession(
        model, options, providers=providers, enable_fallback=0, disabled_optimizers=list(without) or None
    )


def cpu_session(
    model: str | bytes,
    *,
    half: bool,
    threads: int | None = None,
    entries: Mapping[str, str] | None = None,
    optimized: bool = True,
) -> Any:
    """A session on the CPU.

    Args:
        model: as `make_session`.
        half: whether the graph computes in FP16, which the CPU's provider turns to FP32.
        threads: as `make_session`.
        entries: as `make_session`.
        optimized: as `make_session`.
    """
    # ONNX Runtime 1.31 dies of a segmentation fault where FuseFp16InitializerToFp32NodeTransformer comes before
    # NchwcTransformer: seen with the FP16 graph of torchvision's VisionTransformer, its patch convolution in blocks.
    without = ("NchwcTransformer",) if half else ()
    return make_session(
        model, [(CPU_PROVIDER, {})], threads=threads, without=without, entries=entries, optimized=optimized
    )


def gpu_session(
    model: str | bytes,
    provider: str,
    options: Mapping[str, Any],
    *,
    whole: bool = False,
    entries: Mapping[str, str] | None = None,
) -> Any:
    """A session whose network runs on a GPU's provider, all of it.

    Args:
        model: as `make_session`.
        provider: the GPU's.
        options: its options.
        whole: refuse arithmetic on shapes on the CPU, too.
        entries: as `make_session`.

    Raises:
        EngineError: the provider is not active, or a node would run elsewhere. A list of the providers that are
            compiled in proves nothing.
    """
    library = runtime()
    if hasattr(library, "preload_dlls"):
        library.preload_dlls()  # CUDA and cuDNN come from torch's own wheels
    # ONNX Runtime 1.24 and later can say which node went where (onnxruntime 26781); before, it can only refuse a
    # session that has any node on the CPU.
    recorded = hasattr(library.InferenceSession, "get_provider_graph_assignment_info")
    strict = {"session.disable_cpu_ep_fallback": "1"} if whole or not recorded else {}
    record = {"session.record_ep_graph_assignment_info": "1"} if recorded else {}
    try:
        # Naming the CPU's provider as well would be an error together with disable_cpu_ep_fallback.
        session = make_session(model, [(provider, dict(options))], entries={**(entries or {}), **strict, **record})
    except Exception as error:
        raise EngineError(f"{_needs(library, provider)}: {one_line(error)}") from error
    active = session.get_providers()[0]
    if active != provider:
        raise EngineError(f"{_needs(library, provider)}: it runs on {active}")
    if recorded:
        check_assignment(assignment(session), provider)
    return session


def _needs(library: Any, provider: str) -> str:
    return (
        f"ONNX Runtime {library.__version__} does not run this on {provider} "
        f"(compiled in: {', '.join(library.get_available_providers())}); install what it needs"
    )


def assignment(session: Any) -> dict[str, Counter[str]]:
    """How many nodes of each operator every provider took; of sessions that record it, ONNX Runtime 1.24 or later."""
    found: dict[str, Counter[str]] = {}
    for part in session.get_provider_graph_assignment_info():
        found.setdefault(part.ep_name, Counter()).update(node.op_type for node in part.get_nodes())
    return found


def check_assignment(found: Mapping[str, Counter[str]], provider: str) -> None:
    """Refuse a session whose network does not run on ``provider``.

    Raises:
        EngineError: a node that is no arithmetic on shapes went elsewhere, or none to the provider.
    """
    elsewhere = {}
    for name, operators in found.items():
        # Without a Shape it is not shapes that are computed with, but pixels.
        shapes = name == CPU_PROVIDER and operators.keys() & {"Shape", "Size"}
        if name != provider:
            elsewhere[name] = sorted(operators.keys() - _SHAPE_OPERATORS if shapes else operators)
    if not found.get(provider) or any(elsewhere.values()):
        said = "; ".join(f"{name} took {', '.join(operators)}" for name, operators in elsewhere.items() if operators)
        raise EngineError(f"{provider} does not take this graph as a whole: {said or 'it took no node'}")


def run_tiny(session: Any) -> object:
    """Run a session of `onnx_file.TINY_GRAPH`, for a probe.

    Raises:
        EngineError: it does not negate.
    """
    (answer,) = session.run(None, {session.get_inputs()[0].name: np.full(1, 3.0, dtype=np.float32)})
    if answer.tolist() != [-3.0]:
        raise EngineError(f"ONNX Runtime negates 3 to {answer.tolist()} on {session.get_providers()[0]}")
    return answer


class GpuBinding:
    """A session on CUDA that reads and writes torch's memory. Called from one thread: not safe to share.

    Args:
        session: on a provider of the device.
        device: a CUDA device.
        classes: logits of one image.
    """

    def __init__(self, session: Any, device: torch.device, classes: int) -> None:
        self._session = session
        self._device = device
        self._classes = classes
        self.input = session.get_inputs()[0].name
        self._output = session.get_outputs()[0].name
        self._dtype = torch.float16 if session.get_outputs()[0].type == "tensor(float16)" else torch.float32

    def run(self, batch: torch.Tensor) -> torch.Tensor:
        """Logits ``(N, classes)`` on the device, of a batch ``(N, C, H, W)`` there."""
        batch = batch.contiguous()
        logits = torch.empty((len(batch), self._classes), dtype=self._dtype, device=self._device)
        binding = self._session.io_binding()
        index = self._device.index or 0
        binding.bind_input(self.input, "cuda", index, _NUMPY[batch.dtype], tuple(batch.shape), batch.data_ptr())
        binding.bind_output(self._output, "cuda", index, _NUMPY[logits.dtype], tuple(logits.shape), logits.data_ptr())
        # ONNX Runtime has a stream of its own, and torch's writes must have landed before it reads (onnxruntime 32673:
        # TensorRT's provider reads too early otherwise). At the end of a run it waits for its own work.
        torch.cuda.current_stream(self._device).synchronize()
        self._session.run_with_iobinding(binding)
        return logits
