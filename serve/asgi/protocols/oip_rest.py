"""Parses and writes the Open Inference Protocol's HTTP bodies: JSON, and binary data behind it.

Sources: the protocol's ``inference_rest.md``, and its binary tensor data extension. Triton's documentation describes
the extension in ``extension_binary_data.md``, and every known client uses it. This module knows no server.
"""

from __future__ import annotations

import binascii
import json
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from serve.asgi.protocols.oip import (
    Inference,
    Output,
    Signature,
    Tensor,
    Wanted,
    all_outputs,
    check_datatype,
    read_inference,
)
from serve.runtime.card.fields import shown
from serve.runtime.errors import RequestError
from serve.runtime.service.protocol import read_base64, read_json

#: Header of requests and responses: the length of the JSON in front of binary data.
LENGTH_HEADER = "inference-header-content-length"

_MOST_TENSORS = 16
_DEPTH = 4  # of nested lists
_NUMPY = {"INT64": "<i8", "FP32": "<f4", "UINT8": "u1"}


@dataclass(frozen=True)
class Answer:
    """A response body, and the length of its JSON if binary data follows."""

    body: bytes
    json_length: int | None


def read(signature: Signature, body: bytes, json_length: str | None) -> Inference:
    """Parse the body of ``POST /v2/models/NAME/infer``.

    Args:
        signature: the model's signature.
        body: the whole body.
        json_length: value of the header `LENGTH_HEADER`. None: no header.

    Raises:
        RequestError: the body does not fit the protocol or the model's metadata.
    """
    document, binary = _split(body, json_length)
    parameters = _object(document, "parameters")
    request_id = document.get("id", "")
    if not isinstance(request_id, str) or not _is_text(request_id):
        raise RequestError(f"id must be a string, found {shown(request_id)}")
    tensors = []
    for entry in _objects(document, "inputs"):
        tensor, binary = _tensor(entry, binary, signature.instance_limit)
        tensors.append(tensor)
    if binary:
        raise RequestError(f"{len(binary)} bytes are left after the binary data of the inputs")
    everywhere = _flag(parameters, "binary_data_output")
    wanted = tuple(_wanted(entry, everywhere) for entry in _objects(document, "outputs"))
    return read_inference(
        signature, tensors, wanted or all_outputs(signature, binary=everywhere), parameters, request_id
    )


def write(signature: Signature, version: str, inference: Inference, outputs: Sequence[Output]) -> Answer:
    """Return the response body with these tensors."""
    document: dict[str, Any] = {"model_name": signature.name, "model_version": version}
    if inference.id:
        document["id"] = inference.id
    document["outputs"] = []
    pieces: list[bytes] = []
    for output in outputs:
        entry: dict[str, Any] = {"name": output.name, "datatype": output.datatype, "shape": list(output.shape)}
        if output.binary:
            pieces.append(packed(output))
            entry["parameters"] = {"binary_data_size": len(pieces[-1])}
        else:
            entry["data"] = output.values
        document["outputs"].append(entry)
    header = json.dumps(document, allow_nan=False, separators=(",", ":")).encode()
    return Answer(b"".join([header, *pieces]), len(header) if pieces else None)


def packed(output: Output) -> bytes:
    """Return a tensor as binary data: little-endian, row-major, with a length of 4 bytes before each text."""
    if output.datatype == "BYTES":
        texts = [str(text).encode() for text in output.data]
        return b"".join(chain.from_iterable((struct.pack("<I", len(text)), text) for text in texts))
    return np.asarray(output.data, dtype=_NUMPY[output.datatype]).tobytes()


def unpacked(data: bytes | memoryview, limit: int) -> tuple[bytes, ...]:
    """Return the elements of ``BYTES`` from binary data. A length of 4 bytes precedes each.

    Args:
        data: the whole tensor.
        limit: most elements. A tensor of 64 MiB could have 16 million.

    Raises:
        RequestError: a length exceeds the data, or there are too many elements.
    """
    elements: list[bytes] = []
    place = 0
    while place < len(data):
        if len(elements) == limit:
            raise RequestError(f"there are more than {limit} images in one request")
        if place + 4 > len(data):
            raise RequestError("the binary data ends in the middle of an element's length")
        length = int.from_bytes(data[place : place + 4], "little")
        place += 4
        if place + length > len(data):
            raise RequestError(f"an element should have {length} bytes, but only {len(data) - place} follow")
        elements.append(bytes(data[place : place + length]))
        place += length
    return tuple(elements)


def document_length(body: bytes, json_length: str | None) -> int:
    """Return the length of a body's JSON document in bytes. For arguments and errors see `read`."""
    if json_length is None:
        return len(body)
    if not re.fullmatch(r"[0-9]{1,18}", json_length) or int(json_length) > len(body):
        raise RequestError(
            f"{LENGTH_HEADER} must be a number of bytes up to the body's {len(body)}, got {shown(json_length)}"
        )
    return int(json_length)


