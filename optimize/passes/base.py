"""What a pass is: a typed config, what it takes and gives, and one function. And the registry of them.

A pass is one file of this package; importing the package finds it, so adding one means adding a file.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import nn

from optimize.artifact import KIND_NAMES, Artifact, Kind, Product
from optimize.config import Config
from optimize.context import Context
from optimize.errors import UserError

C = TypeVar("C", bound=Config)


@dataclass(frozen=True)
class Pass(Generic[C]):
    """One registered pass.

    Attributes:
        name: the word for it in recipes, on the command line, in folders and in reports.
        summary: one line for listings.
        config: the type of its settings.
        accepts: kinds of artifact that it can follow.
        yields: the kind that it makes.
        apply: writes the result into a folder and says what it is.
        data: what it reads of the data, for its cache key: nothing, a few images, or all for training.
        libraries: distributions whose versions its result depends on.
        rebuild: for passes that yield a module: from the parent's eager module and an example input to a
            module of this one's structure, into which its weights are then loaded.
    """

    name: str
    summary: str
    config: type[C]
    accepts: frozenset[Kind]
    yields: Kind
    apply: Callable[[Artifact, C, Context, Path], Product]
    data: Literal["example", "calibration", "training"] = "example"
    libraries: tuple[str, ...] = ("torch",)
    rebuild: Callable[[nn.Module, torch.Tensor], nn.Module] | None = None

    def refuses(self, kind: Kind) -> str | None:
        """Why this pass cannot follow an artifact of ``kind``; None if it can."""
        if kind in self.accepts:
            return None
        accepted = " or ".join(KIND_NAMES[accepted] for accepted in sorted(self.accepts))
        return f"{self.name} takes {accepted}, not {KIND_NAMES[kind]}"

    def source_digest(self) -> str:
        """SHA-256 of the pass's source and of what passes share: changed code takes no old result from the cache."""
        return hashlib.sha256(Path(inspect.getfile(self.apply)).read_bytes() + _shared_source()).hexdigest()


@functools.cache
def _shared_source() -> bytes:
    root = Path(__file__).parents[1]
    shared = [
        root / name for name in ("artifact.py", "conversion.py", "onnx_graph.py", "training.py", "passes/base.py")
    ]
    return b"".join(path.read_bytes() for path in (*shared, *sorted((root / "quantization").glob("*.py"))))


_REGISTRY: dict[str, Pass[Any]] = {}


def register(entry: Pass[C]) -> Pass[C]:
    """Add a pass to the registry; its name and its config type must be new."""
    if entry.name in _REGISTRY or any(entry.config is other.config for other in _REGISTRY.values()):
        raise ValueError(f"a pass named {entry.name!r} or with config {entry.config.__name__} is registered already")
    _REGISTRY[entry.name] = entry
    return entry


def passes() -> dict[str, Pass[Any]]:
    """All passes by name."""
    package = importlib.import_module("optimize.passes")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"optimize.passes.{module.name}")
    return dict(sorted(_REGISTRY.items()))


def find_pass(name: str) -> Pass[Any]:
    """The pass called ``name``.

    Raises:
        UserError: there is none; the message names the nearest and lists all.
    """
    known = passes()
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UserError(f"unknown pass {name!r}: {hint}the passes are {', '.join(known)}")


def pass_of(config: Config) -> Pass[Any]:
    """The pass that a config belongs to."""
    for entry in passes().values():
        if type(config) is entry.config:
            return entry
    raise UserError(f"{type(config).__name__} is not the config of a pass")
