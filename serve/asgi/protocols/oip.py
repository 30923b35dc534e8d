"""Converts tensors of the Open Inference Protocol to requests of the runtime, for JSON, binary data and gRPC.

A model has one input tensor, ``image``: encoded images (``BYTES``) or pixels (``UINT8``). Its outputs are those of its
task, from which a client may choose. The protocol cannot answer a part of a request. If one image is refused, the
request is.

Source: github.com/kserve/open-inference-protocol, ``specification/protocol``.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from serve.runtime.card.fields import shown
from serve.runtime.card.serving import Serving
from serve.runtime.errors import Refusal, RequestError
from serve.runtime.service.protocol import MOST_VALUES, Request
from serve.runtime.tasks.base import Outcome, Task

#: The one input of every model.
INPUT = "image"

#: The extensions in the server's metadata.
EXTENSIONS = ("binary_tensor_data",)

#: Most dimensions of a tensor: those of pixels.
RANK = 4

_FRAMEWORKS = {"torchscript": "pytorch_torchscript", "exported_program": "pytorch_exported", "onnx": "onnx_onnxv1"}
_COPIES = 2
_LONGEST_SIDE = 65_535  # of an image in pixels


@dataclass(frozen=True)
class Signature:
    """The metadata of one model, and the limits for its requests.

    Attributes:
        name: the name in the path.
        versions: the served versions. The last one is the current.
        task: the model's task, with its card.
        serving: its serving settings.
    """

    name: str
    versions: tuple[str, ...]
    task: Task
    serving: Serving

    @property
    def channels(self) -> int:
        """Channels of a pixel: 3 (RGB) or 1 (grey)."""
        return self.task.card.preprocessing.channels

    @property
    def instance_limit(self) -> int:
        """Most images in one request."""
        return self.serving.instance_limit


@dataclass(frozen=True)
class Tensor:
    """One tensor of a request: the elements of ``BYTES``, or the values of another type as row-major bytes."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Sequence[bytes] | bytes


@dataclass(frozen=True)
class Wanted:
    """One output that a request names. ``binary``: whether to send it as binary data."""

    name: str
    binary: bool = False


@dataclass(frozen=True)
class Inference:
    """One request in a form that is the same for every transport.

    Attributes:
        request: the request to the runtime. Its answers have enough for every wanted output.
        options: the request's own options, which may want less.
        wanted: the outputs, in the order of the answer.
        id: returned in the answer. Empty: there was none.
        timeout_s: seconds until the client gives up. None: unknown.
    """

    request: Request
    options: Any
    wanted: tuple[Wanted, ...]
    id: str = ""
    timeout_s: float | None = None


@dataclass(frozen=True)
class Output:
    """One tensor of an answer. ``data`` is flat and row-major, with texts for ``BYTES``, or an array of numbers."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Any
    binary: bool = False

    @property
    def values(self) -> list[Any]:
        """``data`` as a list."""
        found: list[Any] = self.data.tolist() if isinstance(self.data, np.ndarray) else self.data
        return found


def server_metadata(version: str) -> dict[str, Any]:
    """Return the server's metadata, the body of ``GET /v2``."""
    return {"name": "optimize-and-serve", "version": version, "extensions": list(EXTENSIONS)}


def model_metadata(signature: Signature) -> dict[str, Any]:
    """Return a model's metadata, the body of ``GET /v2/models/NAME``. -1 in a shape is any size."""
    model_format = signature.task.card.format
    return {
        "name": signature.name,
        "versions": list(signature.versions),
        "platform": _FRAMEWORKS.get(model_format, f"pytorch_{model_format}"),
        "inputs": [{"name": INPUT, "datatype": "BYTES", "shape": [-1]}],
        "outputs": [
            {"name": name, "datatype": tensor.datatype, "shape": [-1, *tensor.shape]}
            for name, tensor in signature.task.tensors.items()
        ],
    }


def all_outputs(signature: Signature, *, binary: bool) -> tuple[Wanted, ...]:
    """Return the outputs for a request that names none."""
    return tuple(Wanted(name, binary) for name in signature.task.tensors)


def check_datatype(name: str, datatype: str) -> None:
    """Check the datatype of a tensor before its data are parsed.

    Raises:
        RequestError: models accept no such datatype.
    """
    if datatype not in ("BYTES", "UINT8"):
        raise RequestError(f"{name!r} must be BYTES (encoded images) or UINT8 (pixels), found {shown(datatype)}")


def read_inference(
    signature: Signature,
    tensors: Sequence[Tensor],
    wanted: Sequence[Wanted],
    parameters: Mapping[str, object],
    request_id: str = "",
) -> Inference:
    """Convert the parts of a request to an `Inference`.

    Args:
        signature: the model's signature.
        tensors: the inputs.
        wanted: the outputs that the request names, or `all_outputs`.
        parameters: the request's own parameters: those of the task, and ``timeout`` in microseconds.
        request_id: returned in the answer.

    Raises:
        RequestError: a tensor, an output or a parameter does not fit the model's metadata.
    """
    images = _images(signature, tensors)
    task = signature.task
    options = task.options(parameters, signature.serving)
    for output in wanted:
        if output.name not in task.tensors:
            raise RequestError(f"there is no output {shown(output.name)}; the outputs are {', '.join(task.tensors)}")
    if len({output.name for output in wanted}) < len(wanted):
        raise RequestError("an output is requested twice")
    request = Request(images, task.widened(options, [output.name for output in wanted]), listed=True)
    return Inference(request, options, tuple(wanted), request_id, _timeout(parameters))


