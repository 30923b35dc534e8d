"""Clamps activation ranges that are narrower than their type. Torch's packed kernels and its exporter do not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from optimize.quantization.graph.explicit_quantizers import quantizers

_ATEN = torch.ops.aten
#: The range of each integer type that torch.ao produces here.
_FULL_RANGE = {torch.uint8: (0, 255), torch.int8: (-128, 127)}
#: The largest integer of ``quint8``.
_LARGEST = 255


@dataclass(frozen=True)
class NarrowRange:
    """An activation quantizer whose integers stay within ``[low, high]``, less than their type holds."""

    scale: float
    zero_point: int
    low: int
    high: int


class _Quantized(fx.Interpreter):
    """Records ``(scale, zero point)`` of each node's value, if it is a quantized tensor."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.parameters: dict[fx.Node, tuple[float, int]] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, torch.Tensor) and value.is_quantized and value.qscheme() == torch.per_tensor_affine:
            self.parameters[n] = (value.q_scale(), value.q_zero_point())
        return value


def quantized_parameters(converted: fx.GraphModule, example: torch.Tensor) -> dict[fx.Node, tuple[float, int]]:
    """Return scale and zero point of each node of a packed model that gives a tensor quantized with one scale.

    Args:
        converted: the packed model.
        example: an input, ``float32 (N, C, H, W)``.
    """
    seen = _Quantized(converted)
    with torch.no_grad():
        seen.run(example.clone())  # a network may change its images in place
    return seen.parameters


def clamp_packed(converted: fx.GraphModule, reference: fx.Graph, example: torch.Tensor) -> int:
    """Clamp the results of packed kernels to the ranges for which they were quantized, in place.

    Torch's kernels (2.11 to 2.14) use all 8 bits whatever the range. An activation beyond the calibrated range becomes
    an integer that the reference form and the ONNX graph do not have.

    Args:
        converted: the packed model.
        reference: the graph of its reference form, which has the ranges.
        example: an input, ``float32 (N, C, H, W)``.

    Returns:
        The number of clamps inserted: none if all ranges are those of the type.
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
        if not most:  # a fixed range, such as a sigmoid's, uses all integers of the type
            continue
        with converted.graph.inserting_after(node):
            clamped = converted.graph.call_function(torch.clamp, (node,), {"max": (most[0] - zero_point) * scale})
        node.replace_all_uses_with(clamped, lambda user, own=clamped: user is not own)
        clamps += 1
    converted.recompile()
    return clamps


def _computes(module: fx.GraphModule, node: fx.Node) -> bool:
    """Tell whether a node makes new integers, and does not only pass on its input."""
    if node.op == "call_module":
        return hasattr(module.get_submodule(str(node.target)), "zero_point")
    kernel = getattr(node.target, "__module__", "") == "torch._ops.quantized"
    return node.op == "call_function" and (kernel or node.target is torch.quantize_per_tensor)


def clamp_explicit(module: fx.GraphModule) -> list[NarrowRange]:
    """Write a clamp for each activation range that is narrower than its integer type, and return these ranges.

    For uint8 the clamp is in integers behind the quantizer. In front of it, a float Clip would separate layer and
    quantizer, and ONNX Runtime (1.31) would compute the layer in float. OpenVINO (2026.4) fuses it with the layer in
    either place.
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
