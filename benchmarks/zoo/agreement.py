"""How far what runs an int8 artifact agrees with what its integers mean, and with the float network."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from benchmarks.zoo.record import Agreement
from optimize.export.onnx_graph.write import run_onnx
from optimize.statistics import sqnr_db
from optimize.store.artifact import REFERENCE_FILE, Artifact
from serve.runtime.device.cpu_integers import TENSORRT
from serve.runtime.engines.base import executions_for
from serve.runtime.errors import EngineError
from serve.runtime.images.image_preprocessing import normalise
from serve.runtime.model_files.program_file import load_program
from serve.runtime.service.predictor import Predictor

_BATCH = 16

#: An engine computes something else than integers mean where it agrees with them by less than the first, in dB, and is
#: farther from the float network than they are by more than the second: those of `optimize.quantization.gate`, and for
#: its reasons. Rounding ties that spread through a deep network of random weights come below the first alone, but do so
#: in all engines: one that agrees with integers by so much less than another does computes something else, too.
_ENGINES_AGREE, _ENGINES_LOSE, _ENGINES_APART = 10.0, 6.0, 10.0


class Certify(Protocol):
    """What compares an int8 graph with its reference; a fuller certificate has this shape, too."""

    def __call__(self, graph: Artifact, floats: torch.nn.Module, pixels: torch.Tensor) -> tuple[Agreement, ...]:
        """Compare on images.

        Args:
            graph: of ``onnx-int8``, its parent the ``ptq`` artifact with the reference program.
            floats: the float network, in eval mode.
            pixels: ``uint8 (N, C, H, W)``.
        """


def agreements(graph: Artifact, floats: torch.nn.Module, pixels: torch.Tensor) -> tuple[Agreement, ...]:
    """See `Certify`: reference against float, and every execution of program and graph against the reference.

    A graph for TensorRT is computed by ONNX Runtime on the CPU, node by node.
    """
    quantized = graph.parent
    assert quantized is not None
    device, preprocessing = torch.device("cpu"), graph.card.preprocessing
    batches = [normalise(batch, preprocessing, device, torch.float32) for batch in torch.split(pixels, _BATCH)]
    program = load_program(quantized.folder / REFERENCE_FILE).module()
    with torch.no_grad():
        expected = torch.cat([floats(batch) for batch in batches])
        meant = torch.cat([program(batch) for batch in batches])
    found = [compared("reference program", "float", expected, meant)]
    answered = {engine: answers for artifact in (quantized, graph) for engine, answers in _answers(artifact, pixels)}
    found += [compared(engine, "integers", meant, answers) for engine, answers in answered.items()]
    for engine, answers in answered.items():
        found.append(compared(engine, "float", expected, answers))
    return tuple(found)


def _answers(artifact: Artifact, pixels: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Logits of each execution that works here, by its name."""
    if artifact.card.format == "onnx":
        given = pixels if artifact.card.input_dtype == "uint8" else None
        assert given is not None
        literal = [run_onnx(artifact.path, batch, literal=True) for batch in torch.split(given, _BATCH)]
        yield "onnxruntime, node by node", torch.cat(literal)
    if artifact.card.target == TENSORRT:
        return
    for execution in executions_for(artifact.card):
        try:
            predictor = Predictor(artifact.folder, execution)
        except EngineError:
            continue
        yield execution.engine, torch.cat([predictor.logits(batch) for batch in torch.split(pixels, _BATCH)])


def compared(engine: str, reference: str, expected: torch.Tensor, found: torch.Tensor) -> Agreement:
    """Two batches of logits ``(N, classes)``; see `Agreement`."""
    mean = expected.mean(0)
    equal = torch.equal(expected, found)
    ratio = None if equal else sqnr_db((expected - mean).double().numpy(), (found - mean).double().numpy())
    same = (expected.argmax(1) == found.argmax(1)).double().mean().item()
    return Agreement(engine=engine, reference=reference, top1=same, sqnr_db=ratio, images=len(expected))  # type: ignore[arg-type]


def disagreeing(found: Sequence[Agreement]) -> str | None:
    """Which engine computes something else than the integers mean, in a line; None where none does."""
    ratios = {(each.engine, each.reference): math.inf if each.sqnr_db is None else each.sqnr_db for each in found}
    kept = ratios["reference program", "float"]
    agreeing = {engine: ratio for (engine, reference), ratio in ratios.items() if reference == "integers"}
    closest = max(agreeing, key=agreeing.__getitem__, default="")
    for engine, ratio in agreeing.items():
        if ratio >= _ENGINES_AGREE:
            continue
        floats = ratios[engine, "float"]
        if kept > floats + _ENGINES_LOSE:
            why = f"against float {floats:.1f} dB where exact arithmetic has {kept:.1f}"
        elif agreeing[closest] > ratio + _ENGINES_APART:
            why = f"against them {ratio:.1f} dB where {closest} has {agreeing[closest]:.1f}"
        else:
            continue
        return f"{engine} computes something else than these integers mean: SQNR {why}"
    return None
