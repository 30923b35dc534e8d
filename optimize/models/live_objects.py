"""Hashes live objects: the code that they run, and the values that they contain.

It is for modules, passes and observers from a notebook or a script, whose code may have no file. Code counts in
compiled form, so that comments and line numbers do not matter, with the functions, classes and values that it refers
to. Installed packages count by their version, this project by its sources.
"""

from __future__ import annotations

import contextlib
import copyreg
import dis
import enum
import functools
import hashlib
import importlib
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel
from torch import fx, nn

from optimize.models.neighbour_modules import found_in, is_installed, of_file, of_module, version_of
from optimize.store.sources import PROJECT, source_digest

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
#: Attributes of every `nn.Module` besides those of a user's class. Hooks are recognised by their names.
_BOOKKEEPING = frozenset(vars(nn.Module()))
#: Attributes that `fx.GraphModule` derives from its graph.
_OF_GRAPHS = frozenset(vars(fx.GraphModule(nn.Module(), fx.Graph()))) - {"_graph"}
#: Members of a class that do not describe its behaviour, or contain the class's address, as pydantic's (2.12) do.
_NAMELESS = re.compile(
    r"__(module|doc|dict|weakref|firstlineno|static_attributes|signature|class_vars|pydantic_\w+)__|_abc_impl"
)
#: The type of functions wrapped by functools.cache.
_CACHED = type(functools.cache(len))
#: A module that runs as a program cannot be imported again.
_MAIN = ("__main__", "__mp_main__")


def tensors_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 over names, types, shapes and values."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}\0{tensor.dtype}{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def live_digest(*values: object, home: str = "") -> str:
    """Return the SHA-256 over functions, classes or values, and all that they refer to. Equal code gives equal hashes.

    Args:
        values: the objects.
        home: a module whose package counts by its code even if it is installed, because it may be reinstalled with the
            same version.
    """
    walk = _Walk(home=home.partition(".")[0])
    for value in values:
        walk.value(value)
    return walk.end()


def module_digest(module: nn.Module) -> str:
    """Return the SHA-256 over a module's code, structure and attributes, without parameters and persistent buffers."""
    names: dict[nn.Module, str] = {}
    for name, part in module.named_modules():
        names[part] = name
    walk = _Walk(names)
    for name, part in module.named_modules(remove_duplicate=False):
        walk.say(f"module {name}")
        if names[part] != name:
            walk.say(f"is {names[part]}")
            continue
        walk.value(type(part))
        persistent = set(part._buffers) - part._non_persistent_buffers_set
        graphs = _OF_GRAPHS if isinstance(part, fx.GraphModule) else frozenset()
        for key, value in sorted(vars(part).items()):
            if key not in _BOOKKEEPING and key not in graphs:
                walk.say(key)
                walk.value(value)
            elif key.endswith("_hooks") and value:
                walk.say(key)
                walk.value(list(value.values()))
        for key, buffer in sorted(part._buffers.items()):
            if key not in persistent and buffer is not None:
                walk.say(f"{key} {tensors_digest({key: buffer})}")
        for key, tensor in (*part._parameters.items(), *part._buffers.items()):
            walk.say(f"{key} {None if tensor is None else tuple(tensor.shape)}")
    return walk.end()


