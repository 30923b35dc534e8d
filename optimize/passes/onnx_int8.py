"""``onnx-int8``: the QDQ graph of a ptq or qat artifact, with its integers, for their target.

A graph for TensorRT also runs without TensorRT. ONNX Runtime's CPU provider computes it literally, with all quantizers
and with the float operators between them. That gives its answers, but says nothing about its speed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import onnx
import torch
from pydantic import Field

from optimize.context import Context
from optimize.errors import PassError
from optimize.export.onnx_graph.exported_table import WRITTEN_FOR_CPUS
from optimize.export.onnx_graph.half_layers import halve_layers
from optimize.export.onnx_graph.pixel_input import INPUT_TYPES, TakesPixels, entered, graph_input
from optimize.export.onnx_graph.write import INPUT, run_onnx, save_changed
from optimize.passes.base import Pass, register
from optimize.quantization.gate import IMAGES, Gate, check_answers
from optimize.quantization.lowbit.execution_kind import OF_FLOAT, of_graph
from optimize.quantization.lowering.qdq import QdqSummary, lower
from optimize.quantization.targets import Target, TargetName, target_named
from optimize.store.artifact import REFERENCE_FILE, WEIGHTS_FILE, Artifact, Product
from optimize.store.atomic_files import write_json
from serve.runtime.device.buckets import DEFAULT_BUCKETS
from serve.runtime.device.cpu_integers import TENSORRT
from serve.runtime.engines.onnxruntime_tensorrt import PROFILE_ENDING, profile
from serve.runtime.model_files.program_file import load_program

#: The size of graph structure, scales and names, which even the smallest network needs beside its weights.
_STRUCTURE_BYTES = 256 << 10


class OnnxInt8(TakesPixels, Gate):
    """Settings of ``onnx-int8``."""

    max_size_ratio: float = Field(
        default=0.3,
        gt=0,
        le=1,
        description="largest file size, as a share of the bytes of the float weights; 256 KiB of graph structure and "
        "the weights that torch.ao leaves in float come on top",
    )
    min_sqnr: float = Field(
        default=6.0,
        description="lowest allowed signal-to-noise ratio of the logits in dB, against the parent's integers in "
        "exact arithmetic on 32 training images. Usual values are 25 to 50",
    )
    exact_sums: bool = Field(
        default=False,
        description="whether OpenVINO keeps residual sums as the graph has them, instead of fusing them into a "
        "convolution: the answers are exact, but slower; for CPUs",
    )
    half: tuple[str, ...] = Field(
        default=(),
        description="names of float layers whose weights are stored in FP16; engines with FP16 kernels compute them "
        "in FP16, CPU engines in FP32",
    )


def _apply(parent: Artifact, config: OnnxInt8, context: Context, folder: Path) -> Product:
    assert parent.parent is not None
    program = load_program(parent.folder / REFERENCE_FILE)
    path = folder / "model.onnx"
    target = target_named(cast("TargetName", parent.card.target))
    if config.exact_sums and not target.packed:
        raise PassError(f"onnx-int8: exact_sums is for graphs for CPUs, but these integers are for {target.name}")
    summary = lower(
        program,
        graph_input(context, config.input, 4),
        path,
        target,
        lambda module: entered(module, config.input, context.preprocessing),
        exact_sums=config.exact_sums,
        outputs=parent.card.outputs,
    )
    _write_for_engines(path, target, config.half)
    size, floats = path.stat().st_size, (parent.parent.folder / WEIGHTS_FILE).stat().st_size
    if size > config.max_size_ratio * floats + summary.float_bytes + _STRUCTURE_BYTES:
        raise PassError(
            f"onnx-int8: the file has {size} bytes, more than {config.max_size_ratio:g} of the {floats} bytes of the "
            f"float weights (and {summary.float_bytes} left in float): its weights are not stored as int8"
        )
    note = (
        f"{summary.weights} int8 weights, {summary.activations} activation quantizers, {size / floats:.2f} {OF_FLOAT}"
    )
    with torch.no_grad():
        expected = program.module()(context.example(IMAGES))
    answers = run_onnx(path, graph_input(context, config.input, IMAGES), literal=not target.packed)
    found = check_answers(
        expected, answers, config, "ONNX Runtime against exact arithmetic", task=context.task, names=parent.card.outputs
    )
    for_tensorrt = target.name == TENSORRT
    if for_tensorrt:
        _write_profile(path, context.preprocessing.shape)
        found += f"; computed on the CPU, where {TENSORRT} was not: its own answers and speed are not measured"
    return Product(
        path.name,
        "onnx",
        precision=of_graph(parent.card.precision),
        device="cuda" if for_tensorrt else "cpu",
        input_dtype=INPUT_TYPES[config.input],
        target=target.name,
        notes=(note, found, *_warned(summary)),
    )


def _write_for_engines(path: Path, target: Target, half: Sequence[str]) -> None:
    """Rewrite the graph so that engines compute it exactly, with the named layers in FP16, in place."""
    model = onnx.load(str(path))
    changed = target.packed and WRITTEN_FOR_CPUS.run(model, None)
    if half:
        changed = bool(halve_layers(model, half)) or changed
    if changed:
        save_changed(model, path)


def _write_profile(path: Path, shape: Sequence[int]) -> None:
    """Write the batch sizes for which to compile the graph to a file beside it. They are the engine's usual buckets."""
    options = profile(INPUT, shape, DEFAULT_BUCKETS[-1], DEFAULT_BUCKETS[-1])
    shapes = {option.split("_")[2]: shapes for option, shapes in options.items()}
    document = {
        "onnxruntime": options,
        "trtexec": [f"--{which}Shapes={shapes[which]}" for which in ("min", "opt", "max")],
    }
    write_json(document, path.with_name(path.name + PROFILE_ENDING))


def _warned(summary: QdqSummary) -> tuple[str, ...]:
    """Return a note with the linter's warnings, if there are any."""
    if not summary.warnings:
        return ()
    counts = Counter(finding.rule for finding in summary.warnings)
    return (f"linter: {', '.join(f'{rule} ×{count}' for rule, count in sorted(counts.items()))}",)


ONNX_INT8 = register(
    Pass(
        name="onnx-int8",
        summary="int8 QDQ ONNX graph with the integers of a ptq or qat artifact",
        config=OnnxInt8,
        accepts=frozenset({"quantized", "lowbit"}),
        yields="onnx-int8",
        apply=_apply,
        libraries=("torch", "onnx", "onnxscript"),
    )
)
