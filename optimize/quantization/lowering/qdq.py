"""Lowering of a quantized FX model to an ONNX graph with explicit QuantizeLinear/DequantizeLinear.

Torch cannot export a converted (packed) model: ``torch.onnx.export`` fails on its packed parameters. It can export the
*reference decomposed* form, which has float operators between explicit quantize and dequantize operators. That route
has two faults. Both are fixed here on torch's graph, with torch's own arithmetic:

- Weights would be written as float initializers behind QuantizeLinear. They are folded to exactly the integers that
  torch computes. ONNX divides by the scale where torch multiplies by its inverse, so folding on the ONNX side could
  round a tie the other way.
- The exporter ignores ``quant_min``/``quant_max`` of activations (onnxscript PR 3052). A range that is narrower than
  its type gets an explicit clamp.

`verify` then checks the graph by the linter's rules for the target, and counts its quantizers against torch's. A pair
that only dequantizes and quantizes again with the same scale is removed. Such pairs surround a former dropout.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import fx, nn

from optimize.errors import PassError
from optimize.export.onnx_graph.write import export_onnx
from optimize.lint.base import Finding, LintTarget, lint
from optimize.quantization.graph.explicit_quantizers import quantizers, quantizing
from optimize.quantization.graph.torchao_memory import forgotten
from optimize.quantization.lowering.folded_weights import drop_unused_tensors
from optimize.quantization.lowering.lowered_table import EXPLICIT, LOWERED, REQUANTIZED, Lowering
from optimize.quantization.lowering.narrow_ranges import NarrowRange
from optimize.quantization.targets import Target
from optimize.tracing.aten_program import program_of, required_program
from optimize.tracing.constants import constant_value
from serve.runtime.card.card import LOGITS
from serve.runtime.device.cpu_integers import ANY_X86, TENSORRT, VNNI_X86

#: The linter's name of each target.
LINTED: dict[str, LintTarget] = {VNNI_X86: "cpu", ANY_X86: "x86", TENSORRT: "tensorrt"}


@dataclass(frozen=True)
class QdqSummary:
    """What `verify` found in a graph.

    Attributes:
        activations: number of activation quantizers.
        weights: number of different int8 weights.
        float_bytes: bytes of weights left in float.
        warnings: the linter's warnings. They are advice, not errors.
    """

    activations: int
    weights: int
    float_bytes: int
    warnings: tuple[Finding, ...] = ()


def reference_form(prepared: fx.GraphModule, example: torch.Tensor, backend_config: Any) -> fx.GraphModule:
    """Return the reference decomposed form of a calibrated or QAT-trained FX model, with weights folded to int8.

    Args:
        prepared: the observed or fake-quantized model, in eval mode. It is not changed.
        example: an input ``(N, C, H, W)``. N becomes dynamic.
        backend_config: the one that the model was prepared with.
    """
    # Private in torch 2.11 to 2.14, and the only form whose Q/DQ survive an export:
    # convert_to_reference_fx leaves `call_method dequantize`, which the exporter cannot translate.
    from torch.ao.quantization.quantize_fx import _convert_to_reference_decomposed_fx

    with forgotten(prepared):
        return explicit_form(
            _convert_to_reference_decomposed_fx(copy.deepcopy(prepared), backend_config=backend_config), example
        )


def explicit_form(module: nn.Module, example: torch.Tensor) -> fx.GraphModule:
    """Return the reference form of a network with explicit quantizers, from any front end.

    Args:
        module: with ``quantized_decomposed`` operators around float ones. Weights are floats behind their quantizers.
        example: an input ``(N, C, H, W)``. N becomes dynamic.

    Returns:
        Its program, with weights folded to int8, and without pairs that change no integer.
    """
    module = required_program(module, example).module()
    assert isinstance(module, fx.GraphModule)
    EXPLICIT.run(module, None)
    drop_unused_tensors(module)
    return module


def reference_program(form: fx.GraphModule, example: torch.Tensor) -> torch.export.ExportedProgram:
    """A reference form (see `reference_form`) as a program; tensors that nothing reads any more are left out."""
    drop_unused_tensors(form)
    return program_of(form, example)


def lower(
    program: torch.export.ExportedProgram,
    example: torch.Tensor,
    path: Path,
    target: Target,
    entered: Callable[[nn.Module], nn.Module] = lambda module: module,
    *,
    exact_sums: bool = False,
    outputs: Sequence[str] = (LOGITS,),
) -> QdqSummary:
    """Write a reference program (see `reference_program`) as a QDQ ONNX file and check it.

    Args:
        program: the program to write.
        example: an input of the graph, ``(N, C, H, W)`` with N >= 2.
        path: the file.
        target: the target of the program's integers.
        entered: adds the steps from the graph's input to the program's input, which is normalised float32. They stay in
            float: they get no quantizer, and are not folded into one.
        exact_sums: whether residual sums are kept apart from the layers that compute their addends. CPU targets only.
        outputs: names of the network's outputs.

    Raises:
        PassError: the written graph does not match the quantized program.
    """
    given = Lowering(target, exact_sums)
    module, expected = rewritten(program, given)
    export_onnx(entered(module), example, path, target.opset, outputs=outputs)
    return verify(
        onnx.load(path),
        LINTED[target.name],
        activations=expected,
        weights=len(_distinct_weights(module)),
        clamps=given.clamps,
    )


def rewritten(program: torch.export.ExportedProgram, given: Lowering) -> tuple[fx.GraphModule, int]:
    """Return a reference program as the exporter takes it, and its number of quantized activation tensors.

    Args:
        program: see `reference_program`.
        given: names the target, and holds the notes that the rewrites pass to each other.
    """
    module = program.module()
    assert isinstance(module, fx.GraphModule)
    REQUANTIZED.run(module, given)
    expected = sum(quantizing(node) == "quantize_per_tensor" for node in module.graph.nodes)
    LOWERED.run(module, given)
    return module, expected


def verify(
    model: onnx.ModelProto,
    target: LintTarget,
    *,
    activations: int,
    weights: int,
    clamps: Sequence[NarrowRange] = (),
) -> QdqSummary:
    """Check that a QDQ graph has the quantizers that it should, and that the linter finds no error in it.

    Args:
        model: the graph, with its initializers.
        target: the linter's name of the target.
        activations: number of activation tensors that torch quantizes.
        weights: number of different weights that torch quantizes per channel. The exporter writes equal ones once.
        clamps: the activation ranges that are narrower than their integer type. A Clip of the quantizer's integers
            counts. So does a Clip before the quantizer whose bounds become integers within the range. The Clip of a
            ReLU6 may be too wide.

    Raises:
        PassError: a quantizer or a clamp was lost, nothing is quantized (a silently float graph), a weight is no int8
            initializer, or the linter has an error.
    """
    findings = lint(model, target)
    # Clamps are checked below, where it is known which ones are needed.
    wrong = [finding for finding in findings if finding.severity == "error" and finding.rule != "lost-clamp"]
    if errors := [*wrong, *(finding for finding in findings if finding.rule == "unfolded-weight")]:
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise PassError(f"QDQ graph: {errors[0].node}: {errors[0].said}{more}")
    graph = model.graph
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    constants = initializers | {
        node.output[0]: node.attribute[0].t
        for node in graph.node
        if node.op_type == "Constant" and node.attribute[0].name == "value"
    }
    producers = {output: node for node in graph.node for output in node.output}
    quantizers = [node for node in graph.node if node.op_type == "QuantizeLinear"]
    folded_weights: set[bytes] = set()
    for node in graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] in initializers:
            kind = initializers[node.input[0]].data_type
            if kind != onnx.TensorProto.INT8:
                raise PassError(
                    f"QDQ graph: weight {node.input[0]} is {onnx.TensorProto.DataType.Name(kind)}, not INT8"
                )
            values = (initializers[node.input[0]], constants[node.input[1]])
            folded_weights.add(b"".join(onnx.numpy_helper.to_array(value).tobytes() for value in values))
    if len(quantizers) != activations or len(folded_weights) != weights:
        raise PassError(
            f"QDQ graph: {len(quantizers)} activation and {len(folded_weights)} weight quantizers came out of the "
            f"export, but torch has {activations} and {weights}"
        )
    takers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in dict.fromkeys(node.input):
            takers.setdefault(name, []).append(node)
    clamped = sum(
        _clamped(node, producers.get(node.input[0]), takers.get(node.output[0], []), constants, clamps)
        for node in quantizers
    )
    if clamped < len(clamps):
        raise PassError(f"QDQ graph: {len(clamps)} activation ranges need a clamp, only {clamped} have one")
    if not folded_weights:
        raise PassError("QDQ graph: nothing is quantized: this is a float graph")
    left = sum(
        onnx.numpy_helper.to_array(tensor).nbytes
        for tensor in graph.initializer
        if tensor.data_type == onnx.TensorProto.FLOAT
    )
    return QdqSummary(len(quantizers), len(folded_weights), left, findings)


def _clamped(
    quantizer: onnx.NodeProto,
    before: onnx.NodeProto | None,
    behind: Sequence[onnx.NodeProto],
    constants: Mapping[str, onnx.TensorProto],
    ranges: Sequence[NarrowRange],
) -> bool:
    """Tell whether a Clip before or behind a quantizer keeps it within its range.

    The quantizer must be one of ``ranges``.
    """
    in_integers = len(behind) == 1 and behind[0].op_type == "Clip"
    clip = behind[0] if in_integers else before
    if clip is None or clip.op_type != "Clip" or len(clip.input) < 3:
        return False
    values = [constants.get(name) for name in (*quantizer.input[1:3], *clip.input[1:3])]
    if any(value is None for value in values):
        return False
    scale, zero_point, *bounds = (float(onnx.numpy_helper.to_array(value)) for value in values if value is not None)
    integers = np.asarray(bounds) if in_integers else np.rint(np.asarray(bounds) / scale) + zero_point
    ends = np.iinfo(onnx.helper.tensor_dtype_to_np_dtype(constants[quantizer.input[2]].data_type))
    integers = integers.clip(ends.min, ends.max)  # an infinite bound becomes the end of the type
    return any(
        range_.zero_point == zero_point
        and math.isclose(range_.scale, scale, rel_tol=1e-6)
        and range_.low <= integers[0]
        and integers[1] <= range_.high
        for range_ in ranges
    )


def quantized_weights(program: torch.export.ExportedProgram) -> int:
    """Return the number of weights that a reference program dequantizes."""
    return sum(quantizing(node) == "dequantize_per_channel" for node in program.graph.nodes)


def _distinct_weights(module: fx.GraphModule) -> set[bytes]:
    """Return integers and scales of each int8 weight. A layer that is called twice counts once."""
    found = set()
    for node in quantizers(module, "dequantize_per_channel"):
        values = [constant_value(module, argument) for argument in node.args[:2]]
        found.add(b"".join(value.detach().numpy().tobytes() for value in values))
    return found
