"""Runs each layer of an artifact alone in an engine, on the integers that the reference gives it.

This runs in a separate process (`optimize.measure.processes`), so that a library's crash ends only that process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import onnx
import torch

from optimize.certify.layer_findings import Cause, Engine, LayerParity, Unable, agrees
from optimize.certify.layer_graphs import GraphLayers
from optimize.certify.mismatch_causes import cause_of
from optimize.certify.packed_program import PackedLayers
from optimize.certify.reference_program import Batch, Layer, ReferenceLayers
from serve.runtime.card.card import load_card
from serve.runtime.card.execution import Execution
from serve.runtime.device.cpu_integers import TENSORRT
from serve.runtime.engines.base import execution_id
from serve.runtime.engines.openvino import compile_bytes
from serve.runtime.engines.torchscript import use_int8_kernels
from serve.runtime.errors import PipelineError, first_line, one_line
from serve.runtime.model_files.onnx_session import cpu_session
from serve.runtime.model_files.program_file import load_program
from serve.runtime.model_files.script_file import load_script

#: Number of images that run through the reference together.
_TOGETHER: Final = 4

_LONGEST: Final = 1000  # in characters, for a reason


class Runner(Protocol):
    """An engine that runs single layers of an artifact."""

    def every(self, batch: Batch) -> Mapping[int, torch.Tensor | str]:
        """Return each layer's integers by number, computed from the batch's earlier integers, or why there are none."""
        ...

    def one(self, layer: Layer, batch: Batch) -> torch.Tensor:
        """Return the integers of one layer."""
        ...

    def astray(self, layer: Layer) -> tuple[str, ...]:
        """Return the names of earlier layers that gave this layer other integers than the batch's in the last run."""
        ...


def check_layers(folder: Path, reference: Path, execution: Execution, pixels: torch.Tensor) -> Engine:
    """Run each layer of an artifact alone, and compare its integers with the reference's.

    A layer that cannot be run alone is noted with the reason. The others still run.

    Args:
        folder: the artifact's folder: a QDQ graph, or torch's packed program.
        reference: the reference program.
        execution: the engine and its settings.
        pixels: images, ``uint8 (N, C, H, W)``.

    Raises:
        PipelineError: the artifact's layers are not those of the reference, none of them can be run alone, or its
            engine is not known here.
    """
    card = load_card(folder)
    is_graph = card.format == "onnx"
    for_cpus = is_graph and card.target != TENSORRT
    program = ReferenceLayers(load_program(reference), joined=for_cpus, padded=is_graph)
    # Two images, because one would fix the batch at 1.
    example = program.shown(pixels[:1].repeat(2, 1, 1, 1), card.preprocessing)
    open_runner = _RUNNERS.get(execution.engine)
    if open_runner is None:
        raise PipelineError(f"{execution.engine}: cannot run single layers; {', '.join(_RUNNERS)} can")
    runner = open_runner(folder / card.file, program, execution, example)
    counts: dict[int, _Count] = {}
    for part in torch.split(pixels, _TOGETHER):
        batch = program.shown(part, card.preprocessing)
        for number, found in runner.every(batch).items():
            count, layer = counts.setdefault(number, _Count()), program.layers[number]
            if count.unable is not None:
                continue
            if isinstance(found, str):
                count.unable = found
                continue
            alone = _alone(runner, layer)
            why = functools.partial(cause_of, program, layer, alone, batch, found, astray=runner.astray(layer))
            count.unable = count.compare(batch.integers[number], found, why)
    left = [layer.name for layer in program.layers if layer.number not in counts]
    counted = [(count, program.layers[number]) for number, count in sorted(counts.items())]
    reasons = [count.unable for count, _ in counted if count.unable is not None]
    if reasons and len(reasons) == len(counted):
        raise PipelineError(f"none of its layers can be run alone: {reasons[0]}")
    return Engine(
        execution=execution_id(execution),
        layers=tuple(count.found(layer) for count, layer in counted if count.unable is None),
        unable=tuple(
            Unable(layer.number, layer.name, count.unable) for count, layer in counted if count.unable is not None
        ),
        apart=f"no separate step here: {'; '.join(left)}" if left else None,
    )


def in_process(
    payload: bytearray, *, folder: str, reference: str, execution: Mapping[str, Any], shape: list[int]
) -> dict[str, Any]:
    """Run `check_layers` in a separate process: images come as bytes with a shape, and the result is JSON values."""
    pixels = torch.frombuffer(payload, dtype=torch.uint8).view(shape)
    return check_layers(Path(folder), Path(reference), Execution.from_json(execution), pixels).to_json()


