"""``openvino``: an ONNX graph, float or QDQ, read as it is (or OpenVINO's own format), compiled for the CPU."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from ..card.card import Card
from ..card.execution import Execution
from ..errors import EngineError
from ..model_files.onnx_file import TINY_GRAPH, check_graph
from ..model_files.telemetry import import_openvino
from .base import Engine, EngineOption, EngineType, register

#: Ending of the weights beside a graph of OpenVINO's own format (``.xml``).
_WEIGHTS = ".bin"


class OpenVinoEngine:
    """See `Engine`; ``request`` is the one that it infers with, for what looks into it."""

    def __init__(self, folder: Path, card: Card, execution: Execution) -> None:
        path = folder / card.file
        if card.format == "onnx":
            check_graph(path, card)
        self.device = torch.device("cpu")
        settings = OPENVINO.settings(execution.options)
        library = core()
        weights = (str(path.with_name(f"{path.name}{_WEIGHTS}")),) if card.format == "openvino" else ()
        try:
            model = library.read_model(str(path), *weights)
            compiled = library.compile_model(model, "CPU", _properties(model, execution.cores, settings["precision"]))
        except RuntimeError as error:  # its cause stands last, below the places in OpenVINO's own sources (2026.4)
            said = [line for line in str(error).splitlines() if line.strip()]
            raise EngineError(f"{card.name}: OpenVINO cannot compile it: {said[-1][:300]}") from error
        # What it says it runs with, and not what it was asked for.
        precision = compiled.get_property("INFERENCE_PRECISION_HINT").to_string()
        self.provider = f"openvino/{compiled.get_property('EXECUTION_DEVICES')[0]}"
        if precision != "f32":
            self.provider += f"/{precision}"
        self.request = compiled.create_infer_request()

    def run(self, batch: torch.Tensor) -> torch.Tensor:
        """Logits ``(N, classes)`` of a batch."""
        answers = self.request.infer({0: batch.contiguous().numpy()}, share_inputs=True)
        return torch.from_numpy(answers[0])


@functools.cache
def core() -> Any:
    """One for the process, which keeps it to its end.

    OpenVINO's CPU plugin (2026.4.1, openvinotoolkit/openvino pull request 11894) gives the thread that loads it an
    alternate signal stack, and unmaps it with the last reference: in whatever thread that goes, the garbage
    collector's choice. The loading thread is left with a stack that is not there, and dies by SIGSEGV at the next
    signal that Python handles.
    """
    # Imported only for what it runs: the other artifacts run where it is not installed.
    return import_openvino().Core()


def compile_bytes(graph: bytes, threads: int) -> Any:
    """A compiled model of an ONNX graph's bytes, with the settings of this engine: for what looks into a graph."""
    library = core()
    model = library.read_model(graph)
    return library.compile_model(model, "CPU", _properties(model, threads, "f32"))


def _properties(model: Any, threads: int, precision: str) -> dict[str, Any]:
    return _without_kept(model) | {
        # Left alone it takes bfloat16 where the CPU has it, and answers differ.
        "INFERENCE_PRECISION_HINT": precision,
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        # Left alone it binds each thread to a core (OpenVINO 2026.4), where that waits for whoever else has work there,
        # such as images that are decoded beside it, and the other threads wait for that one, awake: served ResNet-18
        # took 8 to 13 % more of the cores for an answer so, and a lone image no less time.
        "ENABLE_CPU_PINNING": False,
        "INFERENCE_NUM_THREADS": threads,
    }


def _without_kept(model: Any) -> dict[str, Any]:
    """What has kernels made anew for each new size of a batch, where axes are moved; empty for other graphs.

    Of a graph whose batch is free OpenVINO (2026.4.1) keeps kernels by what they were made for, and in networks that
    attend takes one for another. Against what the integers mean, of two networks of the package vit-pytorch (TwinsSVT,
    SepViT) it had 4.1 and 12.5 dB, and 30.7 and 22.1 without them; a fixed batch was right as well. Which kernel is
    taken for which was not found; float graphs and networks of convolutions alone were not seen to be wrong.

    A batch as large as the one before costs the same; ResNet-18, which does not get this, would take 0.7 ms more where
    batches of one and two images take turns (2 cores).
    """
    moves = any(operator.get_type_name() == "Transpose" for operator in model.get_ops())
    return {"CPU_RUNTIME_CACHE_CAPACITY": 0} if moves else {}


def _open(folder: Path, card: Card, execution: Execution) -> Engine:
    return OpenVinoEngine(folder, card, execution)


def _probe(device: torch.device) -> object:
    library = core()
    model = library.read_model(TINY_GRAPH)
    compiled = library.compile_model(model, "CPU", _properties(model, 1, "f32"))
    return compiled(torch.ones(1).numpy())


OPENVINO = register(
    EngineType(
        "openvino",
        formats=("onnx", "openvino"),
        open=_open,
        probe=_probe,
        rank=10,
        computes_with_torch=False,
        any_thread=True,
        options={
            "precision": EngineOption(
                "f32", "arithmetic of the float parts: f32, or bf16 where the CPU has it (answers differ)"
            )
        },
        libraries=("openvino",),
        companions=(".data", _WEIGHTS),
    )
)
