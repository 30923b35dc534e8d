"""``onnxruntime-tensorrt``: an ONNX graph that ONNX Runtime passes to TensorRT as a whole.

TensorRT compiles for this GPU when the artifact is first opened. The compiled engine and its timings are kept in the
user's cache (see `compile_cache`), never in an artifact.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..card.card import Card
from ..card.execution import Execution
from ..device.buckets import DEFAULT_BUCKETS, pieces
from ..device.cpu_integers import TENSORRT
from ..errors import EngineError
from ..model_files.compile_cache import cache_folder, device_key
from ..model_files.onnx_file import TINY_GRAPH, check_graph
from ..model_files.onnx_session import LITERAL_QDQ, GpuBinding, gpu_session, run_tiny, runtime
from ..outputs import Outputs, joined
from .base import Engine, EngineOption, EngineType, register

_PROVIDER = "TensorrtExecutionProvider"

# ONNX Runtime's own rewrite of Q/DQ pairs results in a graph that TensorRT cannot read.
_ENTRIES = LITERAL_QDQ

#: Ending of the file beside a graph for TensorRT with its batch sizes, for a compilation elsewhere.
PROFILE_ENDING = ".profile.json"

#: ONNX Runtime 1.23 to 1.31 is built for 10. A later one may need 11.
_MAJORS = (10, 11)


class OnnxRuntimeTensorRtEngine:
    """See `Engine`. One optimisation profile covers every batch up to the largest bucket. Larger batches are split.

    Without a profile, a new batch size would make TensorRT compile during a request (onnxruntime 13851). ONNX Runtime
    reads only one profile from its options (onnxruntime 23965).
    """

    def __init__(self, folder: Path, card: Card, execution: Execution) -> None:
        path = folder / card.file
        check_graph(path, card)
        self.device = torch.device(execution.device)
        self.provider = f"onnxruntime/{_PROVIDER}"
        self._largest = _largest(execution)
        machine = {"tensorrt": tensorrt_version(), "onnxruntime": runtime().__version__, **device_key(self.device)}
        compiled = compile_options(card, execution, input_name(path))
        # ONNX Runtime reads both folders itself, and does not check their files. Unlike those of `compile_cache.kept`
        # they have no recorded hash, so only the folder's mode protects them.
        engines = cache_folder("tensorrt", engine_key(card, compiled, machine))
        timings = cache_folder("tensorrt-timings", machine)
        options = {
            **compiled,
            "device_id": self.device.index or 0,
            "trt_engine_cache_enable": True,
            "trt_engine_cache_path": str(engines),
            "trt_timing_cache_enable": True,
            "trt_timing_cache_path": str(timings),
        }
        session = gpu_session(str(path), _PROVIDER, options, whole=True, entries=_ENTRIES)
        self._bound = GpuBinding(session, self.device, card)

    def run(self, batch: torch.Tensor) -> Outputs:
        """Return the outputs for a batch."""
        if len(batch) <= self._largest:
            return self._bound.run(batch)
        parts = [batch[piece.start : piece.stop] for piece in pieces(len(batch), (self._largest,))]
        return joined(self._bound.run(part) for part in parts)


def _largest(execution: Execution) -> int:
    return (execution.buckets or DEFAULT_BUCKETS)[-1]


def compile_options(card: Card, execution: Execution, name: str) -> dict[str, Any]:
    """Return the provider's options that decide what TensorRT compiles.

    Args:
        card: the artifact's card.
        execution: its buckets and options.
        name: name of the graph's input.

    Raises:
        EngineError: the option ``optimum`` is not a batch size of the profile.
    """
    largest = _largest(execution)
    settings = ONNXRUNTIME_TENSORRT.settings(execution.options)
    optimum = settings["optimum"] or largest
    if not 1 <= optimum <= largest:
        raise EngineError(f"{card.name}: option optimum must be from 1 to the largest bucket, {largest}")
    return {
        **precision_options(card.precision, half=settings["half"]),
        "trt_builder_optimization_level": settings["level"],
        **profile(name, card.preprocessing.shape, optimum, largest),
    }


def engine_key(card: Card, options: Mapping[str, Any], machine: Mapping[str, str]) -> dict[str, Any]:
    """Return everything that a compiled engine depends on: files, `compile_options`, libraries and GPU."""
    return {**machine, "model": dict(card.files), "options": dict(options)}


def profile(name: str, shape: Sequence[int], optimum: int, largest: int) -> dict[str, str]:
    """Return the provider's options for 1 to ``largest`` images of ``shape`` (C, H, W), fastest at ``optimum``."""

    def of(count: int) -> str:
        return f"{name}:{'x'.join(map(str, (count, *shape)))}"

    return {
        "trt_profile_min_shapes": of(1),
        "trt_profile_opt_shapes": of(optimum),
        "trt_profile_max_shapes": of(largest),
    }