def _split(body: bytes, json_length: str | None) -> tuple[Mapping[str, Any], memoryview]:
    """Return the document and the data behind it. The data are a view, because each input cuts its own part off."""
    length = document_length(body, json_length)
    document = read_json(body[:length])
    if not isinstance(document, dict):
        raise RequestError('the JSON body must be {"inputs": [{"name", "datatype", "shape", "data"}]}')
    return document, memoryview(body)[length:]


def _tensor(entry: Mapping[str, Any], binary: memoryview, limit: int) -> tuple[Tensor, memoryview]:
    """Parse one input. Return it and the binary data of the inputs behind it."""
    name, datatype, shape = entry.get("name"), entry.get("datatype"), entry.get("shape")
    if not isinstance(name, str) or not isinstance(datatype, str):
        raise RequestError("an input must have a name and a datatype, both strings")
    if not isinstance(shape, list) or not all(type(side) is int for side in shape):
        raise RequestError(f"input {shown(name)}: the shape must be a list of whole numbers")
    check_datatype(name, datatype)
    parameters = _object(entry, "parameters")
    if "binary_data_size" in parameters:
        if "data" in entry:
            raise RequestError(f"input {shown(name)} has both data and a binary_data_size")
        size = parameters["binary_data_size"]
        if type(size) is not int or not 0 <= size <= len(binary):
            raise RequestError(
                f"input {shown(name)}: binary_data_size must be a number up to the {len(binary)} bytes after the "
                f"JSON (see the header {LENGTH_HEADER}), found {shown(size)}"
            )
        mine, binary = binary[:size], binary[size:]
        data: Sequence[bytes] | bytes = unpacked(mine, limit) if datatype == "BYTES" else bytes(mine)
    else:
        data = _json_values(name, datatype, entry.get("data"), parameters)
    return Tensor(name, datatype, tuple(shape), data), binary


def _json_values(name: str, datatype: str, data: object, parameters: Mapping[str, Any]) -> Sequence[bytes] | bytes:
    """Return the values of a tensor in the JSON, from a flat or nested list."""
    if not isinstance(data, list):
        raise RequestError(f"input {shown(name)} has no list of data")
    for _ in range(_DEPTH - 1):
        if not any(isinstance(item, list) for item in data):
            break
        if not all(isinstance(item, list) for item in data):
            raise RequestError(f"input {shown(name)}: the data mixes lists and values")
        data = list(chain.from_iterable(data))
    if datatype != "BYTES":
        try:
            return bytes(data)
        except (TypeError, ValueError):
            raise RequestError(f"input {shown(name)}: the data must be whole numbers from 0 to 255") from None
    return tuple(_element(index, item, parameters) for index, item in enumerate(data))


def _element(index: int, item: object, parameters: Mapping[str, Any]) -> bytes:
    """Decode one element of ``BYTES`` in JSON: base64, or else a text's UTF-8.

    The protocol means the text, but a JPEG is no UTF-8, so base64 is a way to send one. The two cannot be confused: no
    image consists of base64 characters alone. KServe's and MLServer's clients send base64, and MLServer's says so in a
    parameter.
    """
    if not isinstance(item, str):
        raise RequestError(f"element {index} must be a string, found {shown(item)}")
    try:
        return read_base64(item)
    except (binascii.Error, ValueError) as error:
        if parameters.get("content_type") == "base64":
            raise RequestError(f"element {index} is not valid base64 ({str(error)[:80]})") from None
    try:
        return item.encode()
    except UnicodeEncodeError:
        raise RequestError(f"element {index} has characters that are not valid text") from None


def _wanted(entry: Mapping[str, Any], everywhere: bool) -> Wanted:
    name, parameters = entry.get("name"), _object(entry, "parameters")
    if not isinstance(name, str):
        raise RequestError("an output must have a name, a string")
    if "classification" in parameters:
        raise RequestError("classification is not supported: request outputs by their names")
    return Wanted(name, _flag(parameters, "binary_data", everywhere))


def _flag(parameters: Mapping[str, Any], name: str, default: bool = False) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false, found {shown(value)}")
    return value


def _object(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = document.get(name, {})
    if not isinstance(value, dict):
        raise RequestError(f"{name} must be a JSON object, found {shown(value)}")
    return value


def _objects(document: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    value = document.get(name, [])
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise RequestError(f"{name} must be a list of JSON objects")
    if len(value) > _MOST_TENSORS:
        raise RequestError(f"{name} has {len(value)} entries; the limit is {_MOST_TENSORS}")
    return value


def _is_text(value: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in value)
