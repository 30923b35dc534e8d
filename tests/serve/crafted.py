"""Model files that run code, or reach other files, when they are loaded without being checked."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

MODEL = "models/model.json"
WEIGHTS = "data/weights/model_weights_config.json"
CONSTANTS = "data/constants/model_constants_config.json"
EXAMPLES = "data/sample_inputs/model.pt"

Records = dict[str, bytes]


class Payload:
    """An object whose pickle makes the file ``marker`` when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mknod, (self.marker,)


def pickled(marker: Path) -> bytes:
    stream = io.BytesIO()
    torch.save(Payload(marker), stream)
    return stream.getvalue()


def source(marker: Path) -> str:
    """The same as an expression of Python."""
    return f"__import__('os').mknod('{marker}')"


def records_of(path: Path) -> Records:
    with zipfile.ZipFile(path) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def write_records(path: Path, records: Mapping[str, bytes]) -> Path:
    """A zip as torch writes it; the writer adds its own version records."""
    writer = torch._C.PyTorchFileWriter(str(path))
    writer.set_min_version(6)
    for name, data in records.items():
        if name not in (".data/version", ".data/serialization_id", "byteorder"):
            writer.write_record(name, data, len(data))
    writer.write_end_of_file()
    return path


def edit(records: Records, name: str, change: Callable[[Any], None]) -> None:
    document = json.loads(records[name])
    change(document)
    records[name] = json.dumps(document).encode()


def pickled_weight(records: Records, marker: Path) -> None:
    edit(records, WEIGHTS, lambda document: next(iter(document["config"].values())).update(use_pickle=True))
    records["data/weights/weight_0"] = pickled(marker)


def pickled_constant(records: Records, marker: Path) -> None:
    entry = {"path_name": "tensor_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
    edit(records, CONSTANTS, lambda document: document["config"].update(c=entry))
    records["data/constants/tensor_0"] = pickled(marker)


def opaque_constant(records: Records, marker: Path) -> None:
    import pickle

    entry = {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
    edit(records, CONSTANTS, lambda document: document["config"].update(c=entry))
    records["data/constants/opaque_obj_0"] = pickle.dumps(Payload(marker))


def example_inputs(records: Records, marker: Path) -> None:
    records[EXAMPLES] = pickled(marker)


def legacy_weights(records: Records, marker: Path) -> None:
    records["data/weights/model.pt"] = pickled(marker)


def size_expression(records: Records, marker: Path) -> None:
    def change(document: Any) -> None:
        sizes = document["graph_module"]["graph"]["tensor_values"]["input"]["sizes"]
        sizes[0]["as_expr"]["expr_str"] = source(marker)

    edit(records, MODEL, change)


def guard(records: Records, marker: Path) -> None:
    edit(records, MODEL, lambda document: document["guards_code"].append(f"{source(marker)} or True"))


def called_function(records: Records, marker: Path) -> None:
    def change(document: Any) -> None:
        node = document["graph_module"]["graph"]["nodes"][-1]
        node["target"] = "torch.os.mknod"
        node["inputs"] = [{"name": "", "arg": {"as_string": str(marker)}, "kind": 1}]

    edit(records, MODEL, change)


def argument_name(records: Records, marker: Path) -> None:
    def change(document: Any) -> None:
        signature = document["graph_module"]["module_call_graph"][0]["signature"]
        signature["forward_arg_names"] = [f"input={source(marker)}"]

    edit(records, MODEL, change)


def node_name(records: Records, marker: Path) -> None:
    text = records[MODEL].decode()
    records[MODEL] = text.replace('"name": "relu"', json.dumps({"name": f"relu = {source(marker)}; a"})[1:-1]).encode()


def imported_module(records: Records, marker: Path) -> None:
    """A default dictionary names the module of its factory, which is imported."""
    (marker.parent / "crafted_module.py").write_text(f"{source(marker)}\n")
    context = {"default_factory_module": "crafted_module", "default_factory_name": "x", "dict_context": []}
    tree = {"type": "collections.defaultdict", "context": context, "children_spec": []}

    def change(document: Any) -> None:
        document["graph_module"]["module_call_graph"][0]["signature"]["out_spec"] = json.dumps([1, tree])

    edit(records, MODEL, change)


def native_code(records: Records, marker: Path) -> None:
    records["data/aotinductor/model/model.so"] = b"\x7fELF"


def extra_file(records: Records, marker: Path) -> None:
    records["extra/note"] = b"x"


#: Each way, and what the refusal says.
WAYS: dict[str, tuple[Callable[[Records, Path], None], str]] = {
    "a pickled weight": (pickled_weight, "asks for pickle"),
    "a pickled constant": (pickled_constant, "asks for pickle"),
    "a pickled object": (opaque_constant, "asks for pickle"),
    "pickled example inputs": (example_inputs, "sample_inputs"),
    "weights of the old format": (legacy_weights, r"has the record data/weights/model\.pt"),
    "the expression of a size": (size_expression, "has the size"),
    "a guard": (guard, "guards_code is not empty"),
    "a function that is no operator": (called_function, r"calls 'torch\.os\.mknod'"),
    "an argument's name": (argument_name, "forward_arg_names"),
    "a node's name": (node_name, "as name"),
    "a module that is imported": (imported_module, "have the structure"),
    "native code": (native_code, "has the record data/aotinductor"),
    "an extra file": (extra_file, "has the record extra/note"),
}
#: Those that torch 2.14 runs on loading the file, each by itself.
RUN_BY_TORCH = (
    "a pickled weight",
    "a pickled constant",
    "a pickled object",
    "pickled example inputs",
    "weights of the old format",
    "the expression of a size",
    "a module that is imported",
)