def precision_options(precision: str, *, half: bool = False) -> dict[str, bool]:
    """Return the arithmetic that TensorRT may use, by a card's precision.

    ONNX Runtime builds weakly typed networks (onnxruntime 29779), so the graph's types are not enough.

    Args:
        precision: the card's precision.
        half: whether the float parts of an INT8 graph may compute in FP16.
    """
    if precision.startswith("int8"):
        return {"trt_int8_enable": True} | ({"trt_fp16_enable": True} if half else {})
    kinds = {"bfloat16": "trt_bf16_enable", "float16": "trt_fp16_enable"}
    return next(({option: True} for kind, option in kinds.items() if kind in precision), {})


def input_name(path: Path) -> str:
    """Return the name of a graph's input. It opens the graph on the CPU without optimisation."""
    library = runtime()
    options = library.SessionOptions()
    options.graph_optimization_level = library.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.load_model_format", "ONNX")
    session = library.InferenceSession(str(path), options, providers=["CPUExecutionProvider"], enable_fallback=0)
    name: str = session.get_inputs()[0].name
    return name


@functools.cache
def tensorrt_version() -> str:
    """Return the version of TensorRT's library. Loading it also lets ONNX Runtime find it.

    Raises:
        EngineError: it is not installed.
    """
    folders = [""]
    if (spec := importlib.util.find_spec("tensorrt_libs")) is not None:  # a folder of wheels, on no search path
        folders += [f"{place}/" for place in spec.submodule_search_locations or ()]
    for folder in folders:
        for major in _MAJORS:
            try:
                library = ctypes.CDLL(f"{folder}libnvinfer.so.{major}", mode=ctypes.RTLD_GLOBAL)
                for part in ("libnvinfer_plugin", "libnvonnxparser"):
                    ctypes.CDLL(f"{folder}{part}.so.{major}", mode=ctypes.RTLD_GLOBAL)
            except OSError:
                continue
            function = library.getInferLibVersion
            function.restype = ctypes.c_int32
            return str(function())
    names = " or ".join(f"libnvinfer.so.{major}" for major in _MAJORS)
    raise EngineError(f"TensorRT is not installed: {names} cannot be loaded")


def _accepts(card: Card) -> str | None:
    if card.precision.startswith("int8") and card.target is None:
        return (
            f"this INT8 graph was not made for TensorRT (target {TENSORRT}), which needs symmetric int8 with "
            "zero-point 0 and float biases"
        )
    return None


def _open(folder: Path, card: Card, execution: Execution) -> Engine:
    return OnnxRuntimeTensorRtEngine(folder, card, execution)


def _probe(device: torch.device) -> object:
    tensorrt_version()
    options: dict[str, Any] = {"device_id": device.index or 0}
    return run_tiny(gpu_session(TINY_GRAPH, _PROVIDER, options, whole=True, entries=_ENTRIES))


ONNXRUNTIME_TENSORRT = register(
    EngineType(
        "onnxruntime-tensorrt",
        keeps_buckets=True,
        formats=("onnx",),
        open=_open,
        probe=_probe,
        devices=("cuda",),
        rank=10,
        accepts=_accepts,
        targets=(TENSORRT,),
        computes_with_torch=False,
        options={
            "optimum": EngineOption(0, "batch size for which kernels are chosen; 0: the largest bucket"),
            "half": EngineOption(False, "compute the float32 parts of an INT8 graph in FP16"),
            "level": EngineOption(3, "how long TensorRT searches while compiling: 0 (seconds) to 5"),
        },
        libraries=("onnxruntime-gpu", "tensorrt-cu13", "tensorrt"),
        companions=(".data", PROFILE_ENDING),
    )
)
