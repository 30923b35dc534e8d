"""``onnx-packed``: an int8 graph whose weights are stored in 4 or 2 bits where they fit, and run as int8."""

from __future__ import annotations

from pathlib import Path

import onnx
import torch
from pydantic import Field

from optimize.context import Context
from optimize.errors import NotApplicableError, PassError
from optimize.export.onnx_graph.pixel_input import graph_input
from optimize.export.onnx_graph.weight_packing import Smallest, pack_weights
from optimize.export.onnx_graph.write import run_onnx
from optimize.lint.base import lint
from optimize.passes.base import Pass, register
from optimize.quantization.gate import IMAGES
from optimize.quantization.lowbit.execution_kind import OF_FLOAT, of_packed
from optimize.quantization.lowering.qdq import LINTED
from optimize.store.artifact import Artifact, Product
from serve.common.config import Config
from serve.runtime.device.cpu_integers import TENSORRT
from serve.runtime.outputs import as_outputs


class OnnxPacked(Config):
    """Settings of ``onnx-packed``."""

    smallest: Smallest = Field(
        default="int4",
        description="smallest type for stored weights; int2 (ternary, binary and 2-bit weights) needs engines that "
        "read ONNX opset 25",
    )


def _apply(parent: Artifact, config: OnnxPacked, context: Context, folder: Path) -> Product:
    if parent.card.target == TENSORRT:
        raise NotApplicableError(
            "onnx-packed is for graphs for CPUs: TensorRT reads int8 weights from its own quantizers"
        )
    model = onnx.load(str(parent.path))
    packed = pack_weights(model, config.smallest)
    if set(packed.weights) <= {8}:
        raise NotApplicableError(
            "no weight of this graph fits into 4 bits; use ptq-lowbit or qat-lowbit with at most 4 weight_bits "
            "(dorefa at most 3, ttq never fits)"
        )
    path = folder / parent.card.file
    onnx.checker.check_model(packed.model, full_check=True)
    onnx.save(packed.model, str(path))
    found = {finding.rule for finding in lint(packed.model, LINTED[str(parent.card.target)])}
    if worse := found - {finding.rule for finding in lint(model, LINTED[str(parent.card.target)])}:
        raise PassError(f"packed graph: the linter reports new findings: {', '.join(sorted(worse))}")
    images = graph_input(context, "uint8" if parent.card.input_dtype == "uint8" else "float", IMAGES)
    before, after = as_outputs(run_onnx(parent.path, images)), as_outputs(run_onnx(path, images))
    if not all(map(torch.equal, before, after)):
        largest = max(float((one - other).abs().max()) for one, other in zip(before, after, strict=True))
        raise PassError(f"packed graph: outputs differ by up to {largest:.2e} for the same integers")
    stored = ", ".join(f"{count} in int{bits}" for bits, count in packed.weights.items())
    size, was = path.stat().st_size, parent.path.stat().st_size
    return Product(
        path.name,
        "onnx",
        precision=of_packed(parent.card.precision),
        device=parent.card.device,
        input_dtype=parent.card.input_dtype,
        target=parent.card.target,
        notes=(
            f"packed: weights are stored in fewer bits ({stored}: {packed.after} bytes, {packed.before} as int8), cast "
            f"to int8 when the file is loaded, and computed by int8 kernels, no faster than int8; {size / was:.2f} of "
            f"the file's bytes before, equal logits in ONNX Runtime",
            *(note for note in parent.card.notes if not note.endswith(OF_FLOAT)),  # the size of the parent's file
        ),
    )


ONNX_PACKED = register(
    Pass(
        name="onnx-packed",
        summary="int8 ONNX graph that stores low-bit weights in 4 or 2 bits and runs as int8",
        config=OnnxPacked,
        accepts=frozenset({"onnx-int8"}),
        yields="onnx-int8",
        apply=_apply,
        libraries=("torch", "onnx"),
    )
)