class _Walk:
    """Hashes everything that it meets, each object once and in the order of meeting.

    Args:
        parts: the modules of the walk by name. Others count with their weights.
        home: the outermost package that never counts by its version.
    """

    def __init__(self, parts: Mapping[nn.Module, str] | None = None, home: str = "") -> None:
        self._digest = hashlib.sha256(f"python {sys.version_info[:2]}".encode())
        self._parts = parts or {}
        self._home = home
        # The number of each object. Keeps the objects alive, so that no id is used twice.
        self._met: dict[int, tuple[int, object]] = {}
        self._queue: deque[Any] = deque()  # not a recursion, because objects may be linked a thousand times
        self._modules: set[str] = set()
        self._project: set[str] = set()

    def say(self, text: str) -> None:
        self._digest.update(f"{len(text)}:{text}".encode())

    def end(self) -> str:
        while self._queue:
            self._composed(self._queue.popleft())
        self.say(source_digest(*self._project) if self._project else "")
        return self._digest.hexdigest()

    def value(self, value: Any) -> None:
        """Hash a value that code or an object contains."""
        if isinstance(value, _PLAIN):
            self.say(f"{type(value).__name__} {value!r}")
        elif isinstance(value, enum.Enum):
            self.say(repr(value))
            self.value(type(value))
        elif isinstance(value, torch.Tensor):
            self.say(tensors_digest({"": value}))
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            self.say(f"{value.dtype}{value.shape}{hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()}")
        elif type(value) in (tuple, frozenset):  # whether equal ones are the same object is the compiler's choice
            self._items(value)
        elif isinstance(value, CodeType):
            self._code(value)
        else:
            if id(value) not in self._met:
                self._met[id(value)] = len(self._met), value
                self._queue.append(value)
            self.say(f"object {self._met[id(value)][0]}")

    def _items(self, values: Iterable[Any]) -> None:
        items = sorted(values, key=_placeless) if isinstance(values, set | frozenset) else list(values)
        self.say(f"{type(values).__name__} {len(items)}")
        for item in items:
            self.value(item)

    def _composed(self, value: Any) -> None:
        if type(value) in (list, set):
            self._items(value)
        elif type(value) in (dict, MappingProxyType):
            self._items([part for entry in value.items() for part in entry])
        elif isinstance(value, functools.partial):
            self._items((value.func, value.args, value.keywords))
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, MethodType):
            self._items((value.__func__, value.__self__))
        elif isinstance(value, ModuleType):
            self._module(value.__name__)
        elif isinstance(value, fx.Graph):
            for node in value.nodes:
                self.say(f"{node.op} {node.name} {node.args} {node.kwargs}")
                self.value(node.target)
        elif isinstance(value, nn.Module):
            own = value not in self._parts
            self.say(module_digest(value) if own else f"module {self._parts[value]}")
            self.say(tensors_digest(value.state_dict()) if own else "")
        else:
            self._object(value)

    def _object(self, value: Any) -> None:
        """Hash any other object: its class and its pickle state, or its attributes if it refuses to be pickled."""
        named = getattr(value, "__qualname__", "")
        self.say(f"{type(value).__module__}.{type(value).__qualname__} {named}")
        if (known := _known(value)) is not None:
            self.say(known)
        elif isinstance(value, _CACHED):
            self.value(value.__wrapped__)
        elif not named:
            try:
                reduce = copyreg.dispatch_table.get(type(value))
                made = reduce(value) if reduce else value.__reduce_ex__(4)
            except Exception:  # noqa: BLE001 - a lock, a file, or whatever a user's class raises
                made = (type(value), getattr(value, "__dict__", None))
            self._items([list(part) if isinstance(part, Iterator) else part for part in made])

    def _class(self, kind: type) -> None:
        """Hash a class, its bases, and what their methods refer to."""
        for base in kind.__mro__:
            self.say(f"class {base.__qualname__}")
            if self._covered(base.__module__):
                continue
            if base is not kind:
                self.value(base)
                continue
            self._module(base.__module__)
            for name, member in sorted(vars(base).items()):
                if not _NAMELESS.fullmatch(name):
                    self.say(name)
                    self.value(_bare(member))
            for name, field in base.model_fields.items() if issubclass(base, BaseModel) else ():
                self.say(f"{name} {field.annotation}")
                self._items((field.default, field.default_factory, field.metadata))

    def _function(self, function: FunctionType) -> None:
        self.say(function.__qualname__)
        if self._covered(function.__module__):
            return
        self._module(function.__module__)
        self._items((function.__defaults__, function.__kwdefaults__))
        for cell in function.__closure__ or ():
            try:
                self.value(cell.cell_contents)
            except ValueError:  # not filled yet
                self.say("empty")
        self._code(function.__code__)
        attributes = _attributes(function.__code__)
        for name in _named(function.__code__, "LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            if name in function.__globals__:
                self.say(name)
                self.value(function.__globals__[name])
                self._taken(function.__globals__[name], attributes)
        for name in _named(function.__code__, "IMPORT_NAME"):
            self._module(name)
            if _is_projects(name):
                with contextlib.suppress(ImportError):  # the importing code will report it
                    self._taken(importlib.import_module(name), attributes)

    def _taken(self, module: object, attributes: frozenset[str]) -> None:
        """Hash what code uses of a module of this project, which may only re-export the name (`optimize`)."""
        if not isinstance(module, ModuleType) or not _is_projects(module.__name__):
            return
        for name in sorted(attributes.intersection(dir(module))):
            part = getattr(module, name)
            self.value(part)
            if isinstance(part, ModuleType) and part.__name__.startswith(f"{module.__name__}."):
                self._taken(part, attributes)

    def _code(self, code: CodeType) -> None:
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        self.say(f"{code.co_code.hex()} {code.co_exceptiontable.hex()} {code.co_names} {arguments} {code.co_flags}")
        self._items(code.co_consts)

    def _module(self, name: str) -> None:
        """Hash a Python module: for a user's own, its file and what it imports."""
        if self._covered(name) or name in self._modules or name in _MAIN:
            return
        self._modules.add(name)
        file = getattr(sys.modules.get(name), "__file__", None)
        with contextlib.suppress(OSError, ModuleNotFoundError):  # without a file, only the code counts
            found = of_file(Path(file)) if file and not found_in(name.partition(".")[0]) else of_module(name)
            self.say(found.fingerprint)

    def _covered(self, name: str | None) -> bool:
        """Return whether a module counts by its version (installed) or by its sources (of this project)."""
        top = (name or "builtins").partition(".")[0]
        if name and _is_projects(name):
            self._project.add(name)
            return True
        if top in (*_MAIN, self._home):
            return False
        if top in sys.stdlib_module_names:
            return True
        file = getattr(sys.modules.get(top), "__file__", None)
        places = [Path(file).resolve()] if file else found_in(top)  # it may not be imported yet
        if not places or not all(map(is_installed, places)):
            return False
        self.say(f"{top} {version_of(top)}")
        return True


def _is_projects(module: str) -> bool:
    return module.partition(".")[0] in PROJECT


def _known(value: Any) -> str | None:
    """Return the identity that an object of this project has: the fingerprint of data, the key of an artifact."""
    if not _is_projects(type(value).__module__):
        return None
    words = (getattr(value, "fingerprint", None), getattr(getattr(value, "artifact", value), "key", None))
    return next((word for word in words if isinstance(word, str)), None)


def _bare(member: Any) -> Any:
    if isinstance(member, staticmethod | classmethod):
        return member.__func__
    return [member.fget, member.fset] if isinstance(member, property) else member


def _placeless(item: object) -> str:
    """Return a sorting key for a member of a set: its representation without its address."""
    return f"{type(item).__qualname__} {re.sub(' at 0x[0-9a-f]+', '', repr(item))}"


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield code and the code inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _named(code: CodeType, *operations: str) -> list[str]:
    """Return the names that these operations of code use, each once, in order."""
    steps = (step for each in _codes(code) for step in dis.get_instructions(each))
    return list(dict.fromkeys(step.argval for step in steps if step.opname in operations))


def _attributes(code: CodeType) -> frozenset[str]:
    """Return all attribute names that code may use."""
    return frozenset(name for each in _codes(code) for name in each.co_names)
