"""Converts the Open Inference Protocol's gRPC messages to requests and back. For the server see `grpc_server`.

Source: the protocol's ``inference_grpc.md``. A request has typed or raw tensors, and its answer has the same kind. Raw
tensors have the layout of binary data over HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from serve.asgi.protocols.oip import (
    RANK,
    Inference,
    Output,
    Signature,
    Tensor,
    Wanted,
    all_outputs,
    check_datatype,
    model_metadata,
    read_inference,
)
from serve.asgi.protocols.oip_messages import message
from serve.asgi.protocols.oip_rest import packed, unpacked
from serve.runtime.card.fields import shown
from serve.runtime.errors import RequestError
from serve.runtime.service.protocol import MOST_VALUES

_CONTENTS = {
    "BYTES": "bytes_contents",
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "UINT8": "uint_contents",
}

#: Names of gRPC's status codes, by HTTP status.
STATUSES: Mapping[int, str] = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    # Too many pixels, instances or bytes. RESOURCE_EXHAUSTED would make clients try again.
    413: "INVALID_ARGUMENT",
    415: "INVALID_ARGUMENT",
    499: "CANCELLED",
    500: "INTERNAL",
    501: "UNIMPLEMENTED",
    503: "RESOURCE_EXHAUSTED",
    504: "DEADLINE_EXCEEDED",
}


def read(signature: Signature, request: Any) -> Inference:
    """Parse a ``ModelInferRequest``.

    Raises:
        RequestError: the message does not fit the protocol or the model's metadata.
    """
    raw = list(request.raw_input_contents)
    if raw and len(raw) != len(request.inputs):
        raise RequestError(f"{len(raw)} raw_input_contents were sent for {len(request.inputs)} inputs")
    tensors = []
    for index, entry in enumerate(request.inputs):
        if not raw:
            data = _typed(entry)
        elif entry.HasField("contents"):
            raise RequestError(
                f"input {shown(entry.name)} has contents in addition to raw_input_contents: send one of them"
            )
        elif entry.datatype == "BYTES":
            data = unpacked(raw[index], signature.instance_limit)
        else:
            data = raw[index]
        # Keep just enough of a shape to see that it is too long. A client may send a million numbers.
        tensors.append(Tensor(entry.name, entry.datatype, tuple(entry.shape[: RANK + 1]), data))
    wanted = tuple(Wanted(entry.name, bool(raw)) for entry in request.outputs)
    parameters = _parameters(request.parameters)
    wanted = wanted or all_outputs(signature, binary=bool(raw))
    return read_inference(signature, tensors, wanted, parameters, request.id)


def write(signature: Signature, version: str, inference: Inference, outputs: Sequence[Output]) -> Any:
    """Return the ``ModelInferResponse`` with these tensors."""
    response = message("ModelInferResponse")(model_name=signature.name, model_version=version, id=inference.id)
    for output in outputs:
        entry = response.outputs.add(name=output.name, datatype=output.datatype, shape=output.shape)
        if output.binary:
            response.raw_output_contents.append(packed(output))
        else:
            data = [str(text).encode() for text in output.data] if output.datatype == "BYTES" else output.values
            getattr(entry.contents, _CONTENTS[output.datatype]).extend(data)
    return response


def write_metadata(signature: Signature) -> Any:
    """Return the ``ModelMetadataResponse`` of a model."""
    found = model_metadata(signature)
    response = message("ModelMetadataResponse")(
        name=found["name"], versions=found["versions"], platform=found["platform"]
    )
    for place in ("inputs", "outputs"):
        for tensor in found[place]:
            getattr(response, place).add(**tensor)
    return response


def _typed(entry: Any) -> tuple[bytes, ...] | bytes:
    check_datatype(entry.name, entry.datatype)
    if len(kinds := entry.contents.ListFields()) > 1:
        names = ", ".join(field.name for field, _ in kinds)
        raise RequestError(f"input {shown(entry.name)} has several kinds of contents ({names}): send one")
    if entry.datatype == "BYTES":
        return tuple(entry.contents.bytes_contents)
    if len(entry.contents.uint_contents) > MOST_VALUES:
        raise RequestError(f"input {shown(entry.name)} has more than {MOST_VALUES} values: send them raw", 413)
    try:
        return bytes(entry.contents.uint_contents)
    except ValueError:
        raise RequestError(f"input {shown(entry.name)}: the data must be whole numbers from 0 to 255") from None


def _parameters(entries: Any) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in entries.items():
        kind = value.WhichOneof("parameter_choice")
        found[name] = getattr(value, kind) if kind else None
    return found
