"""Rewrites the quantizer behind an image's normalisation so that OpenVINO does not skip it.

OpenVINO (2026.4.1, its pass ``EliminateFakeQuantize``) removes a quantizer that maps every pixel to within half a step
of itself. The first layer then reads the pixels. Every pixel that the quantizer would have rounded to the next integer
is a step off. This happens where all channels are normalised alike and images use the whole range, for example with 0.5
as mean and standard deviation. In a small network 9 % of the first layer's integers were up to 3 steps off, and 2.5 %
of its answers differed. The pass recognises pixels behind one cast, but not behind two.
"""

from __future__ import annotations

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

_PIXELS = np.arange(256, dtype=np.float32)
#: Largest distance of a pixel from its integer for OpenVINO to remove the quantizer, doubled. OpenVINO compares with
#: its own roundings of scale and shift.
_NEAR = 1.0


def keep_rounding(model: onnx.ModelProto) -> bool:
    """Cast the pixels of such a graph to int32 first, in place. No number changes.

    Args:
        model: for CPUs. It normalises pixels as `optimize.export.onnx_graph.pixel_input.FromPixels` does.

    Returns:
        Whether the graph was changed.
    """
    graph = model.graph
    pixels = graph.input[0].name
    casts = [node for node in graph.node if node.op_type == "Cast" and node.input[0] == pixels]
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    if len(casts) != 1 or not _nearly_pixels(graph, casts[0], constants):
        return False
    (cast,) = casts
    name = f"{pixels}_int32"
    graph.node.insert(
        list(graph.node).index(cast), helper.make_node("Cast", [pixels], [name], name=name, to=TensorProto.INT32)
    )
    cast.input[0] = name
    return True


def cast_first(model: onnx.ModelProto) -> None:
    """Make nodes that read the shape of integer pixels read the shape of their float copy, in place.

    TensorRT (10 and 11) can only cast ``uint8``.

    Args:
        model: any graph. A graph with float input stays unchanged.
    """
    graph = model.graph
    pixels = graph.input[0].name
    casts = [node for node in graph.node if node.op_type == "Cast" and node.input[0] == pixels]
    shapes = [node for node in graph.node if node.op_type == "Shape" and node.input[0] == pixels]
    if not casts or not shapes:
        return
    for node in shapes:
        node.input[0] = casts[0].output[0]
    cast = onnx.NodeProto()
    cast.CopyFrom(casts[0])
    graph.node.remove(casts[0])
    graph.node.insert(0, cast)


def _nearly_pixels(graph: onnx.GraphProto, cast: onnx.NodeProto, constants: dict[str, NDArray[np.generic]]) -> bool:
    """Tell whether the quantizer's integers are nearly the pixels, but not all equal to them."""
    read, chain = cast.output[0], []
    for kind in ("Mul", "Sub", "QuantizeLinear"):
        node = next((node for node in graph.node if node.op_type == kind and node.input[0] == read), None)
        if node is None or any(name not in constants for name in node.input[1:]):
            return False
        chain.append([constants[name] for name in node.input[1:]])
        read = node.output[0]
    (factor,), (shift,), (scale, zero_point) = chain
    if zero_point.dtype != np.uint8 or np.size(scale) != 1:
        return False
    by_channel = _PIXELS[:, None] * factor.astype(np.float32).reshape(1, -1) - shift.astype(np.float32).reshape(1, -1)
    place = by_channel / np.float32(scale) + np.float32(zero_point)
    ends = np.abs(place[[0, -1]] - _PIXELS[[0, -1], None]).max()
    return bool(ends <= _NEAR and (place.round().clip(0, 255) != _PIXELS[:, None]).any())