def _said(error: Exception) -> str:
    return first_line(error, _LONGEST) if isinstance(error, PipelineError) else one_line(error)


def _alone(runner: Runner, layer: Layer) -> Callable[[Batch], torch.Tensor]:
    return lambda batch: runner.one(layer, batch)


@dataclass
class _Count:
    """Counts how many of a layer's integers equal the reference's, over batches."""

    outputs: int = 0
    different: int = 0
    steps: int = 0
    cause: Cause | None = None
    unable: str | None = None

    def compare(self, expected: torch.Tensor, found: torch.Tensor, why: Callable[[], Cause]) -> str | None:
        """Compare the integers of a batch, and find out why they differ. Return why that is impossible, or None."""
        if expected.shape != found.shape:
            return f"it gives integers of the shape {tuple(found.shape)} instead of {tuple(expected.shape)}"
        apart = (expected.int() - found.int()).abs()
        self.outputs += apart.numel()
        self.different += int((apart > 0).sum())
        self.steps = max(self.steps, int(apart.max()))
        if self.cause is None and not self.agrees:
            try:
                self.cause = why()
            except Exception as error:  # noqa: BLE001 - an operator without float64, or an engine that refuses
                return f"its integers differ by {self.steps} at most, for an unknown reason: {_said(error)}"
        return None

    @property
    def agrees(self) -> bool:
        """Whether the layer agrees on all images so far."""
        return agrees(self.outputs, self.different, self.steps)

    def found(self, layer: Layer) -> LayerParity:
        """Return the record of the layer."""
        cause = None if self.agrees else self.cause
        return LayerParity(layer.number, layer.name, self.outputs, self.different, self.steps, cause)


class _OfGraph:
    """The layers of an ONNX graph, each in a session of its own."""

    def __init__(self, file: Path, program: ReferenceLayers, execution: Execution, example: Batch) -> None:
        self._layers, self._example, self._execution = program.layers, example, execution
        self._graph = GraphLayers(onnx.load(file), program.layers)
        self._open: dict[int, Callable[[dict[str, Any]], Any]] = {}

    def every(self, batch: Batch) -> Mapping[int, torch.Tensor | str]:
        """See `Runner`."""
        found: dict[int, torch.Tensor | str] = {}
        for layer in self._layers:
            try:
                found[layer.number] = self.one(layer, batch)
            except Exception as error:  # noqa: BLE001 - an engine may refuse a graph in any way
                found[layer.number] = _said(error)
        return found

    def one(self, layer: Layer, batch: Batch) -> torch.Tensor:
        """See `Runner`."""
        if layer.number not in self._open:
            self._open[layer.number] = self._opened(self._graph.alone(layer, self._example))
        return torch.from_numpy(self._open[layer.number](self._graph.given(layer, batch)))

    def astray(self, layer: Layer) -> tuple[str, ...]:
        """See `Runner`. There are none, because each layer is a graph of its own with given inputs."""
        return ()

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
        self._layers = program.layers
        self._astray: dict[int, tuple[str, ...]] = {}
        self._packed = PackedLayers(load_script(file, torch.device("cpu")), program.layers)
        numbers = self._packed.match(example)
        ended = self._packed.ended
        if not numbers:
            why = f": {ended}" if ended else ""
            raise PipelineError(f"{file.name}: none of its layers is in the reference program{why}")
        # Behind an operator that cannot be run, it is unknown which layers have a step of their own.
        behind = [layer.number for layer in program.layers if ended and layer.number > numbers[-1]]
        self._numbers = (*numbers, *behind)

    def every(self, batch: Batch) -> Mapping[int, torch.Tensor | str]:
        """See `Runner`."""
        found = self._packed.integers(batch)
        # Read it now, because `one` computes no layer behind its own.
        self._astray = {layer.number: self._packed.astray(layer) for layer in self._layers}
        return {number: found.get(number, f"{self._packed.ended}") for number in self._numbers}

    def one(self, layer: Layer, batch: Batch) -> torch.Tensor:
        """See `Runner`."""
        return self._packed.integers(batch, only=layer.number)[layer.number]

    def astray(self, layer: Layer) -> tuple[str, ...]:
        """See `Runner`."""
        return self._astray[layer.number]


_RUNNERS: Final[Mapping[str, Callable[[Path, ReferenceLayers, Execution, Batch], Runner]]] = {
    "onnxruntime": _OnnxRuntime,
    "openvino": _OpenVino,
    "torchscript": _Packed,
}
