"""Finds what an ONNX graph loads from outside, without the ``onnx`` library, which no archive needs.

ONNX Runtime 1.31 reads external tensor files anywhere in the model's folder, older versions anywhere. A file that the
card does not name was never checked. ``EPContext`` nodes hold or name code that a provider compiled before (a TensorRT
engine). It is loaded unchecked, like any native code.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

from ..card.card import Card
from ..errors import EngineError

# Message → number of a field → the message in it, from onnx.proto (IR version 10): all paths to a TensorProto.
_FIELDS = {
    "Model": {7: "Graph", 20: "Training", 25: "Function"},
    "Training": {1: "Graph", 2: "Graph"},
    "Graph": {1: "Node", 5: "Tensor", 15: "SparseTensor"},
    "Function": {7: "Node", 11: "Attribute"},
    "Node": {5: "Attribute"},
    "Attribute": {5: "Tensor", 6: "Graph", 10: "Tensor", 11: "Graph", 22: "SparseTensor", 23: "SparseTensor"},
    "SparseTensor": {1: "Tensor", 2: "Tensor"},
    "Tensor": {13: "Entry"},
    "Entry": {},
}
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_DEPTH = 200  # of graphs nested in nodes
_OPERATOR = 4  # the field number of a Node's op_type
_COMPILED = b"EPContext"

#: A graph that negates one float, as ``onnx`` 1.23 writes it. It shows whether an engine can open anything.
TINY_GRAPH = (
    b'\x08\x08:5\n\x0b\n\x01x\x12\x01y"\x03Neg\x12\x04tinyZ\x0f\n\x01x\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01'
    b"b\x0f\n\x01y\x12\n\n\x08\x08\x01\x12\x04\n\x02\x08\x01B\x04\n\x00\x10\r"
)


def check_graph(path: Path, card: Card) -> None:
    """Refuse an ONNX file that reads files which its card does not name, or contains compiled code.

    Raises:
        EngineError: a tensor is in another file, a node is compiled code, or the file is not an ONNX graph.
    """
    try:
        for location in _findings(path):
            if location is None:
                raise EngineError(
                    f"{path}: refused before loading, because it has a node {_COMPILED.decode()}, whose compiled "
                    "code a provider would load unchecked"
                )
            if location not in card.files:
                raise EngineError(
                    f"{path}: refused before loading, because the data of a tensor is in {location[:200]!r}, which "
                    "the card does not list"
                )
    except ValueError as error:
        raise EngineError(f"{path}: is not an ONNX graph ({error})") from None


def external_files(path: Path) -> Iterator[str]:
    """Return the locations of tensors outside the graph's file, as written there.

    Raises:
        ValueError: the file is not a protocol buffer of an ONNX model.
    """
    return (location for location in _findings(path) if location is not None)


def _findings(path: Path) -> Iterator[str | None]:
    """Yield the `external_files`, and None for each node with compiled code."""
    # Memory-mapped: the weights are skipped by their lengths.
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        yield from _found(data, 0, len(data), "Model", 0)


def _found(data: mmap.mmap, start: int, end: int, message: str, depth: int) -> Iterator[str | None]:
    if depth > _DEPTH:
        raise ValueError("nested too deeply")
    key = value = b""
    for number, low, high in _messages(data, start, end):
        if message == "Entry":
            key, value = (data[low:high], value) if number == 1 else (key, data[low:high] if number == 2 else value)
        elif (inner := _FIELDS[message].get(number)) is not None:
            yield from _found(data, low, high, inner, depth + 1)
        elif message == "Node" and number == _OPERATOR and data[low:high] == _COMPILED:
            yield None
    if message == "Entry" and key == b"location":
        yield value.decode("utf-8")


def _messages(data: mmap.mmap, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the number and the span of each length-delimited field of a message."""
    position = start
    while position < end:
        tag, position = _varint(data, position, end)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            _, position = _varint(data, position, end)
        elif kind in (_FIXED64, _FIXED32):
            position += 8 if kind == _FIXED64 else 4
        elif kind == _BYTES:
            length, position = _varint(data, position, end)
            if position + length > end:
                raise ValueError("a field that is longer than its message")
            yield number, position, position + length
            position += length
        else:
            raise ValueError(f"a field of the unknown kind {kind}")


def _varint(data: mmap.mmap, position: int, end: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= end:
            break
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError("a number without an end")
