"""The messages of the Open Inference Protocol's gRPC service, made from a table when this module is imported.

The table says what the protocol's ``open_inference_grpc.proto`` does; so no code that a compiler generated is kept
here. The messages live in a pool of their own: a client library in the same process may have brought the same names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

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


def read_message(name: str, content: bytes) -> Any:
    """A message of its bytes.

    Raises:
        ValueError: it is none, or has more fields than are read.
    """
    kind = message(name)
    try:
        left = _fields_left(kind.DESCRIPTOR, content, 0, len(content), MOST_FIELDS)
        if left < 0:
            raise ValueError(f"the message has more than {MOST_FIELDS} fields")
        return kind.FromString(content)
    except (DecodeError, IndexError):
        raise ValueError(f"the message is no {name}") from None


def _fields_left(kind: Any, content: bytes, place: int, end: int, left: int) -> int:
    """How many of so many fields are left behind those of a message from ``place``; below 0: there are more."""
    while place < end and left >= 0:
        left -= 1
        key, place = _number(content, place)
        wire = key & 7
        if wire == 2:  # with a length
            length, place = _number(content, place)
            field = kind.fields_by_number.get(key >> 3)
            if field is not None and field.message_type is not None:
                left = _fields_left(field.message_type, content, place, min(end, place + length), left)
            place += length
        elif wire == 0:
            _, place = _number(content, place)
        elif wire in (1, 5):
            place += 8 if wire == 1 else 4
        else:  # groups, which no message has
            raise DecodeError
    return left


def _number(content: bytes, place: int) -> tuple[int, int]:
    """A number of seven bits in each byte, and the place behind it; none has more than ten bytes."""
    value = 0
    for shift in range(0, 70, 7):
        byte = content[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
    raise DecodeError


def message(name: str) -> Any:
    """The class of a message, such as ``ModelInferRequest``."""
    return GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))
