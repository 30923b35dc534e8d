"""Stores int8 weights of an ONNX graph in 4 or 2 bits where their integers fit. They are cast to int8 on loading.

The loader computes ``Cast(INT4 or INT2 → INT8)`` of a constant once. The result is the original graph: the same
integers, scales and kernels. ONNX has these types since opsets 21 and 25.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, version_converter

#: Smallest type that weights may be stored in.
Smallest = Literal["int4", "int2"]

#: Bits, type, and the opset and file format version that introduced it. The smallest type is first.
_TYPES: Final = ((2, TensorProto.INT2, 25, 13), (4, TensorProto.INT4, 21, 10))


@dataclass(frozen=True)
class Packed:
    """A graph whose weights are stored in as few bits as possible.

    Attributes:
        model: the graph.
        weights: number of weights by bits, 8 included.
        before: bytes of the weights as int8.
        after: bytes of the weights as stored.
    """

    model: onnx.ModelProto
    weights: dict[int, int]
    before: int
    after: int


def pack_weights(model: onnx.ModelProto, smallest: Smallest = "int4") -> Packed:
    """Store each int8 weight behind a DequantizeLinear in the smallest type that holds its integers.

    Args:
        model: with its initializers. It is not changed.
        smallest: the smallest allowed type.
    """
    types = [kind for kind in _TYPES if kind[0] >= int(smallest.removeprefix("int"))]
    read = {node.input[0] for node in model.graph.node if node.op_type == "DequantizeLinear"}
    chosen = {
        tensor.name: next((kind for kind in types if _fits(tensor, kind[0])), None)
        for tensor in model.graph.initializer
        if tensor.name in read and tensor.data_type == TensorProto.INT8
    }
    needed = max((kind[2] for kind in chosen.values() if kind is not None), default=0)
    packed = _at_opset(model, needed)
    casts, weights = [], dict.fromkeys((2, 4, 8), 0)
    before = after = 0
    for tensor in packed.graph.initializer:
        if tensor.name not in chosen:
            continue
        kind, name = chosen[tensor.name], tensor.name
        weights[kind[0] if kind else 8] += 1
        before += len(tensor.raw_data)
        if kind is not None:
            integers = numpy_helper.to_array(tensor)
            small = helper.make_tensor(f"{name}_int{kind[0]}", kind[1], integers.shape, _bytes(integers, kind[0]), True)
            tensor.CopyFrom(small)
            casts.append(helper.make_node("Cast", [tensor.name], [name], name=f"{name}_cast", to=TensorProto.INT8))
            packed.ir_version = max(packed.ir_version, kind[3])
        after += len(tensor.raw_data)
    nodes = [*casts, *packed.graph.node]
    del packed.graph.node[:]
    packed.graph.node.extend(nodes)
    return Packed(packed, {bits: count for bits, count in weights.items() if count}, before, after)


def _fits(tensor: TensorProto, bits: int) -> bool:
    """Tell whether all integers are in the range of a number of bits, and there is at least one."""
    integers = numpy_helper.to_array(tensor)
    half = 1 << (bits - 1)
    return integers.size > 0 and bool(-half <= integers.min() and integers.max() < half)


def _bytes(integers: np.ndarray[tuple[int, ...], np.dtype[np.int8]], bits: int) -> bytes:
    """Pack two's complement integers as a tensor stores them: the first one in a byte's lowest bits."""
    places = 8 // bits
    values = integers.reshape(-1).astype(np.uint8) & ((1 << bits) - 1)
    values = np.concatenate([values, np.zeros(-len(values) % places, np.uint8)]).reshape(-1, places)
    shifted = values << (np.arange(places, dtype=np.uint8) * bits)
    return bytes(np.bitwise_or.reduce(shifted, axis=1).astype(np.uint8))


def _at_opset(model: onnx.ModelProto, least: int) -> onnx.ModelProto:
    """Return a copy of the graph, converted to an opset if it has an older one."""
    own = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    if own < least:
        converted: onnx.ModelProto = version_converter.convert_version(model, least)
        # It adds the shapes of all inner tensors (onnx 1.23), which no engine needs.
        del converted.graph.value_info[:]
        converted.graph.value_info.extend(model.graph.value_info)
        return converted
    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    return copied
