"""Keeps float layers of an int8 graph in float in ONNX Runtime, too.

Its optimizer ``WeightBiasQuantization`` (onnxruntime 22969, merged in January 2025; seen in 1.31) silently quantizes
the float weight of a convolution or Gemm between a DequantizeLinear and a QuantizeLinear. It uses one scale for the
whole tensor. It cannot be switched off, because it also writes the integer biases that every int8 kernel needs. It
skips layers whose input is dequantized with a scale for each channel. So these layers get such an input, with equal
scales.
"""

from __future__ import annotations

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper


def keep_in_float(model: onnx.ModelProto) -> int:
    """Give each layer with float weights an input that is dequantized per channel, in place. No number changes.

    Args:
        model: a graph with QuantizeLinear and DequantizeLinear, for CPUs. TensorRT needs one scale for activations. Its
            provider runs without that optimizer.

    Returns:
        The number of layers that got such an input.
    """
    graph = model.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    dequantizers = {node.output[0]: node for node in graph.node if node.op_type == "DequantizeLinear"}
    nodes: list[onnx.NodeProto] = []
    written: set[str] = set()
    kept = 0
    for node in graph.node:
        channels = _channels(node, constants)
        before = dequantizers.get(node.input[0]) if channels is not None else None
        if channels is not None and before is not None and _one_scale(before, constants):
            name = f"{before.output[0]}_by_channel"
            if name not in written:
                inputs = [before.input[0]]
                for place, constant in enumerate(before.input[1:], start=1):
                    repeated = f"{name}_{place}"
                    value = numpy_helper.to_array(constants[constant])
                    graph.initializer.append(numpy_helper.from_array(_repeated(value, channels), repeated))
                    inputs.append(repeated)
                nodes.append(helper.make_node("DequantizeLinear", inputs, [name], name=name, axis=1))
                written.add(name)
            node.input[0] = name
            kept += 1
        nodes.append(node)
    if kept:
        read = {name for node in nodes for name in node.input} | {output.name for output in graph.output}
        del graph.node[:]
        graph.node.extend(node for node in nodes if node.op_type != "DequantizeLinear" or node.output[0] in read)
    return kept


def _channels(node: onnx.NodeProto, constants: dict[str, TensorProto]) -> int | None:
    """Return the input channels of a layer with float weights, or None for other nodes."""
    if node.op_type not in ("Conv", "ConvTranspose", "Gemm") or node.input[1] not in constants:
        return None
    weight = constants[node.input[1]]
    if weight.data_type not in (TensorProto.FLOAT, TensorProto.FLOAT16):
        return None
    settings: dict[str, int] = {attribute.name: attribute.i for attribute in node.attribute}
    if node.op_type == "Conv":
        return int(weight.dims[1]) * settings.get("group", 1)
    if node.op_type == "ConvTranspose":
        return int(weight.dims[0])
    return None if settings.get("transA") else int(weight.dims[1] if settings.get("transB") else weight.dims[0])


def _one_scale(dequantizer: onnx.NodeProto, constants: dict[str, TensorProto]) -> bool:
    return all(name in constants and np.prod(constants[name].dims) == 1 for name in dequantizer.input[1:])


def _repeated(value: NDArray[np.generic], times: int) -> NDArray[np.generic]:
    return np.repeat(value.reshape(1), times)
