"""An artifact's layers, each run alone by an engine on the integers that the reference gives it.

This runs in a process of its own (`optimize.measure.processes`): what a library does to a process, it does to that one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import onnx
import torch

from optimize.certify.causes import cause_of
from optimize.certify.graph import GraphLayers
from optimize.certify.packed import PackedLayers
from optimize.certify.program import Batch, Layer, ReferenceLayers
from optimize.certify.records import Cause, Engine, LayerParity, agrees
from serve.runtime.card import load_card
from serve.runtime.engines.base import execution_id
from serve.runtime.engines.openvino import compile_bytes
from serve.runtime.engines.torchscript import use_int8_kernels
from serve.runtime.errors import PipelineError
from serve.runtime.execution import Execution
from serve.runtime.onnx_session import cpu_session
from serve.runtime.program_file import load_program
from serve.runtime.script_file import load_script

#: Images that go through the reference together.
_TOGETHER: Final = 4


class Runner(Protocol):
    """An engine that runs single layers of an artifact; ``numbers`` are those that it has."""

    numbers: tuple[int, ...]

    def every(self, batch: Batch) -> Mapping[int, torch.Tensor]:
        """The integers of each layer, by number, from the batch's of those before it."""
        ...

    def one(self, layer: Layer, batch: Batch) -> torch.Tensor:
        """Those of one layer."""
        ...


def check_layers(folder: Path, reference: Path, execution: Execution, pixels: torch.Tensor) -> Engine:
    """Run each layer of an artifact alone, and compare its integers with the reference's.

    Args:
        folder: the artifact's: a QDQ graph, or torch's packed program.
        reference: the reference program.
        execution: what runs it.
        pixels: ``uint8 (N, C, H, W)`` images.

    Raises:
        PipelineError: the artifact's layers are not those of the reference, or its engine is not known here.
    """
    card = load_card(folder)
    program = ReferenceLayers(load_program(reference))
    # Two, or the example would be taken for a network of one image.
    example = program.shown(pixels[:1].repeat(2, 1, 1, 1), card.preprocessing)
    open_runner = _RUNNERS.get(execution.engine)
    if open_runner is None:
        raise PipelineError(f"{execution.engine}: its layers cannot be run alone; those of {', '.join(_RUNNERS)} can")
    runner = open_runner(folder / card.file, program, execution, example)
    counts = {number: _Count() for number in runner.numbers}
    for part in torch.split(pixels, _TOGETHER):
        batch = program.shown(part, card.preprocessing)
        for number, found in runner.every(batch).items():
            count, layer = counts[number], program.layers[number]
            count.add(batch.integers[number], found)
            if count.cause is None and not count.agrees:
                count.cause = cause_of(program, layer, _alone(runner, layer), batch, found)
    left = [layer.name for layer in program.layers if layer.number not in counts]
    return Engine(
        execution=execution_id(execution),
        layers=tuple(count.found(program.layers[number]) for number, count in sorted(counts.items())),
        apart=f"no step of its own here: {'; '.join(left)}" if left else None,
    )


def in_process(
    payload: bytearray, *, folder: str, reference: str, execution: Mapping[str, Any], shape: list[int]
) -> dict[str, Any]:
    """`check_layers` as a process is asked for it: images as bytes of a shape, the answer as JSON values."""
    pixels = torch.frombuffer(payload, dtype=torch.uint8).view(shape)
    return check_layers(Path(folder), Path(reference), Execution.from_json(execution), pixels).to_json()


def _alone(runner: Runner, layer: Layer) -> Callable[[Batch], torch.Tensor]:
    return lambda batch: runner.one(layer, batch)


@dataclass
class _Count:
    """How many of a layer's integers are the reference's, over batches."""

    outputs: int = 0
    different: int = 0
    steps: int = 0
    cause: Cause | None = None

    def add(self, expected: torch.Tensor, found: torch.Tensor) -> None:
        """Compare the integers of a batch."""
        if expected.shape != found.shape:
            raise PipelineError(f"a layer gives {tuple(found.shape)} integers where {tuple(expected.shape)} are meant")
        apart = (expected.int() - found.int()).abs()
        self.outputs += apart.numel()
        self.different += int((apart > 0).sum())
        self.steps = max(self.steps, int(apart.max()))

    @property
    def agrees(self) -> bool:
        """Whether the layer holds, by the images until now."""
        return agrees(self.outputs, self.different, self.steps)

    def found(self, layer: Layer) -> LayerParity:
        """What there is to say of the layer."""
        cause = None if self.agrees else self.cause
        return LayerParity(layer.number, layer.name, self.outputs, self.different, self.steps, cause)


class _OfGraph:
    """The layers of an ONNX graph, each in a session of its own."""

    def __init__(self, file: Path, program: ReferenceLayers, execution: Execution, example: Batch) -> None:
        self._layers, self._example, self._execution = program.layers, example, execution
        self._graph = GraphLayers(onnx.load(file), program.layers)
        self._open: dict[int, Callable[[dict[str, Any]], Any]] = {}
        self.numbers = tuple(layer.number for layer in program.layers)

    def every(self, batch: Batch) -> Mapping[int, torch.Tensor]:
        """See `Runner`."""
        return {layer.number: self.one(layer, batch) for layer in self._layers}

    def one(self, layer: Layer, batch: Batch) -> torch.Tensor:
        """See `Runner`."""
        if layer.number not in self._open:
            self._open[layer.number] = self._opened(self._graph.alone(layer, self._example))
        given = {self._graph.input_of(number): batch.integers[number].contiguous().numpy() for number in layer.before}
        if not given:
            given[self._graph.image] = (batch.pixels if self._graph.takes_pixels else batch.images).numpy()
        return torch.from_numpy(self._open[layer.number](given))

    def _opened(self, body: bytes) -> Callable[[dict[str, Any]], Any]:
        raise NotImplementedError


class _OnnxRuntime(_OfGraph):
    def _opened(self, body: bytes) -> Callable[[dict[str, Any]], Any]:
        optimized = bool(self._execution.options.get("optimizations", True))
        session = cpu_session(body, half=False, optimized=optimized)
        return lambda given: session.run(None, given)[0]


class _OpenVino(_OfGraph):
    def _opened(self, body: bytes) -> Callable[[dict[str, Any]], Any]:
        compiled = compile_bytes(body, self._execution.cores)
        return lambda given: next(iter(compiled(given).values()))


class _Packed:
    """The operators of torch's packed program."""

    def __init__(self, file: Path, program: ReferenceLayers, execution: Execution, example: Batch) -> None:
        use_int8_kernels()
        self._packed = PackedLayers(load_script(file, torch.device("cpu")), program.layers)
        self.numbers = tuple(self._packed.match(example))
        if not self.numbers:
            raise PipelineError(f"{file.name}: none of its layers is one of the reference program")

    def every(self, batch: Batch) -> Mapping[int, torch.Tensor]:
        """See `Runner`."""
        return self._packed.integers(batch)

    def one(self, layer: Layer, batch: Batch) -> torch.Tensor:
        """See `Runner`."""
        return self._packed.integers(batch, only=layer.number)[layer.number]


_RUNNERS: Final[Mapping[str, Callable[[Path, ReferenceLayers, Execution, Batch], Runner]]] = {
    "onnxruntime": _OnnxRuntime,
    "openvino": _OpenVino,
    "torchscript": _Packed,
}
