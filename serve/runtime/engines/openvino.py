"""``openvino``: an unchanged ONNX graph, float or QDQ, or OpenVINO's own format, compiled for the CPU."""

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
from ..outputs import Outputs, wanted_outputs
from .base import Engine, EngineOption, EngineType, register

#: Ending of the weights of a graph in OpenVINO's own format (``.xml``).
_WEIGHTS = ".bin"


class OpenVinoEngine:
    """See `Engine`. ``request`` is its inference request, for inspection."""

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
            outputs = _only_outputs(model, card)
            compiled = library.compile_model(model, "CPU", _properties(model, execution.cores, settings["precision"]))
        except RuntimeError as error:  # the cause is the last line, below places in OpenVINO's own sources (2026.4)
            said = [line for line in str(error).splitlines() if line.strip()]
            raise EngineError(f"{card.name}: OpenVINO cannot compile it: {said[-1][:300]}") from error
        # The precision that it reports, not the requested one.
        precision = compiled.get_property("INFERENCE_PRECISION_HINT").to_string()
        self.provider = f"openvino/{compiled.get_property('EXECUTION_DEVICES')[0]}"
        if precision != "f32":
            self.provider += f"/{precision}"
        self.request = compiled.create_infer_request()
        self._outputs = [compiled.output(name) for name in outputs]

    def run(self, batch: torch.Tensor) -> Outputs:
        """Return the outputs for a batch."""
        answers = self.request.infer({0: batch.contiguous().numpy()}, share_inputs=True)
        return tuple(torch.from_numpy(answers[output]) for output in self._outputs)


@functools.cache
def core() -> Any:
    """Return the process's one OpenVINO core, which lives until the process ends.

    OpenVINO's CPU plugin (2026.4.1, openvinotoolkit/openvino pull request 11894) gives the thread that loads it an
    alternate signal stack. It unmaps the stack with the last reference, in any thread: the garbage collector decides.
    The loading thread keeps the unmapped stack. It then dies by SIGSEGV at the next signal that Python handles.
    """
    # Imported only when needed, because other artifacts run without it.
    return import_openvino().Core()


def compile_bytes(graph: bytes, threads: int) -> Any:
    """Compile an ONNX graph's bytes with this engine's settings, for inspection."""
    library = core()
    model = library.read_model(graph)
    return library.compile_model(model, "CPU", _properties(model, threads, "f32"))


def _only_outputs(model: Any, card: Card) -> list[str]:
    """Remove the results of a model that the card does not name, and return the names of the others.

    A result that nobody reads would still be written, and copied after each call.

    Raises:
        EngineError: the model does not have all of these outputs.
    """
    wanted = wanted_outputs(card, (name for result in model.outputs for name in result.names))
    for result in model.get_results():
        if result.output(0).names.isdisjoint(wanted):
            model.remove_result(result)
    return wanted


def _properties(model: Any, threads: int, precision: str) -> dict[str, Any]:
    return _without_kept(model) | {
        # By default it uses bfloat16 if the CPU has it, and answers differ.
        "INFERENCE_PRECISION_HINT": precision,
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        # By default it binds each thread to a core (OpenVINO 2026.4). The thread then waits for other work on that
        # core, for example image decoding, and the engine's other threads wait actively for it. For a served ResNet-18
        # an answer took 8 to 13 % more core time so, and a lone image was no faster.
        "ENABLE_CPU_PINNING": False,
        "INFERENCE_NUM_THREADS": threads,
    }


def _without_kept(model: Any) -> dict[str, Any]:
    """Return options that turn kernel reuse off if the graph moves axes. Empty for other graphs.

    With a dynamic batch, OpenVINO (2026.4.1) caches kernels by their shapes. In networks with attention it confuses
    some of them. Two networks of the package vit-pytorch (TwinsSVT, SepViT) had 4.1 and 12.5 dB against the exact
    integers with the cache, 30.7 and 22.1 dB without. A fixed batch was right as well. Which kernels are confused is
    unknown. Float graphs and pure convolution networks never showed the fault.

    A batch of the same size as the one before costs the same. For alternating batches of one and two images, ResNet-18,
    which keeps the cache, would take 0.7 ms more (2 cores).
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
                "f32", "precision of the float parts: f32, or bf16 if the CPU supports it (answers differ)"
            )
        },
        libraries=("openvino",),
        companions=(".data", _WEIGHTS),
    )
)
