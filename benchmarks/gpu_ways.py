"""The ways in which `benchmarks.gpu` runs a network: torch as it comes, and every engine of the runtime."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from benchmarks.gpu_subjects import Subject
from serve.runtime.card.card import load_card
from serve.runtime.card.execution import Execution, Option
from serve.runtime.engines.base import find_engine, open_engine, unavailable
from serve.runtime.errors import PipelineError

#: From a batch on the device to logits there.
Run = Callable[[torch.Tensor], torch.Tensor]


class Unavailable(Exception):  # noqa: N818 - it says that something is not there, not that something went wrong
    """A way that this machine does not have; the message says why."""


@dataclass(frozen=True)
class Way:
    """One way to run a network.

    Attributes:
        name: what it is called in the tables.
        half: whether it computes in FP16 on a GPU; the CPU, where the script is tried out, has float32 only.
        per_batch: whether it is opened anew for every batch size.
        make: opens it.
    """

    name: str
    half: bool
    per_batch: bool
    make: Callable[[Way, Subject, torch.device, tuple[int, ...]], Run]
    engine: str = ""
    format: str = ""
    options: Mapping[str, Option] = field(default_factory=dict)
    memory_format: torch.memory_format = torch.contiguous_format

    def dtype(self, device: torch.device) -> torch.dtype:
        """Of the network's input."""
        return torch.float16 if self.half and device.type == "cuda" else torch.float32

    def open(self, subject: Subject, device: torch.device, batches: tuple[int, ...]) -> Run:
        """Open it for batch sizes.

        Raises:
            Unavailable: this machine does not have it.
        """
        return self.make(self, subject, device, batches)


def _eager(way: Way, subject: Subject, device: torch.device, batches: tuple[int, ...]) -> Run:
    module = copy.deepcopy(subject.module).to(device, way.dtype(device)).to(memory_format=way.memory_format)
    torch.backends.cudnn.benchmark = True  # as whoever measures throughput would set it

    def run(batch: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = module(batch.contiguous(memory_format=way.memory_format))
        return logits

    return run


def _compiled(way: Way, subject: Subject, device: torch.device, batches: tuple[int, ...]) -> Run:
    """As torch's documentation says for inference: static shapes, frozen weights."""
    import torch._inductor.config as settings

    torch._dynamo.reset()
    module = copy.deepcopy(subject.module).to(device, way.dtype(device)).to(memory_format=way.memory_format)
    compiled = torch.compile(module, mode="max-autotune", dynamic=False, fullgraph=True)

    def run(batch: torch.Tensor) -> torch.Tensor:
        # The mode replays CUDA graphs, whose output the next call overwrites.
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        logits: torch.Tensor = compiled(batch.contiguous(memory_format=way.memory_format)).clone()
        return logits

    example = torch.randn(batches[0], *subject.preprocessing.shape, device=device).to(way.dtype(device))
    with settings.patch(freezing=True), torch.no_grad():
        for _ in range(3):
            run(example)
    return run


def _engine(way: Way, subject: Subject, device: torch.device, batches: tuple[int, ...]) -> Run:
    if (reason := unavailable(way.engine, device.type)) is not None:
        raise Unavailable(reason)
    try:
        folder = subject.artifact(way.format, way.dtype(device))
    except ImportError as error:
        raise Unavailable(str(error)) from None
    card = load_card(folder)
    buckets = batches if way.per_batch or way.engine == "onnxruntime-tensorrt" else ()
    execution = Execution(way.engine, str(device), buckets=buckets, options=way.options)
    try:
        find_engine(way.engine).settings(way.options)
        engine = open_engine(folder, card, execution)
    except PipelineError as error:
        raise Unavailable(str(error)) from error
    return lambda batch: engine.run(batch)[0]


_LAST = torch.channels_last
_PROGRAM, _ONNX = "exported_program", "onnx"

#: What opens quickly comes first.
WAYS = (
    Way("eager FP32", False, False, _eager),
    Way("eager FP16", True, False, _eager),
    Way("eager FP16 channels-last", True, False, _eager, memory_format=_LAST),
    Way("exported FP16", True, False, _engine, "exported", _PROGRAM),
    Way("torch-cudagraph FP16", True, True, _engine, "torch-cudagraph", _PROGRAM),
    Way("torch-cudagraph FP32", False, True, _engine, "torch-cudagraph", _PROGRAM),
    Way("onnxruntime-cuda FP32", False, False, _engine, "onnxruntime-cuda", _ONNX),
    Way("onnxruntime-cuda FP16", True, False, _engine, "onnxruntime-cuda", _ONNX),
    Way("inductor FP16", True, False, _engine, "inductor", _PROGRAM),
    Way("onnxruntime-tensorrt FP16", True, False, _engine, "onnxruntime-tensorrt", _ONNX),
    Way("inductor-buckets FP16", True, True, _engine, "inductor", _PROGRAM),
    Way("inductor-graphs FP16", True, True, _engine, "inductor", _PROGRAM, {"cudagraph": True}),
    Way(
        "inductor-autotuned FP16", True, True, _engine, "inductor", _PROGRAM, {"cudagraph": True, "max_autotune": True}
    ),
    Way("torch.compile FP16 max-autotune", True, True, _compiled, memory_format=_LAST),
)
