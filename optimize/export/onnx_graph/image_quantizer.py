"""The quantizer of an image, behind its normalisation: written so that OpenVINO rounds as it says.

OpenVINO (2026.4.1, its pass ``EliminateFakeQuantize``) leaves a quantizer out that gives every pixel within half a step
of itself: the first layer then reads the pixels, and every pixel that the quantizer would have rounded to the next
integer is a step off. So it is where all channels are normalised alike and images use the whole range, such as a mean
and a standard deviation of 0.5: 9 % of the first layer's integers of a small network were up to 3 steps off, and 2.5 %
of its answers others. It looks for pixels behind one cast, and finds none behind two.
"""

from __future__ import annotations

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

_PIXELS = np.arange(256, dtype=np.float32)
#: How far from a pixel its integer may be for OpenVINO to leave the quantizer out, and as much again: it compares with
#: its own roundings of scale and shift.
_NEAR = 1.0


def keep_rounding(model: onnx.ModelProto) -> bool:
    """Cast the pixels of such a graph to int32 first, in place; no number changes.

    Args:
        model: for CPUs; it normalises pixels as `optimize.export.onnx_graph.pixel_input.FromPixels` does.

    Returns:
        Whether it is one.
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
    """Let what asks for the shape of integer pixels ask for that of their floats, in place.

    TensorRT (10 and 11) only casts ``uint8``.

    Args:
        model: any graph; one of floats stays as it is.
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
    """Whether the quantizer's integers are nearly the pixels, but not all the same."""
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
