"""The messages of the Open Inference Protocol's gRPC service, built from a table at import.

The table has the content of the protocol's ``open_inference_grpc.proto``, so no generated code is needed. The messages
have their own pool, because a client library in the same process may define the same names.
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

#: Each method receives ``NAMERequest`` and returns ``NAMEResponse``.
METHODS: Final = ("ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer")

# Fields in the order of their numbers, from 1: type and name. "*" is repeated, "%" a map from texts, "|" part of a
# oneof.
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


#: Most fields of a message, nested messages included. A request has about ten, and one for each image. A message of 64
#: MB could have 32 million empty ones, and protobuf would allocate 150 bytes for each before anybody counts them.
MOST_FIELDS: Final = 16_384

# Bytes of a varint, with seven bits in each.
_LONGEST_NUMBER: Final = 10

# Types whose repeated values may be packed into one field, and their size in bytes. None: a varint, see `_number`.
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
    """Parse a message.

    Raises:
        ValueError: the bytes are not such a message, or have too many fields or packed values.
    """
    kind = message(name)
    try:
        _FieldCounter(content).take(kind.DESCRIPTOR, 0, len(content))
        return kind.FromString(content)
    except (DecodeError, IndexError):
        raise ValueError(f"the message is not a valid {name}") from None


class _FieldCounter:
    """Counts the fields and packed values of a message, up to the limits."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._fields, self._values = MOST_FIELDS, MOST_VALUES

    def take(self, kind: Any, place: int, end: int) -> None:
        """Count the fields of a message of this kind between ``place`` and ``end``.

        Raises:
            ValueError: there are too many.
            DecodeError: the bytes are not a message.
            IndexError: the bytes end within a number.
        """
        while place < end:
            self._fields -= 1
            if self._fields < 0:
                raise ValueError(f"the message has more than {MOST_FIELDS} fields")
            key, place = _number(self._content, place)
            wire = key & 7
            if wire == 2:  # length-delimited
                length, place = _number(self._content, place)
                field = kind.fields_by_number.get(key >> 3)
                if field is not None:
                    self._count_inner(field, place, min(end, place + length))
                place += length
            elif wire == 0:
                _, place = _number(self._content, place)
            elif wire in (1, 5):
                place += 8 if wire == 1 else 4
            else:  # groups, which the protocol does not use
                raise DecodeError

    def _count_inner(self, field: Any, place: int, end: int) -> None:
        if field.message_type is not None:
            self.take(field.message_type, place, end)
        elif field.is_repeated and field.type in _PACKED:
            self._values -= _values(self._content, place, end, _PACKED[field.type])
            if self._values < 0:
                raise ValueError(f"the message has more than {MOST_VALUES} packed values: send tensors raw")


def _values(content: bytes, place: int, end: int, size: int | None) -> int:
    """Return the number of values in a packed field, or a lower bound if there are too many. ``size`` None: varints."""
    if end <= place:
        return 0
    if size is not None:
        return (end - place) // size
    if (least := (end - place) // _LONGEST_NUMBER) > MOST_VALUES:  # avoids a look at 60 MB
        return least
    # Each varint ends with its only byte below 128. numpy counts 10 MB in some ms, Python in a second.
    return int(np.count_nonzero(np.frombuffer(content, np.int8, end - place, place) >= 0))


def _number(content: bytes, place: int) -> tuple[int, int]:
    """Read a varint of at most ten bytes. Return it and the place behind it."""
    value = 0
    for shift in range(0, 7 * _LONGEST_NUMBER, 7):
        byte = content[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
    raise DecodeError


def message(name: str) -> Any:
    """Return the class of a message by name, for example ``ModelInferRequest``."""
    return GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))
