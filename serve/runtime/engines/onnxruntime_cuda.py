"""``onnxruntime-cuda``: a float ONNX graph on the CUDA provider of ONNX Runtime, bound to torch's memory."""

from __future__ import annotations

from pathlib import Path

import torch

from ..card.card import Card
from ..card.execution import Execution
from ..model_files.onnx_file import TINY_GRAPH, check_graph
from ..model_files.onnx_session import GpuBinding, gpu_session, run_tiny
from ..outputs import Outputs
from .base import Engine, EngineOption, EngineType, register

_PROVIDER = "CUDAExecutionProvider"


class OnnxRuntimeCudaEngine:
    """See `Engine`."""

    def __init__(self, folder: Path, card: Card, execution: Execution) -> None:
        path = folder / card.file
        check_graph(path, card)
        settings = ONNXRUNTIME_CUDA.settings(execution.options)
        self.device = torch.device(execution.device)
        options = {
            "device_id": self.device.index or 0,
            "cudnn_conv_algo_search": "EXHAUSTIVE" if settings["search"] else "HEURISTIC",
            "prefer_nhwc": int(settings["channels_last"]),
            "use_tf32": int(settings["tf32"]),
        }
        self._bound = GpuBinding(gpu_session(str(path), _PROVIDER, options), self.device, card)
        self.provider = f"onnxruntime/{_PROVIDER}"

    def run(self, batch: torch.Tensor) -> Outputs:
        """Return the outputs for a batch."""
        return self._bound.run(batch)


def _accepts(card: Card) -> str | None:
    if card.precision.startswith("int8"):
        return (
            "onnxruntime-cuda has no INT8 convolutions and would run them in float; use onnxruntime-tensorrt for "
            "INT8 on a GPU"
        )
    return None


def _open(folder: Path, card: Card, execution: Execution) -> Engine:
    return OnnxRuntimeCudaEngine(folder, card, execution)


def _probe(device: torch.device) -> object:
    return run_tiny(gpu_session(TINY_GRAPH, _PROVIDER, {"device_id": device.index or 0}))


ONNXRUNTIME_CUDA = register(
    EngineType(
        "onnxruntime-cuda",
        formats=("onnx",),
        open=_open,
        probe=_probe,
        devices=("cuda",),
        rank=20,
        accepts=_accepts,
        computes_with_torch=False,
        options={
            "search": EngineOption(True, "let cuDNN time its algorithms on the first run of every new batch size"),
            "channels_last": EngineOption(
                False, "run convolutions as NHWC; ONNX Runtime converts their inputs and outputs"
            ),
            "tf32": EngineOption(True, "multiply float32 with 10 bits of mantissa (TF32), as torch's convolutions do"),
        },
        libraries=("onnxruntime-gpu",),
        companions=(".data",),
    )
)
