"""Activation ranges narrower than their type: the clamp that torch's packed kernels and its exporter leave out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from optimize.quantization.graph.explicit_quantizers import quantizers

_ATEN = torch.ops.aten
#: The type range of each integer type that torch.ao produces here.
_FULL_RANGE = {torch.uint8: (0, 255), torch.int8: (-128, 127)}
#: The largest integer of ``quint8``.
_LARGEST = 255


@dataclass(frozen=True)
class NarrowRange:
    """An activation quantizer whose integers keep to ``[low, high]``, less than their type holds."""

    scale: float
    zero_point: int
    low: int
    high: int


class _Quantized(fx.Interpreter):
    """Notes ``(scale, zero point)`` of what each node gives, where that is a quantized tensor."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.parameters: dict[fx.Node, tuple[float, int]] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, torch.Tensor) and value.is_quantized and value.qscheme() == torch.per_tensor_affine:
            self.parameters[n] = (value.q_scale(), value.q_zero_point())
        return value


def quantized_parameters(converted: fx.GraphModule, example: torch.Tensor) -> dict[fx.Node, tuple[float, int]]:
    """Scale and zero-point of what each node of a packed model gives, of those that give a quantized tensor with one.

    Args:
        converted: the packed model.
        example: ``float32 (N, C, H, W)``.
    """
    seen = _Quantized(converted)
    with torch.no_grad():
        seen.run(example.clone())  # a network may change its images in place
    return seen.parameters


def clamp_packed(converted: fx.GraphModule, reference: fx.Graph, example: torch.Tensor) -> int:
    """Clamp what packed kernels give to the range that it was quantized for, in place.

    torch's kernels (2.11 to 2.14) write all 8 bits whatever the range: an activation beyond what calibration saw
    becomes an integer beyond it, which the reference form and the ONNX graph do not have.

    Args:
        converted: the packed model.
        reference: that of its reference form, which knows the ranges.
        example: ``float32 (N, C, H, W)``.

    Returns:
        How many clamps were put in: none where all ranges are those of the type.
    """
    narrow = {
        (node.args[1], node.args[2]): node.args[4]
        for node in reference.nodes
        if str(node.target).startswith("quantized_decomposed.quantize_per_tensor") and node.args[4] < _LARGEST
    }
    if not narrow:
        return 0
    parameters = quantized_parameters(converted, example)
    clamps = 0
    for node in list(converted.graph.nodes):
        if node not in parameters or not _computes(converted, node):
            continue
        scale, zero_point = parameters[node]
        most = [high for (s, z), high in narrow.items() if z == zero_point and math.isclose(s, scale, rel_tol=1e-6)]
        if not most:  # a range that is known, as a sigmoid's, has all the type's integers
            continue
        with converted.graph.inserting_after(node):
            clamped = converted.graph.call_function(torch.clamp, (node,), {"max": (most[0] - zero_point) * scale})
        node.replace_all_uses_with(clamped, lambda user, own=clamped: user is not own)
        clamps += 1
    converted.recompile()
    return clamps


def _computes(module: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a node makes integers of its own, and does not only pass on those it is given."""
    if node.op == "call_module":
        return hasattr(module.get_submodule(str(node.target)), "zero_point")
    kernel = getattr(node.target, "__module__", "") == "torch._ops.quantized"
    return node.op == "call_function" and (kernel or node.target is torch.quantize_per_tensor)


def clamp_explicit(module: fx.GraphModule) -> list[NarrowRange]:
    """Write the clamp of each activation range that is narrower than its integer type; returns them.

    Of uint8, it is computed in integers behind the quantizer: in front of it, a float Clip would keep ONNX Runtime
    (1.31) from seeing layer and quantizer side by side, and it would compute the layer in float. OpenVINO (2026.4)
    makes it part of the layer in either place.
    """
    clamps = []
    for node in quantizers(module, "quantize_per_tensor"):
        value, scale, zero_point, low, high, dtype = node.args
        assert isinstance(scale, float)
        assert isinstance(zero_point, int)
        assert isinstance(low, int)
        assert isinstance(high, int)
        assert isinstance(dtype, torch.dtype)
        if (low, high) == _FULL_RANGE[dtype]:
            continue
        if dtype is torch.uint8:
            readers = list(node.users)
            with module.graph.inserting_after(node):
                clamped = module.graph.call_function(_ATEN.clamp.default, (node, low, high))
            for reader in readers:
                reader.replace_input_with(node, clamped)
        else:
            with module.graph.inserting_before(node):
                bounds = ((low - zero_point) * scale, (high - zero_point) * scale)
                value = module.graph.call_function(_ATEN.clamp.default, (value, *bounds))
        node.args = (value, scale, zero_point, *_FULL_RANGE[dtype], dtype)
        clamps.append(NarrowRange(scale, zero_point, low, high))
    module.recompile()
    return clamps