def answer_bytes(signature: Signature, inference: Inference, outcomes: Sequence[Outcome]) -> int:
    """Return how many bytes writing the outputs takes: each tensor is made, and then copied into the answer.

    Raises:
        RequestError: a tensor has too many values for JSON and other forms of single values.
    """
    answers = [outcome for outcome in outcomes if not isinstance(outcome, Refusal)]
    found = 0
    for wanted in inference.wanted:
        values = signature.task.tensor_size(wanted.name, answers)
        if values > MOST_VALUES and not wanted.binary:
            raise RequestError(
                f"the output {wanted.name!r} has {values} values, more than the {MOST_VALUES} that may be sent one by "
                "one: ask for binary data (raw in gRPC), or send smaller images",
                413,
            )
        found += _COPIES * values
    return found


def write_outputs(signature: Signature, inference: Inference, outcomes: Sequence[Outcome]) -> tuple[Output, ...]:
    """Return the output tensors for the outcomes of a request's images, in order.

    Raises:
        RequestError: an image was refused. The error names the first one and has its status.
    """
    answers: list[Any] = []
    for index, outcome in enumerate(outcomes):
        if isinstance(outcome, Refusal):
            where = f"image {index}: " if len(outcomes) > 1 else ""
            raise RequestError(f"{where}{outcome.message}", outcome.status)
        answers.append(outcome)
    task, found = signature.task, []
    for wanted in inference.wanted:
        shape, data = task.tensor(wanted.name, answers, inference.options)
        datatype = task.tensors[wanted.name].datatype
        found.append(Output(wanted.name, datatype, (len(answers), *shape), data, wanted.binary))
    return tuple(found)


def _images(signature: Signature, tensors: Sequence[Tensor]) -> tuple[bytes, ...]:
    if len(tensors) != 1 or tensors[0].name != INPUT:
        names = ", ".join(shown(tensor.name) for tensor in tensors[:4]) or "none"
        raise RequestError(f"the request must have one input, named {INPUT!r}; found {names}")
    tensor = tensors[0]
    check_datatype(tensor.name, tensor.datatype)
    if not 1 <= len(tensor.shape) <= RANK or not all(1 <= side < 1 << 63 for side in tensor.shape):
        raise RequestError(
            f"the shape of {INPUT!r} must have 1 to {RANK} numbers of at least 1, found {_shape_text(tensor.shape)}"
        )
    elements = math.prod(tensor.shape)
    if len(tensor.data) != elements:
        unit = "elements" if tensor.datatype == "BYTES" else "bytes"
        raise RequestError(
            f"{INPUT!r} has {len(tensor.data)} {unit}, but its shape {_shape_text(tensor.shape)} needs {elements}"
        )
    if not isinstance(tensor.data, bytes):
        if len(tensor.shape) != 1 and tensor.shape[1:] != (1,):
            raise RequestError(f"encoded images must have the shape [N] or [N,1], found {_shape_text(tensor.shape)}")
        _check_count(elements, signature.instance_limit)
        return tuple(tensor.data)
    return _pixels(signature, tensor, tensor.data)


def _pixels(signature: Signature, tensor: Tensor, data: bytes) -> tuple[bytes, ...]:
    """Return pixels as uncompressed image files. They then pass the same resize and the same limits as other images."""
    channels = signature.channels
    if len(tensor.shape) != RANK:
        raise RequestError(
            f"pixels must have the shape [N,H,W,{channels}] or [N,{channels},H,W], found {_shape_text(tensor.shape)}"
        )
    _check_count(tensor.shape[0], signature.instance_limit)
    array = np.frombuffer(data, dtype=np.uint8).reshape(tensor.shape)
    if array.shape[3] != channels:
        if array.shape[1] != channels:
            raise RequestError(
                f"pixels must have the shape [N,H,W,{channels}] or [N,{channels},H,W], found "
                f"{_shape_text(tensor.shape)}"
            )
        array = array.transpose(0, 2, 3, 1)
    if max(array.shape[1:3]) > _LONGEST_SIDE:
        raise RequestError(f"pixels may have up to {_LONGEST_SIDE} rows and columns, found {_shape_text(tensor.shape)}")
    return tuple(_bitmap(image) for image in array)


def _bitmap(pixels: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes:
    """Encode ``uint8`` pixels ``(H, W, C)`` as a BMP file, or with alpha as PNG: readers of BMP disagree on alpha."""
    stream = io.BytesIO()
    image = Image.fromarray(np.ascontiguousarray(pixels if pixels.shape[-1] > 1 else pixels[..., 0]))
    if image.mode in ("L", "RGB"):
        image.save(stream, "BMP")
    else:
        image.save(stream, "PNG", compress_level=0)
    return stream.getvalue()


def _check_count(images: int, limit: int) -> None:
    if images > limit:
        raise RequestError(f"{images} images in one request; the limit is {limit}")


def _timeout(parameters: Mapping[str, object]) -> float | None:
    value = parameters.get("timeout")
    if value is None or value == 0:
        return None
    if type(value) is not int or not 0 < value < 1 << 53:
        raise RequestError(f"timeout must be a whole number of microseconds, found {shown(value)}")
    return value / 1e6


def _shape_text(shape: tuple[int, ...]) -> str:
    sides = ",".join(str(side) if abs(side) < 1 << 63 else "…" for side in shape[:RANK])
    return f"[{sides}{',…' if len(shape) > RANK else ''}]"
