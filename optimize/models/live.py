"""What a live object depends on, as a hash: the code that it runs, and the plain values that it holds.

For modules that were made in a notebook or a script, whose class may have no file of its own. Code counts as compiled,
so that comments and line numbers do not matter, with the functions, classes and constants that it refers to; what is
installed counts by its version.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from optimize.models.neighbours import is_installed, of_file, version_of

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, enum.Enum)
#: What `nn.Module` keeps beside what a class of the user's sets; hooks are told apart by their names.
_BOOKKEEPING = frozenset(vars(nn.Module()))


def tensors_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over names, types, shapes and values."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}\0{tensor.dtype}{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def module_digest(module: nn.Module) -> str:
    """SHA-256 over a module's code, structure and plain attributes, without its parameters and persistent buffers."""
    walk = _Walk()
    names: dict[nn.Module, str] = {}
    for name, part in module.named_modules(remove_duplicate=False):
        walk.say(f"module {name}")
        if names.setdefault(part, name) != name:
            walk.say(f"is {names[part]}")
            continue
        walk.code_of(type(part))
        if isinstance(part, torch.fx.GraphModule):
            walk.say(part.code)
        persistent = set(part._buffers) - part._non_persistent_buffers_set
        for key, value in sorted(vars(part).items()):
            if key not in _BOOKKEEPING:
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
    return walk.digest.hexdigest()


class _Walk:
    """Takes everything that is met into one hash, each object once."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256(f"python {sys.version_info[:2]}".encode())
        # As which it was met; holds the objects, so that no id is given twice.
        self.met: dict[int, tuple[int, Any]] = {}
        self.modules: set[str] = set()

    def say(self, text: str) -> None:
        self.digest.update(f"{len(text)}:{text}".encode())

    def value(self, value: Any) -> None:
        """A value that code or a module holds."""
        if isinstance(value, _PLAIN):
            self.say(f"{type(value).__name__} {value!r}")
        elif id(value) in self.met:
            self.say(f"met {self.met[id(value)][0]}")
        elif isinstance(value, torch.Tensor):
            self.say(tensors_digest({"": value}))
        elif isinstance(value, np.ndarray):
            self.say(f"{value.dtype}{value.shape}{hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()}")
        else:
            self._meet(value)
            self._composed(value)

    def _meet(self, value: Any) -> None:
        self.met[id(value)] = len(self.met), value

    def _composed(self, value: Any) -> None:
        if isinstance(value, list | tuple | set | frozenset):
            self.say(type(value).__name__)
            for item in sorted(value, key=repr) if isinstance(value, set | frozenset) else value:
                self.value(item)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                self.value(key)
                self.value(item)
        elif isinstance(value, functools.partial):
            self.value([value.func, value.args, value.keywords])
        elif isinstance(value, type):
            self.code_of(value)
        elif isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, MethodType):
            self.value(value.__func__)
            self.value(value.__self__)
        elif isinstance(value, ModuleType):
            self._module(value.__name__)
        elif isinstance(value, CodeType):
            self._code(value)
        else:
            self.say(f"{type(value).__module__}.{type(value).__qualname__} {getattr(value, '__qualname__', '')}")
            # A submodule is walked in its own place, with its name.
            if not isinstance(value, nn.Module) and not self._installed(type(value).__module__):
                self.value(getattr(value, "__dict__", None))

    def code_of(self, kind: type) -> None:
        """A class, its bases, and what their methods refer to; of installed ones the version."""
        for base in kind.__mro__:
            self.say(f"class {base.__qualname__}")
            if self._installed(base.__module__):
                continue
            if id(base) in self.met:
                self.say(f"met {self.met[id(base)][0]}")
                continue
            self._meet(base)
            self._module(base.__module__)
            for name, member in sorted(vars(base).items()):
                if name not in ("__module__", "__doc__", "__dict__", "__weakref__", "__firstlineno__"):
                    self.say(name)
                    self.value(_bare(member))

    def _function(self, function: FunctionType) -> None:
        self.say(function.__qualname__)
        if self._installed(function.__module__):
            return
        self.value([function.__defaults__, function.__kwdefaults__])
        for cell in function.__closure__ or ():
            try:
                self.value(cell.cell_contents)
            except ValueError:  # not filled yet
                self.say("empty")
        self._code(function.__code__)
        for name in _names(function.__code__):
            if name in function.__globals__:
                self.say(name)
                self.value(function.__globals__[name])

    def _code(self, code: CodeType) -> None:
        self.say(f"{code.co_code.hex()} {code.co_names} {code.co_varnames[: code.co_argcount]}")
        for constant in code.co_consts:
            self.value(constant)

    def _module(self, name: str) -> None:
        """A Python module: of the user's own its file and what it imports; of an installed one the version."""
        if name in self.modules or self._installed(name):
            return
        self.modules.add(name)
        file = getattr(sys.modules.get(name), "__file__", None)
        if name != "__main__" and file and Path(file).is_file():
            self.say(of_file(Path(file)).fingerprint)

    def _installed(self, name: str | None) -> bool:
        """Whether a module is installed, whose version is then said."""
        top = (name or "builtins").partition(".")[0]
        if top in sys.stdlib_module_names and top != "__main__":
            return True
        file = getattr(sys.modules.get(top), "__file__", None)
        if top == "__main__" or not file or not is_installed(Path(file).resolve()):
            return False
        self.say(f"{top} {version_of(top)}")
        return True


def _bare(member: Any) -> Any:
    if isinstance(member, staticmethod | classmethod):
        return member.__func__
    return [member.fget, member.fset] if isinstance(member, property) else member


def _names(code: CodeType) -> Iterator[str]:
    """Names that code and the code inside of it refer to."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
