"""Checks shape, type and data of tensors from an untrusted file before anything reads them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from google.protobuf.message import Message
from numpy.typing import NDArray
from onnx import TensorProto, external_data_helper, helper, numpy_helper

from serve.runtime.errors import UserError, one_line

# NumPy's limit (2.4).
_MOST_AXES = 64
# Bits of a number in `raw_data`.
_BITS: dict[int, int] = {
    **dict.fromkeys((TensorProto.UINT2, TensorProto.INT2), 2),
    **dict.fromkeys((TensorProto.UINT4, TensorProto.INT4, TensorProto.FLOAT4E2M1), 4),
    **dict.fromkeys((TensorProto.FLOAT6E2M3, TensorProto.FLOAT6E3M2), 6),
}
# ONNX messages that contain tensors at any depth.
_HOLDERS = frozenset(
    f"onnx.{name}Proto" for name in ("Model", "Graph", "Node", "Attribute", "SparseTensor", "Function", "TrainingInfo")
)
_NO_NUMBERS = frozenset({TensorProto.STRING, TensorProto.COMPLEX64, TensorProto.COMPLEX128})


def tensors(message: Message) -> Iterator[TensorProto]:
    """Yield all tensors of a model, a graph or a node, also those of attributes, inner graphs and functions.

    Raises:
        UserError: a name is not UTF-8. Protobuf (7.36) returns it as bytes.
    """
    waiting = [message]
    while waiting:
        for field, value in waiting.pop().ListFields():
            kind = field.message_type.full_name if field.message_type is not None else ""
            entries = value if field.is_repeated else (value,)
            if field.type == field.TYPE_STRING:
                if wrong := next((entry for entry in entries if not isinstance(entry, str)), None):
                    raise UserError(f"the {field.full_name} {wrong[:200]!r} is not UTF-8: the file is damaged")
            elif kind == "onnx.TensorProto":
                yield from entries
            elif kind in _HOLDERS:
                waiting.extend(entries)


def check_tensor(tensor: TensorProto) -> None:
    """Check that a tensor has an ONNX type, a shape, and the matching amount of data. No file is read.

    `onnx.checker` (1.23) accepts unknown types, and data that is longer than the shape says.

    Raises:
        UserError: names the tensor, and what is wrong with it.
    """
    if not isinstance(tensor.name, str):
        raise UserError(f"the name of the tensor {tensor.name[:200]!r} is not UTF-8: the file is damaged")
    if trouble := _trouble(tensor):
        raise _damaged(tensor, trouble)


def size_of(tensor: TensorProto) -> int:
    """Return the bytes of a tensor's data by shape and type. `check_tensor` must have accepted it."""
    count: int = math.prod(tensor.dims)
    bits = _BITS.get(tensor.data_type) or 8 * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    return -(-count * int(bits) // 8)


def values_of(tensor: TensorProto) -> NDArray[Any]:
    """Return the values of a tensor.

    Raises:
        UserError: it cannot be read, or its data is in a file that was not loaded.
    """
    if external_data_helper.uses_external_data(tensor):
        raise _damaged(tensor, "its data is in another file, which was not loaded")
    check_tensor(tensor)
    try:
        return numpy_helper.to_array(tensor)
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(tensor, one_line(error)) from None


def has_numbers(tensor: TensorProto) -> bool:
    """Tell whether a tensor's values are real numbers, and not strings or complex numbers."""
    return tensor.data_type not in _NO_NUMBERS


def _damaged(tensor: TensorProto, trouble: str) -> UserError:
    return UserError(f"the tensor {tensor.name[:200]!r} cannot be read ({trouble}): the file is damaged")


def _trouble(tensor: TensorProto) -> str | None:
    kind, apart = tensor.data_type, external_data_helper.uses_external_data(tensor)
    if kind == TensorProto.UNDEFINED or kind not in TensorProto.DataType.values():
        return f"its type is {kind}, which ONNX does not define"
    if len(tensor.dims) > _MOST_AXES:
        return f"it has {len(tensor.dims)} axes"
    if any(size < 0 for size in tensor.dims):
        return f"its shape is {list(tensor.dims)}"
    if tensor.HasField("segment"):
        return "it is a segment of another"
    if kind == TensorProto.STRING and (apart or tensor.HasField("raw_data")):
        return "its strings are not stored as bytes"
    return None if apart else _miscounted(tensor, kind)


def _miscounted(tensor: TensorProto, kind: int) -> str | None:
    count = math.prod(tensor.dims)
    if tensor.HasField("raw_data"):
        given, wanted, what = len(tensor.raw_data), size_of(tensor), "bytes"
    else:
        given, wanted, what = len(getattr(tensor, helper.tensor_dtype_to_field(kind))), count, "numbers"
        if _BITS.get(kind, 8) < 6:  # packed in bytes, except 6-bit numbers, which take a byte each
            wanted = -(-count * _BITS[kind] // 8)
        elif kind in (TensorProto.COMPLEX64, TensorProto.COMPLEX128):
            wanted = 2 * count
    return f"it has {given} {what}, and its shape {list(tensor.dims)} needs {wanted}" if given != wanted else None
