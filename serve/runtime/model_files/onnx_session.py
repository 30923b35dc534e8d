"""ONNX Runtime sessions: their options, the providers that really run, and binding to torch's GPU memory.

ONNX Runtime has three silent fallbacks. It skips a provider whose library does not load. It gives a node that a
provider does not accept to the CPU's. And it retries a failed Python session without the provider.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..card.card import Card
from ..errors import EngineError, one_line
from ..outputs import Outputs, wanted_outputs
from .telemetry import import_onnxruntime

CPU_PROVIDER = "CPUExecutionProvider"

#: Keeps Q/DQ nodes unchanged. By default ONNX Runtime rewrites them for its own kernels.
LITERAL_QDQ = {"session.disable_quant_qdq": "1"}

#: Shape arithmetic, which ONNX Runtime runs on the CPU on purpose (`GetCpuPreferredNodes`).
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
_TORCH = {"tensor(float)": torch.float32, "tensor(float16)": torch.float16, "tensor(uint8)": torch.uint8}


def runtime() -> Any:
    """Import the library only when it is needed, because other artifacts run without it."""
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
    """Return an ``onnxruntime.InferenceSession`` of a file or of a graph's bytes that never falls back silently.

    Args:
        model: path or bytes of an ONNX graph, whatever the file's name.
        providers: names with their options, the first preferred. Every session also has the CPU's.
        threads: intra-op threads on the CPU. None: the library's default.
        entries: further session configuration.
        without: graph optimizers to turn off.
        optimized: whether the graph may be rewritten. If not, every node runs as it is written.
    """
    library = runtime()
    options = library.SessionOptions()
    options.log_severity_level = 3
    # Without this the file's ending could select ONNX Runtime's own format, which is not checked.
    options.add_session_config_entry("session.load_model_format", "ONNX")
    # Threads that spin between requests take the cores from the machine's other workers.
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
    """Return a session on the CPU.

    Args:
        model: see `make_session`.
        half: whether the graph computes in FP16, which the CPU's provider converts to FP32.
        threads: see `make_session`.
        entries: see `make_session`.
        optimized: see `make_session`.
    """
    # ONNX Runtime 1.31 crashes with a segmentation fault if FuseFp16InitializerToFp32NodeTransformer runs before
    # NchwcTransformer. Seen with the FP16 graph of torchvision's VisionTransformer, whose patch convolution was in
    # blocks.
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
    """Return a session whose whole network runs on a GPU's provider.

    Args:
        model: see `make_session`.
        provider: the GPU's provider.
        options: options of the provider.
        whole: whether shape arithmetic on the CPU is refused too.
        entries: see `make_session`.

    Raises:
        EngineError: the provider is not active, or a node would run elsewhere. A list of compiled-in providers proves
            nothing.
    """
    library = runtime()
    if hasattr(library, "preload_dlls"):
        library.preload_dlls()  # torch's own wheels contain CUDA and cuDNN
    # ONNX Runtime 1.24 and later can report the provider of each node (onnxruntime 26781). Older versions can only
    # refuse a session that has any node on the CPU.
    recorded = hasattr(library.InferenceSession, "get_provider_graph_assignment_info")
    strict = {"session.disable_cpu_ep_fallback": "1"} if whole or not recorded else {}
    record = {"session.record_ep_graph_assignment_info": "1"} if recorded else {}
    try:
        # The CPU's provider must not be named together with disable_cpu_ep_fallback.
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
        f"ONNX Runtime {library.__version__} does not run this on {provider} (compiled in: "
        f"{', '.join(library.get_available_providers())}); install the libraries that it needs"
    )


def assignment(session: Any) -> dict[str, Counter[str]]:
    """Return the operators' nodes by provider, counted. The session must record them (ONNX Runtime 1.24 or later)."""
    found: dict[str, Counter[str]] = {}
    for part in session.get_provider_graph_assignment_info():
        found.setdefault(part.ep_name, Counter()).update(node.op_type for node in part.get_nodes())
    return found


def check_assignment(found: Mapping[str, Counter[str]], provider: str) -> None:
    """Refuse a session whose network does not run on ``provider``.

    Raises:
        EngineError: a node other than shape arithmetic runs elsewhere, or none runs on the provider.
    """
    elsewhere = {}
    for name, operators in found.items():
        # Without a Shape node this is arithmetic on pixels, not on shapes.
        shapes = name == CPU_PROVIDER and operators.keys() & {"Shape", "Size"}
        if name != provider:
            elsewhere[name] = sorted(operators.keys() - _SHAPE_OPERATORS if shapes else operators)
    if not found.get(provider) or any(elsewhere.values()):
        said = "; ".join(f"{name} took {', '.join(operators)}" for name, operators in elsewhere.items() if operators)
        raise EngineError(f"{provider} cannot run this whole graph: {said or 'it took no node'}")


def run_tiny(session: Any) -> object:
    """Run a session of `onnx_file.TINY_GRAPH`, for a probe.

    Raises:
        EngineError: the result is not the negative.
    """
    (answer,) = session.run(None, {session.get_inputs()[0].name: np.full(1, 3.0, dtype=np.float32)})
    if answer.tolist() != [-3.0]:
        raise EngineError(f"ONNX Runtime negates 3 to {answer.tolist()} on {session.get_providers()[0]}")
    return answer


def _kind_of(output: Any) -> tuple[list[int], torch.dtype]:
    """Return the shape for one image and the dtype of a session's output."""
    shape = output.shape[1:]
    if output.type not in _TORCH or not all(type(side) is int for side in shape):
        raise EngineError(
            f"the output {output.name} is {output.type} of {output.shape}; on a GPU it must be one of "
            f"{', '.join(_TORCH)}, with only the batch dynamic"
        )
    return shape, _TORCH[output.type]


class GpuBinding:
    """A session on CUDA that reads and writes torch's memory. Use it in one thread.

    Args:
        session: a session on a provider of the device.
        device: a CUDA device.
        card: names the outputs that are wanted.

    Raises:
        EngineError: an output has another type, or a dynamic dimension behind the batch.
    """

    def __init__(self, session: Any, device: torch.device, card: Card) -> None:
        self._session = session
        self._device = device
        self.input = session.get_inputs()[0].name
        # The name, the shape for one image and the dtype. Only the batch of a graph is dynamic.
        known = {output.name: output for output in session.get_outputs()}
        self._outputs = [(name, *_kind_of(known[name])) for name in wanted_outputs(card, known)]

    def run(self, batch: torch.Tensor) -> Outputs:
        """Return the outputs for a batch ``(N, C, H, W)``, both on the device."""
        batch = batch.contiguous()
        outputs = tuple(
            torch.empty((len(batch), *shape), dtype=dtype, device=self._device) for _, shape, dtype in self._outputs
        )
        binding = self._session.io_binding()
        index = self._device.index or 0
        binding.bind_input(self.input, "cuda", index, _NUMPY[batch.dtype], tuple(batch.shape), batch.data_ptr())
        for (name, _, dtype), output in zip(self._outputs, outputs, strict=True):
            binding.bind_output(name, "cuda", index, _NUMPY[dtype], tuple(output.shape), output.data_ptr())
        # ONNX Runtime has its own stream. torch's writes must be complete before it reads, because TensorRT's provider
        # reads too early otherwise (onnxruntime 32673). At the end of a run it waits for its own work.
        torch.cuda.current_stream(self._device).synchronize()
        self._session.run_with_iobinding(binding)
        return outputs
