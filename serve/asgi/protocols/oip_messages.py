"""The messages of the Open Inference Protocol's gRPC service, made from a table when this module is imported.

The table says what the protocol's ``open_inference_grpc.proto`` does; so no code that a compiler generated is kept
here. The messages live in a pool of their own: a client library in the same process may have brought the same names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from serve.runtime.service.protocol import MOST_VALUES

PACKAGE: Final = "inference"
SERVICE: Final = f"{PACKAGE}.GRPCInferenceService"

#: Each method takes ``NAMERequest`` and gives ``NAMEResponse``.
METHODS: Final = ("ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer")

# Fields in the order of their numbers, from 1: type and name. "*" is repeated, "%" a map from texts, "|" one of some.
_PARAMETERS = "%InferParameter parameters"
_TABLE: Final[Mapping[str, tuple[str, ...]]] = {
    "ServerLiveRequest": (),
    "ServerLiveResponse": ("bool live",),
    "ServerReadyRequest": (),
    "ServerReadyResponse": ("bool ready",),
    "ModelReadyRequest": ("string name", "string version"),
    "ModelReadyResponse": ("bool ready",),
    "ServerMetadataRequest": (),
    "ServerMetadataResponse": ("string name", "string version", "*string extensions"),
    "ModelMetadataRequest": ("string name", "string version"),
    "ModelMetadataResponse": (
        "string name",
        "*string versions",
        "string platform",
        "*ModelMetadataResponse.TensorMetadata inputs",
        "*ModelMetadataResponse.TensorMetadata outputs",
    ),
    "ModelMetadataResponse.TensorMetadata": ("string name", "string datatype", "*int64 shape"),
    "InferParameter": (
        "|bool bool_param",
        "|int64 int64_param",
        "|string string_param",
        "|double double_param",
        "|uint64 uint64_param",
    ),
    "InferTensorContents": (
        "*bool bool_contents",
        "*int32 int_contents",
        "*int64 int64_contents",
        "*uint32 uint_contents",
        "*uint64 uint64_contents",
        "*float fp32_contents",
        "*double fp64_contents",
        "*bytes bytes_contents",
    ),
    "ModelInferRequest": (
        "string model_name",
        "string model_version",
        "string id",
        _PARAMETERS,
        "*ModelInferRequest.InferInputTensor inputs",
        "*ModelInferRequest.InferRequestedOutputTensor outputs",
        "*bytes raw_input_contents",
    ),
    "ModelInferRequest.InferInputTensor": (
        "string name",
        "string datatype",
        "*int64 shape",
        _PARAMETERS,
        "InferTensorContents contents",
    ),
    "ModelInferRequest.InferRequestedOutputTensor": ("string name", _PARAMETERS),
    "ModelInferResponse": (
        "string model_name",
        "string model_version",
        "string id",
        _PARAMETERS,
        "*ModelInferResponse.InferOutputTensor outputs",
        "*bytes raw_output_contents",
    ),
    "ModelInferResponse.InferOutputTensor": (
        "string name",
        "string datatype",
        "*int64 shape",
        _PARAMETERS,
        "InferTensorContents contents",
    ),
}


def _file() -> FileDescriptorProto:
    file = FileDescriptorProto(name="open_inference.proto", package=PACKAGE, syntax="proto3")
    for name, fields in _TABLE.items():
        outer, _, inner = name.partition(".")
        if inner:
            parent = next(message for message in file.message_type if message.name == outer)
            message = parent.nested_type.add(name=inner)
        else:
            message = file.message_type.add(name=name)
        for number, field in enumerate(fields, start=1):
            _add(message, f".{PACKAGE}.{name}", number, field)
    return file


def _add(message: DescriptorProto, path: str, number: int, written: str) -> None:
    kind, name = written.lstrip("*%|").split()
    mark = written[0]
    repeated = mark in "*%"
    field = message.field.add(name=name, number=number)
    field.label = FieldDescriptorProto.LABEL_REPEATED if repeated else FieldDescriptorProto.LABEL_OPTIONAL
    if mark == "|":
        if not message.oneof_decl:
            message.oneof_decl.add(name="parameter_choice")
        field.oneof_index = 0
    if mark == "%":
        entry_name = "".join(part.capitalize() for part in name.split("_")) + "Entry"
        entry = message.nested_type.add(name=entry_name)
        entry.options.map_entry = True
        _add(entry, f"{path}.{entry_name}", 1, "string key")
        _add(entry, f"{path}.{entry_name}", 2, f"{kind} value")
        _typed(field, f"{path}.{entry_name}")
    elif kind[0].isupper():
        _typed(field, f".{PACKAGE}.{kind}")
    else:
        field.type = FieldDescriptorProto.Type.Value(f"TYPE_{kind.upper()}")


def _typed(field: FieldDescriptorProto, name: str) -> None:
    field.type, field.type_name = FieldDescriptorProto.TYPE_MESSAGE, name


_POOL = DescriptorPool()
_POOL.Add(_file())


#: Fields of a message, and of those in it, that are read. A request has some ten, and one for each image; one of 64 MB
#: could have 32 million that are empty, and protobuf makes an object of 150 bytes of each before anybody counts them.
MOST_FIELDS: Final = 16_384

# Bytes of a number: seven bits in each.
_LONGEST_NUMBER: Final = 10

# The types whose repeated values may be packed into one field, and their bytes; None: a number as `_number` reads it.
_PACKED: Final[Mapping[int, int | None]] = {
    FieldDescriptorProto.TYPE_BOOL: None,
    FieldDescriptorProto.TYPE_INT32: None,
    FieldDescriptorProto.TYPE_INT64: None,
    FieldDescriptorProto.TYPE_UINT32: None,
    FieldDescriptorProto.TYPE_UINT64: None,
    FieldDescriptorProto.TYPE_FLOAT: 4,
    FieldDescriptorProto.TYPE_DOUBLE: 8,
}


def read_message(name: str, content: bytes) -> Any:
    """A message of its bytes.

    Raises:
        ValueError: it is none, or has more fields or packed values than are read.
    """
    kind = message(name)
    try:
        _Room(content).take(kind.DESCRIPTOR, 0, len(content))
        return kind.FromString(content)
    except (DecodeError, IndexError):
        raise ValueError(f"the message is no {name}") from None


class _Room:
    """How many fields, and values packed into fields, a message may have beside those that were counted."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._fields, self._values = MOST_FIELDS, MOST_VALUES

    def take(self, kind: Any, place: int, end: int) -> None:
        """Count what a message of this kind has from ``place`` to ``end``.

        Raises:
            ValueError: there are more than are read.
            DecodeError: it is no message.
            IndexError: it ends in the middle of a number.
        """
        while place < end:
            self._fields -= 1
            if self._fields < 0:
                raise ValueError(f"the message has more than {MOST_FIELDS} fields")
            key, place = _number(self._content, place)
            wire = key & 7
            if wire == 2:  # with a length
                length, place = _number(self._content, place)
                field = kind.fields_by_number.get(key >> 3)
                if field is not None:
                    self._take_inner(field, place, min(end, place + length))
                place += length
            elif wire == 0:
                _, place = _number(self._content, place)
            elif wire in (1, 5):
                place += 8 if wire == 1 else 4
            else:  # groups, which no message has
                raise DecodeError

    def _take_inner(self, field: Any, place: int, end: int) -> None:
        if field.message_type is not None:
            self.take(field.message_type, place, end)
        elif field.is_repeated and field.type in _PACKED:
            self._values -= _values(self._content, place, end, _PACKED[field.type])
            if self._values < 0:
                raise ValueError(f"the message has more than {MOST_VALUES} packed values: send tensors raw")


def _values(content: bytes, place: int, end: int, size: int | None) -> int:
    """How many values of ``size`` bytes, or None: numbers, a packed field has; at least, where they are too many."""
    if end <= place:
        return 0
    if size is not None:
        return (end - place) // size
    if (least := (end - place) // _LONGEST_NUMBER) > MOST_VALUES:  # without looking at 60 MB
        return least
    # Each number ends with its one byte below 128. numpy counts 10 MB in some ms, and Python in a second.
    return int(np.count_nonzero(np.frombuffer(content, np.int8, end - place, place) >= 0))


def _number(content: bytes, place: int) -> tuple[int, int]:
    """A number of seven bits in each byte, and the place behind it; none has more than ten bytes."""
    value = 0
    for shift in range(0, 7 * _LONGEST_NUMBER, 7):
        byte = content[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
    raise DecodeError


def message(name: str) -> Any:
    """The class of a message, such as ``ModelInferRequest``."""
    return GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))
