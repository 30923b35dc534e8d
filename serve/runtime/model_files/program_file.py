"""Opens ``torch.export`` programs (``.pt2``) that have nothing but weights and a graph of known operators.

``torch.export.load`` (2.11 to 2.14) trusts its file in many ways:

- It unpickles records that say ``use_pickle``, example inputs and custom objects.
- It loads native code from ``data/aotinductor``.
- It evaluates sizes by ``sympy.sympify``, which is ``eval``.
- It executes Python source made of ``guards_code`` and the names of nodes and arguments.
- It accepts as an operator any attribute that can be reached from ``torch`` (``torch.os.system``).
- It imports the module that a ``defaultdict`` in a tree spec names.

So everything in the file is checked first against a list of what is allowed. Allowed are the records that
`torch.export.save` writes for a plain program, and in them only strings that can be nothing but names.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import json
import re
import sys
import threading
import types
import typing
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .torch_zip import Records, open_records, refused

_MODEL = "models/model.json"
_WEIGHTS = "data/weights/model_weights_config.json"
_CONSTANTS = "data/constants/model_constants_config.json"
_EXAMPLES = "data/sample_inputs/model.pt"

# Record → its required content. None: it is checked further below, or (the identity) nobody reads it.
_RECORDS: dict[str, bytes | None] = {
    _MODEL: None,
    _WEIGHTS: None,
    _CONSTANTS: None,
    # Written even if there are none. torch unpickles this record, since 2.9 after a first try without pickle.
    _EXAMPLES: b"",
    "archive_format": b"pt2",
    "archive_version": b"0",
    "byteorder": sys.byteorder.encode(),
    ".data/version": None,
    ".data/serialization_id": None,
}
_PAYLOADS = {
    _WEIGHTS: ("data/weights/", re.compile(r"weight_[0-9]+")),
    _CONSTANTS: ("data/constants/", re.compile(r"tensor_[0-9]+")),
}

_OPENING = threading.RLock()

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PATH = re.compile(r"((?!__)[A-Za-z0-9_\-]+([.@](?!__)[A-Za-z0-9_\-]+)*)?")
_LINE = re.compile(r"[ -~]*")
#: Allowed strings by their key. Under any other key a string must be a name or empty.
_STRINGS = {
    "parameter_name": _PATH,
    "buffer_name": _PATH,
    "tensor_constant_name": _PATH,
    "fqn": _PATH,
    "as_float": re.compile(r"-?Infinity|NaN"),
    "as_string": re.compile(r"[A-Za-z0-9_ ,.:>\-]*"),  # an equation of einsum, a mode of pad
    "torch_version": re.compile(r"[0-9A-Za-z.+\-]*"),
    "nn_module_stack": _LINE,  # stored beside the node and compared; never turned into source, like the next
    "torch_fn": _LINE,
}
#: Parts of a program that this project never writes.
_FOREIGN = frozenset({"as_custom_obj", "custom_obj", "as_operator", "constant_input", "stack_trace", "from_node"})
_EMPTY = frozenset({"guards_code", "custom_obj_values", "treespec_namedtuple_fields"})

_OPERATOR = re.compile(r"torch\.ops\.(aten|quantized_decomposed|torchvision)\.([A-Za-z0-9_]+)\.([A-Za-z0-9_]+)")
#: ATen operators that access files.
_OPERATORS_REFUSED = frozenset({"from_file", "save"})
#: Arithmetic on sizes, and the blocks for ``torch.no_grad``, ``torch.autocast`` and ``torch.cond``.
_FUNCTION = re.compile(
    r"_operator\.(add|sub|mul|floordiv|truediv|mod|neg|pos|eq|ne|lt|le|gt|ge|and_|or_|not_)|math\.(ceil|floor|trunc)"
    r"|torch\.sym_(float|int|max|min|not|ite)"
    r"|torch\.ops\.higher_order\.(wrap_with_set_grad_enabled|wrap_with_autocast|cond)"
)

_EXPRESSION = re.compile(r"[A-Za-z0-9_'(), =\-]{1,4096}")
_SYMBOL = re.compile(r"[A-Za-z]+[0-9]+")
#: Functions in a size's expression. Powers are not allowed: a tower of them never ends.
_TERM = re.compile(
    "Integer|Rational|Add|Mul|Max|Min|Abs|Mod|FloorDiv|CeilDiv|CleanDiv|PythonMod|ModularIndexing|IntTrueDiv|ToFloat"
    "|FloorToInt|CeilToInt|TruncToInt|RoundToInt|Identity|Equality|Unequality|LessThan|GreaterThan|StrictLessThan"
    "|StrictGreaterThan|And|Or|Not"
)


def load_program(path: Path) -> torch.export.ExportedProgram:
    """Load a program after `check_program`. The project opens programs only in this way.

    Raises:
        EngineError: the file is refused, or torch cannot read it.
    """
    check_program(path)
    # Not torch.export.load: if this fails, that tries the format of torch 2.7 with its pickles.
    from torch.export.pt2_archive._package import load_pt2

    try:
        with _types_read_once(), warnings.catch_warnings():
            # torch 2.11 creates read-only tensors over bytes, and warns of that.
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            return load_pt2(str(path)).exported_programs["model"]
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise refused(
            path, f"torch {torch.__version__} cannot read it ({type(error).__name__}: {lines[0][:120]})"
        ) from error


@contextlib.contextmanager
def _types_read_once() -> Iterator[None]:
    """Cache the types of a program's fields while torch reads it.

    torch (2.11 to 2.14) evaluates their annotations again for each node, argument and size of a graph. That is a third
    of the time to open ResNet-50. One thread opens at a time.
    """
    from torch._export.serde import schema, serialize

    def hints(kind: type, **given: Any) -> dict[str, Any]:
        return (
            _hints(kind)
            if given.keys() == {"globalns"} and given["globalns"] is vars(schema)
            else typing.get_type_hints(kind, **given)
        )

    own = vars(serialize)
    with _OPENING:
        before = own.get("typing", typing)
        own["typing"] = types.SimpleNamespace(**{**vars(typing), "get_type_hints": hints})
        try:
            yield
        finally:
            own["typing"] = before


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    from torch._export.serde import schema

    return typing.get_type_hints(kind, globalns=vars(schema))


def program_on(path: Path, device: torch.device) -> torch.export.ExportedProgram:
    """Load a program like `load_program`, with weights and constants on a device."""
    program = load_program(path)
    if device.type == "cpu":
        return program
    from torch.export.passes import move_to_device_pass

    if str(device) == "cuda":
        # A program asserts the devices of its conversions, and "cuda" is not equal to a tensor's "cuda:0".
        device = torch.device("cuda", torch.cuda.current_device())
    moved = move_to_device_pass(program, str(device))
    # torch 2.11 to 2.14 rewrites the graphs, but not the Python code generated from them (pytorch 185105).
    for module in moved.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            module.recompile()
    return moved


def save_program(program: torch.export.ExportedProgram, path: Path) -> None:
    """Write an exported program without the parts that do not belong in an artifact.

    ``torch.export.save`` (2.11 to 2.14) also writes the example inputs. They are images of the user's data, at 224x224
    pixels 600 kB each.

    Raises:
        EngineError: `load_program` would refuse the program.
        OSError: the file cannot be written.
    """
    for module in program.graph_module.modules():  # also the blocks under torch.no_grad and similar
        if isinstance(module, torch.fx.GraphModule):
            module.meta.pop("custom", None)  # torch's notes for its own compiler
            for node in module.graph.nodes:
                node.meta.pop("stack_trace", None)  # source paths of the machine that built it
                node.meta.pop("from_node", None)  # memory addresses, which differ in each run
                node.meta.pop("custom", None)
    program.example_inputs = None
    # Python source that `ExportedProgram.module` executes. The input's shape is checked without it.
    program._guards_code = []
    memory = io.BytesIO()  # torch's own writer (2.14) ends the process if the disk is full
    torch.export.save(program, memory)
    path.write_bytes(memory.getbuffer())
    check_program(path)


def check_program(path: Path) -> None:
    """Refuse a ``.pt2`` file that could do more on loading than become a graph and its weights.

    The operators are torch's own. What the graph computes, and how much memory that takes, is not checked.

    Raises:
        EngineError: the file has something that is not known to be harmless. The message names it.
    """
    records = open_records(path)
    try:
        payloads = {name for config in _PAYLOADS for name in _payloads(records, config)}
        for name in sorted(records.names - payloads):
            if name not in _RECORDS:
                raise refused(path, f"it has the record {name}")
            expected = _RECORDS[name]
            if expected is not None and records.read(name) != expected:
                raise refused(path, f"its record {name} is not {expected!r}")
        for fault in _program_faults(_json(records, _MODEL)):
            raise refused(path, fault)
    except RecursionError:
        raise refused(path, "it is nested too deeply") from None


def _json(records: Records, name: str) -> Any:
    try:
        return json.loads(records.read(name).decode("utf-8"))
    except ValueError:
        raise refused(records.path, f"its record {name} is not JSON") from None


def _payloads(records: Records, config: str) -> Iterator[str]:
    """Yield the tensor records that a configuration names. Each must be plain bytes."""
    folder, pattern = _PAYLOADS[config]
    document = _json(records, config)
    tensors = document.get("config") if isinstance(document, dict) else None
    if not isinstance(tensors, dict) or set(document) != {"config"}:
        raise refused(records.path, f"its record {config} is not a list of tensors")
    for name, entry in tensors.items():
        if not isinstance(entry, dict) or entry.get("use_pickle") is not False:
            raise refused(records.path, f"the tensor {name[:80]!r} asks for pickle, which runs code")
        record = entry.get("path_name")
        if not isinstance(record, str) or not pattern.fullmatch(record) or folder + record not in records.names:
            raise refused(records.path, f"the tensor {name[:80]!r} is not stored in a record of tensors")
        if not _PATH.fullmatch(name):
            raise refused(records.path, f"a tensor has the name {name[:80]!r}")
        for fault in _faults({key: value for key, value in entry.items() if key != "path_name"}, "config"):
            raise refused(records.path, fault)
        yield folder + record


def _program_faults(program: Any) -> Iterator[str]:
    """Yield the parts of a program's document that are not allowed, first those that `_faults` cannot see."""
    module = program.get("graph_module") if isinstance(program, dict) else None
    graph = module.get("graph") if isinstance(module, dict) else None
    signature = module.get("signature") if isinstance(module, dict) else None
    if not isinstance(graph, dict) or not isinstance(signature, dict):
        yield f"its record {_MODEL} has no graph"
        return
    inputs = [*_list(graph.get("inputs")), *(spec["user_input"].get("arg") for spec in _user_inputs(signature))]
    if any(not isinstance(entry, dict) or set(entry) != {"as_tensor"} for entry in inputs):
        yield "it has inputs that are not tensors"
    yield from _faults(program, "")


