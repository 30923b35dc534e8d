"""Puts single layers of an ONNX graph into FP16: their weights are stored in it, with casts around their arithmetic.

CPU engines have no FP16 convolutions on x86. ONNX Runtime (1.31) casts back to FP32 and computes there. So does
OpenVINO (2026.4) when it is told to keep to FP32, as it is here. Then only the file becomes smaller. An execution with
FP16 kernels (CUDA, TensorRT) computes these layers in FP16.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from optimize.errors import PassError

_LAYERS = ("Conv", "Gemm", "MatMul")


def halve_layers(model: onnx.ModelProto, layers: Collection[str]) -> int:
    """Store and compute some float layers of a graph in FP16, in place.

    Args:
        model: as `export_onnx` wrote it. The name of a weight contains its layer's name.
        layers: names of convolutions and linear layers whose weights are float in it.

    Returns:
        The number of bytes saved.

    Raises:
        PassError: one of them is missing or not in float, or has a number beyond FP16's largest, 65504.
    """
    graph = model.graph
    floats = {tensor.name: tensor for tensor in graph.initializer if tensor.data_type == TensorProto.FLOAT}
    named = {
        f"{prefix}{layer}{fused}.weight": layer
        for layer in layers
        for prefix in ("", "module.")
        for fused in ("", ".0")
    }
    found: set[str] = set()
    nodes: list[onnx.NodeProto] = []
    saved = 0
    for node in graph.node:
        layer = named.get(node.input[1]) if node.op_type in _LAYERS and node.input[1] in floats else None
        if layer is None:
            nodes.append(node)
            continue
        found.add(layer)
        given, result = f"{node.output[0]}_given_half", f"{node.output[0]}_half"
        nodes.append(helper.make_node("Cast", [node.input[0]], [given], to=TensorProto.FLOAT16))
        last = helper.make_node("Cast", [result], [node.output[0]], to=TensorProto.FLOAT)
        node.input[0], node.output[0] = given, result
        for place, name in enumerate(node.input[1:], start=1):
            if name in floats:
                half, bytes_saved = _halved(floats[name], layer)
                if all(tensor.name != half.name for tensor in graph.initializer):
                    graph.initializer.append(half)
                    saved += bytes_saved
                node.input[place] = half.name
        nodes += [node, last]
    if missing := sorted(set(layers) - found):
        raise PassError(f"this graph has no layer {missing[0]!r} with float weights to store in FP16")
    del graph.node[:]
    graph.node.extend(nodes)
    return saved


def _halved(tensor: TensorProto, layer: str) -> tuple[TensorProto, int]:
    values = numpy_helper.to_array(tensor)
    largest = float(np.abs(values).max(initial=0.0))
    if largest > float(np.finfo(np.float16).max):
        raise PassError(f"{layer} holds {largest:.3g}, more than FP16's largest number, 65504")
    half = values.astype(np.float16)
    return numpy_helper.from_array(half, f"{tensor.name}_half"), values.nbytes - half.nbytes
