"""Finds sizes and types that do not fit, although `onnx.checker` (1.23) or ONNX Runtime's loader (1.31) accept them.

ONNX Runtime compares them when it runs a graph, or never.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from onnx import NodeProto, TensorProto

from optimize.lint.graph import Graph, attribute, label, printable

_PAIR = ("QuantizeLinear", "DequantizeLinear")
# By operator, the numbers of its inputs: image, weight, and bias if it has one.
_CONVOLUTIONS = {
    "Conv": (0, 1, 2),
    "ConvTranspose": (0, 1, 2),
    "QLinearConv": (0, 3, 8),
    "ConvInteger": (0, 1, None),
}
_POOLS = ("MaxPool", "AveragePool", "LpPool")
_LEAST_RANK = 3
# Kernels use 32 bits for sizes.
_MOST = 2**31 - 1
_MOST_NUMBERS = 2**48  # the address space of a processor, in bytes
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE, TensorProto.FLOAT8E8M0)


def misfits(graph: Graph) -> Iterator[str]:
    """Yield the reasons why a graph is invalid by ONNX's definition of its operators, one line for each fault.

    Convolutions and pools: groups, kernel, strides, padding, channels and bias must fit image and weight.
    QuantizeLinear and DequantizeLinear: scales are floats, one in all, one for each channel of the axis, or one for
    each block. Zero points have the type of the integers. Sizes that the file does not give are assumed to fit.
    """
    for name in graph.inputs:
        if math.prod(size or 1 for size in graph.shape(name) or ()) > _MOST_NUMBERS:
            yield f"the input {printable(name)}: its shape {list(graph.shape(name) or ())} is more than memory holds"
    for node in graph.of(*_CONVOLUTIONS, *_POOLS, *_PAIR):
        for said in _scales(graph, node) if node.op_type in _PAIR else _kernels(graph, node):
            yield f"{label(node)}: {printable(said)}"


def _kernels(graph: Graph, node: NodeProto) -> Iterator[str]:
    image_number, weight_number, bias_number = _CONVOLUTIONS.get(node.op_type, (0, None, None))
    image, kernel = _shape(graph, node, image_number), tuple(attribute(node, "kernel_shape", ()))
    weight = None
    if weight_number is not None:
        weight = _shape(graph, node, weight_number)
        if weight is None and node.op_type in ("Conv", "ConvTranspose"):
            weight = graph.kernel(node)
        if weight is not None and len(weight) < _LEAST_RANK:
            yield f"its weight {list(weight)} has {len(weight)} axes"
            return
    given = weight or image
    rank = len(given) - 2 if given is not None else len(kernel) or None
    if image is not None and rank is not None and len(image) != rank + 2:
        yield f"its image has {len(image)} axes, and its weight {rank + 2}"
    yield from _sizes(node, rank)
    if weight is None:
        return
    if 0 in weight:
        yield f"its weight {list(weight)} is empty"
    elif kernel and any(size not in (None, told) for told, size in zip(kernel, weight[2:], strict=False)):
        yield f"its kernel_shape is {list(kernel)}, and its weight is {list(weight)}"
    bias = None if bias_number is None else _shape(graph, node, bias_number)
    yield from _channels(node, weight, None if image is None or len(image) < 2 else image[1], bias)


def _sizes(node: NodeProto, rank: int | None) -> Iterator[str]:
    """Yield what is wrong with the sizes that a node gives for each axis of its kernel."""
    for name, sides, least in (("kernel_shape", 1, 1), ("strides", 1, 1), ("dilations", 1, 1), ("pads", 2, 0)):
        sizes = tuple(attribute(node, name, ()))
        wrong = rank is not None and len(sizes) not in (0, sides * rank)
        if wrong or any(not least <= size <= _MOST for size in sizes):
            yield f"its {name} is {list(sizes)[:8]}" + (f", and its kernel has {rank} axes" if wrong else "")


def _channels(
    node: NodeProto, weight: Sequence[int | None], channels: int | None, bias: Sequence[int | None] | None
) -> Iterator[str]:
    groups, (first, second) = attribute(node, "group", 1), weight[:2]
    if groups < 1:
        yield f"its group is {groups}"
        return
    transposed = node.op_type == "ConvTranspose"
    if first is not None and first % groups:
        yield f"its weight {list(weight)} has {first} channels along axis 0, and its group is {groups}"
        return
    read = first if transposed else _times(second, groups)
    if channels is not None and read is not None and channels != read:
        yield f"its image has {channels} channels, and its weight {list(weight)} in {groups} groups reads {read}"
    answers = _times(second, groups) if transposed else first
    if bias is not None and answers is not None and (len(bias) != 1 or bias[0] not in (None, answers)):
        yield f"its bias is {list(bias)}, and it gives {answers} channels"


def _scales(graph: Graph, node: NodeProto) -> Iterator[str]:
    scale, zero, data = (graph.tensor(node, number) for number in (1, 2, 0))
    if zero is not None and data is not None and node.op_type == "DequantizeLinear":
        kinds = [TensorProto.DataType.Name(tensor.data_type) for tensor in (data, zero)]
        if kinds[0] != kinds[1]:
            yield f"its integers are {kinds[0]}, and its zero-point is {kinds[1]}"
    if zero is not None and zero.data_type in (*_FLOATS[:4], TensorProto.STRING):
        yield f"its zero-point is {TensorProto.DataType.Name(zero.data_type)}"
    if scale is None:
        return
    if scale.data_type not in (*_FLOATS, TensorProto.INT32):  # ONNX also allows it, for 32-bit integers
        yield f"its scale is {TensorProto.DataType.Name(scale.data_type)}"
    sizes, shape = tuple(scale.dims), _shape(graph, node, 0)
    count = math.prod(sizes)
    if count == 0:
        yield f"its scale {list(sizes)} is empty"
    elif count > 1:
        yield from _along(node, sizes, shape)


def _along(node: NodeProto, sizes: tuple[int, ...], shape: tuple[int | None, ...] | None) -> Iterator[str]:
    """Yield what is wrong with several scales."""
    axis, block = attribute(node, "axis", 1), attribute(node, "block_size", 0)
    if shape is None:
        return
    if not -len(shape) <= axis < len(shape):
        yield f"it has {math.prod(sizes)} scales along axis {axis} of {len(shape)}"
    elif block > 0:
        wanted = list(shape)
        if (blocked := wanted[axis]) is not None:
            wanted[axis] = -(-blocked // block)
        if len(sizes) != len(shape) or any(size not in (None, told) for size, told in zip(wanted, sizes, strict=True)):
            yield f"its scales are {list(sizes)} for blocks of {block} along axis {axis} of {list(shape)}"
    elif len(sizes) > 1:
        yield f"its scales are {list(sizes)}, and have more than one axis"
    elif shape[axis] not in (None, sizes[0]):
        yield f"it has {sizes[0]} scales for the {shape[axis]} channels along axis {axis}"


def _shape(graph: Graph, node: NodeProto, number: int) -> tuple[int | None, ...] | None:
    return graph.shape(node.input[number]) if number < len(node.input) and node.input[number] else None


def _times(size: int | None, groups: int) -> int | None:
    return None if size is None else size * groups