def _user_inputs(signature: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for spec in _list(signature.get("input_specs")):
        if isinstance(spec, dict) and isinstance(spec.get("user_input"), dict):
            yield spec


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _faults(value: Any, key: str) -> Iterator[str]:
    """Yield everything in a JSON value that is not allowed there. ``key`` is the closest key above it."""
    if isinstance(value, dict):
        for name, item in value.items():
            if name in _FOREIGN:
                yield f"its graph has {name}"
            elif name in _EMPTY and item:
                yield f"its {name} is not empty"
            # Tensors are named by their modules, operator sets and symbols by short names.
            elif not _NAME.fullmatch(name):
                yield f"its graph has the name {name[:80]!r}"
            else:
                yield from _faults(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from _faults(item, key)
    elif isinstance(value, str) and (fault := _string_fault(value, key)) is not None:
        yield fault


def _string_fault(text: str, key: str) -> str | None:
    if key == "target":
        return None if _is_operator(text) else f"its graph calls {text[:80]!r}"
    if key == "expr_str":
        return None if _is_expression(text) else f"its graph has the size {text[:80]!r}"
    if key in ("in_spec", "out_spec"):
        return None if _is_plain_tree(text) else f"its arguments have the structure {text[:80]!r}"
    pattern = _STRINGS.get(key)
    whole = pattern.fullmatch(text) if pattern is not None else not text or _NAME.fullmatch(text)
    return None if whole else f"its graph has {text[:80]!r} as {key}"


def _is_operator(target: str) -> bool:
    """Whether a node's target is an operator of torch, not just something callable."""
    if _FUNCTION.fullmatch(target):
        return True
    found = _OPERATOR.fullmatch(target)
    if found is None or found[2] in _OPERATORS_REFUSED:
        return False
    try:
        resolved = getattr(getattr(getattr(torch.ops, found[1]), found[2]), found[3])
    except (AttributeError, RuntimeError):
        return True  # from a library that is not loaded: torch will report it
    return isinstance(resolved, torch._ops.OpOverload)


def _is_expression(text: str) -> bool:
    """Whether a size has the form that sympy prints, for example ``Mul(Integer(2), Symbol('s77', positive=True))``."""
    if not _EXPRESSION.fullmatch(text):
        return False
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError):
        return False
    return _is_term(tree)


def _is_term(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.USub) and _is_term(node.operand)
    if isinstance(node, ast.Constant):
        return type(node.value) is int
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return False
    if node.func.id == "Symbol":
        names = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
        facts = [word.value.value for word in node.keywords if word.arg and isinstance(word.value, ast.Constant)]
        return (
            len(node.args) == len(names) == 1
            and isinstance(names[0], str)
            and _SYMBOL.fullmatch(names[0]) is not None
            and len(facts) == len(node.keywords)
            and all(isinstance(fact, bool) for fact in facts)
        )
    known = _TERM.fullmatch(node.func.id) is not None
    return known and not node.keywords and all(_is_term(argument) for argument in node.args)


def _is_plain_tree(text: str) -> bool:
    """Whether a tree spec has only tuples, lists, dictionaries with names as keys, and leaves."""
    try:
        version, tree = json.loads(text)
    except (ValueError, TypeError):
        return False
    return version == 1 and _is_plain_node(tree)


def _is_plain_node(node: Any) -> bool:
    if not isinstance(node, dict) or set(node) != {"type", "context", "children_spec"}:
        return False
    kind, context, children = node["type"], node["context"], node["children_spec"]
    if kind is None:
        return context is None and children == []
    plain = (kind in ("builtins.tuple", "builtins.list") and context == "null") or (
        kind == "builtins.dict" and isinstance(context, str) and re.fullmatch(r'\[("\w+"(, "\w+")*)?\]', context)
    )
    return bool(plain) and isinstance(children, list) and all(_is_plain_node(child) for child in children)
