"""Reads untrusted ONNX files into memory. No code runs, and no file outside their folder is opened."""

from __future__ import annotations

import os
import stat
import warnings
from pathlib import Path

import onnx
import psutil
from onnx import ModelProto, TensorProto, external_data_helper

from optimize.lint.graph import printable
from optimize.lint.untrusted_tensors import check_tensor, size_of, tensors
from serve.runtime.errors import UserError, one_line

# The limit of protobuf.
_MOST_BYTES = 2**31 - 1


def read_graph(path: Path) -> ModelProto:
    """Read an ONNX file with its weights, also those in files beside it.

    Sizes are compared before memory is allocated: a declared size costs nothing, only actual data does.

    Raises:
        UserError: it cannot be read, is no valid ONNX graph, or has more weights than free memory.
    """
    try:
        model = _parse(path)
        _check_tensors(model, path.parent)
        onnx.checker.check_model(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of keys that onnx (1.23) does not know
            external_data_helper.load_external_data_for_model(model, str(path.parent))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or one_line(error)}") from None
    except MemoryError:
        raise UserError(f"{path}: it does not fit into the memory of this machine") from None
    except Exception as error:  # noqa: BLE001 - protobuf and onnx (1.23) raise what Python has, and types of their own
        raise UserError(f"{path}: not a valid ONNX graph ({printable(one_line(error))})") from None
    return model


def weight_bytes(path: Path, model: ModelProto) -> int:
    """Return the bytes of a graph in its file and in other files."""
    return path.stat().st_size + sum(map(size_of, tensors(model)))


def _parse(path: Path) -> ModelProto:
    # A pipe without a writer would block.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise UserError("Is a directory" if stat.S_ISDIR(status.st_mode) else "not a file")
        if status.st_size > _MOST_BYTES:
            raise UserError(f"it has {status.st_size} bytes; an ONNX file can have at most {_MOST_BYTES}")
        model: ModelProto = ModelProto.FromString(file.read(status.st_size))
    if not model.graph.node:
        raise UserError("not a valid ONNX graph (it has no nodes)")
    return model


def _check_tensors(model: ModelProto, folder: Path) -> None:
    """Check all tensors. Data in other files must be beside this one, complete, and fit into memory.

    Raises:
        UserError: names the tensor and what is wrong.
    """
    external = 0
    for tensor in tensors(model):
        check_tensor(tensor)
        if external_data_helper.uses_external_data(tensor):
            external += _check_external(tensor, folder)
    free = psutil.virtual_memory().available
    if external > free:
        raise UserError(f"its weights take {external} bytes, but this machine has only {free} free")


def _check_external(tensor: TensorProto, folder: Path) -> int:
    """Check the file with a tensor's data, and return the number of bytes."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location, name = entries.get("location", ""), tensor.name[:200]
    file = folder / location
    what = f"the data of the tensor {name!r} is in {location[:200]!r}"
    if not location or "\0" in location or Path(location).is_absolute() or ".." in Path(location).parts:
        raise UserError(f"{what}, which is not a file beside the graph")
    try:
        outside = not file.resolve().is_relative_to(folder.resolve()) or file.is_symlink()
        status = file.stat()
    except (OSError, RuntimeError) as error:
        raise UserError(f"{what}: {getattr(error, 'strerror', None) or one_line(error)}") from None
    if outside or not stat.S_ISREG(status.st_mode):
        raise UserError(f"{what}, which is not a file beside the graph")
    numbers = [entries.get("offset", "0"), entries.get("length", str(size_of(tensor)))]
    if not all(number.isascii() and number.isdecimal() and len(number) < 20 for number in numbers):
        raise UserError(f"{what}, with an offset or a length that is not a whole number (0 or more)")
    offset, length = map(int, numbers)
    if length != size_of(tensor):
        raise UserError(f"{what}: it has {length} bytes, and its shape {list(tensor.dims)} needs {size_of(tensor)}")
    if offset + length > status.st_size:
        raise UserError(f"{what}, which ends at {status.st_size} bytes, before {offset + length}")
    return length
