"""Checks TorchScript files (``.pt``) before ``torch.jit.load``, which runs code from the file.

Their pickles are harmless. torch reads them with an unpickler in C++ that makes only tensors, containers and
TorchScript's own classes ("Unknown type name 'posix.system'"). Their *code* is not harmless. A class's ``__setstate__``
is called while the file loads, and TorchScript has operators that write and map files (``torch.save``,
``torch.from_file``: seen in 2.14). So the code is checked first.
"""

from __future__ import annotations

import ast
import pickletools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .torch_zip import Records, open_records, refused

_RECORDS = re.compile(
    r"(data|constants|traced_inputs)(\.pkl|/[0-9]+)|version|byteorder|\.data/(version|serialization_id)"
    r"|code/[A-Za-z0-9_/]+\.py(\.debug_pkl)?"
)
#: Operators that access files.
_OPERATORS_REFUSED = frozenset({"save", "from_file", "load_tensor"})
#: Allowed namespaces of other operators. ``torch.…`` is ATen's.
_OPERATORS = frozenset({"aten", "prim", "quantized", "quantized_decomposed", "mkldnn", "prepacked", "torchvision"})
#: Allowed C++ classes: packed weights.
_CLASSES = frozenset({"quantized", "rnn", "mkldnn"})
_GLOBALS = re.compile(
    r"__torch__(?!\.torch\.classes\.)[A-Za-z0-9_.]* [A-Za-z0-9_]+"
    r"|__torch__\.torch\.classes\.(quantized|rnn|mkldnn) [A-Za-z0-9_]+"
    r"|torch\._utils _rebuild_q?tensor(_v2)?|collections OrderedDict"
    r"|torch\.jit\._pickle (build_(int|tensor|double|bool)list|restore_type_tag)"
    r"|torch (per_(tensor|channel)_affine|device|[A-Z][A-Za-z0-9]*Storage)"
)


def load_script(path: Path, device: torch.device) -> Any:
    """Load a TorchScript module after `check_script`, in eval mode on ``device``.

    Raises:
        EngineError: the file is refused, or torch cannot read it.
    """
    check_script(path)
    try:
        module = torch.jit.load(str(path), map_location=device)  # type: ignore[no-untyped-call]
    except (RuntimeError, ValueError) as error:
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        raise refused(path, f"torch {torch.__version__} cannot read it ({lines[0].strip()[:120]})") from error
    return module.eval()


def check_script(path: Path) -> None:
    """Refuse a ``.pt`` file whose code could access anything but tensors.

    Raises:
        EngineError: the file has something that is not known to be harmless. The message names it.
    """
    records = open_records(path, compressed="code/")
    for name in sorted(records.names):
        if not _RECORDS.fullmatch(name):
            raise refused(path, f"it has the record {name}")
        faults = _code_faults(records, name) if name.endswith(".py") else ()
        if name.endswith(".pkl"):
            faults = _pickle_faults(records, name)
        for fault in faults:
            raise refused(path, f"its record {name} {fault}")


def _code_faults(records: Records, name: str) -> Iterator[str]:
    """Yield the faults in a code record: a subset of Python with the names ``torch``, ``ops`` and ``__torch__``."""
    try:
        tree = ast.parse(records.read(name).decode("ascii"))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        yield "is not readable code"
        return
    rooted = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield "imports"
        elif isinstance(node, ast.Attribute):
            root = node.value.id if isinstance(node.value, ast.Name) else None
            if node.attr in _OPERATORS_REFUSED:
                yield f"uses {root or '…'}.{node.attr}, which reaches files"
            elif root == "ops" and node.attr not in _OPERATORS:
                yield f"uses the operators {root}.{node.attr}"
            elif isinstance(node.value, ast.Attribute) and node.value.attr == "classes" and node.attr not in _CLASSES:
                yield f"uses the classes {node.attr}"
        elif isinstance(node, ast.Name) and node.id in ("torch", "ops", "__torch__") and id(node) not in rooted:
            yield f"uses {node.id} as a value"  # getattr(torch, …)
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "getattr"
            and any(
                not isinstance(a, ast.Constant) or a.value in {*_OPERATORS_REFUSED, "classes"} for a in node.args[1:]
            )
        ):
            yield "uses getattr on an object that reaches files"


def _pickle_faults(records: Records, name: str) -> Iterator[str]:
    try:
        for code, argument, _ in pickletools.genops(records.read(name)):
            if code.name in ("INST", "STACK_GLOBAL", "EXT1", "EXT2", "EXT4"):
                yield f"has the instruction {code.name}"
            elif code.name == "GLOBAL" and not _GLOBALS.fullmatch(str(argument)):
                yield f"names {str(argument)[:80]!r}"
    except (ValueError, IndexError):  # genops raises these for an unreadable pickle
        yield "is not a complete pickle"
