"""The interface of a pass, and the registry of passes.

A pass has a typed config, the kinds of artifact that it takes and makes, and one function. Each pass is one file of
this package. Importing the package finds it, so adding a pass means adding a file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import fx, nn

from optimize.context import Context
from optimize.models.live_objects import live_digest
from optimize.store.artifact import EAGER, KIND_NAMES, Artifact, Kind, Product
from optimize.tracing.custom_gradients import lost_gradients
from serve.common.config import Config
from serve.runtime.card.execution import Execution
from serve.runtime.errors import UserError
from serve.runtime.registry import Registry, defined_at

C = TypeVar("C", bound=Config)


#: A network for training, and the names that it has for nodes of the parent's graph.
Learner = tuple[nn.Module, Mapping[str, str]]


@dataclass(frozen=True)
class Pass(Generic[C]):
    """One registered pass.

    Attributes:
        name: its name in recipes, on the command line, in folders and in reports.
        summary: one line for listings.
        config: the type of its settings.
        accepts: the kinds of artifact that it can follow.
        yields: the kind of artifact that it makes.
        apply: writes the result into a folder and describes it.
        data: the part of the data that it reads, for its cache key: a few images, calibration images, or all for
            training.
        libraries: distributions whose versions its result depends on, with any settings.
        more_libraries: further distributions that it calls with the given settings.
        reads_device: whether its result, or whether it can run at all, depends on the run's device. Mere computing on
            the device does not count.
        rebuild: for passes that yield a module. It takes the parent's eager module and an example input, and returns a
            module of the result's structure. The weights are then loaded into it.
        resize: replaces ``rebuild`` if only the pass could find out that structure. It also takes the product's
            description of the structure.
        timed: the executions with which it times networks, given its settings. Its result then depends on the machine,
            which becomes part of its key. The measured times do not: they are measured once, and the result is kept.
        leaves_zeros: whether its zero weights are intended. Every later training keeps them. See `zeros_are_meant`.
        learner: for passes that train another graph than the parent's. It takes the parent's eager module, the config,
            the function that builds the model (as ``check`` does) and an example input. It returns that graph, with the
            names of those nodes whose values the parent's graph also has.
        check: refuses a config that does not fit the model, with a `UserError`, before any work. It takes a function
            that builds the model with random weights.
    """

    name: str
    summary: str
    config: type[C]
    accepts: frozenset[Kind]
    yields: Kind
    apply: Callable[[Artifact, C, Context, Path], Product]
    data: Literal["example", "calibration", "training"] = "example"
    libraries: tuple[str, ...] = ("torch",)
    more_libraries: Callable[[C], tuple[str, ...]] = lambda config: ()
    reads_device: bool = False
    rebuild: Callable[[nn.Module, torch.Tensor], nn.Module] | None = None
    resize: Callable[[nn.Module, torch.Tensor, Mapping[str, Any]], nn.Module] | None = None
    timed: Callable[[C], tuple[Execution, ...]] = lambda config: ()
    leaves_zeros: bool = False
    learner: Callable[[nn.Module, C, Callable[[], nn.Module], torch.Tensor], Learner] | None = None
    check: Callable[[Callable[[], nn.Module], C], None] | None = None

    def refuses(self, kind: Kind) -> str | None:
        """Return why this pass cannot follow an artifact of ``kind``, or None if it can."""
        if kind in self.accepts:
            return None
        accepted = " or ".join(KIND_NAMES[accepted] for accepted in sorted(self.accepts))
        return f"{self.name} takes {accepted}, not {KIND_NAMES[kind]}"

    def rebuilt(self, module: nn.Module, example: torch.Tensor, structure: Mapping[str, Any]) -> nn.Module:
        """Return a module with the structure that this pass gives to a parent's module. Its weights are arbitrary."""
        if self.resize is not None:
            return self.resize(module, example, structure)
        assert self.rebuild is not None
        return self.rebuild(module, example)

    def source_digest(self) -> str:
        """Return the SHA-256 of the pass's code and all that it refers to. Changed code thus reuses no old result."""
        makers = (self.config, self.apply, self.rebuild, self.resize, self.learner)
        return live_digest(*makers, home=self.config.__module__)


_REGISTRY: Registry[Pass[Any]] = Registry("pass", package="optimize.passes", group="optimize.passes")


def register(entry: Pass[C]) -> Pass[C]:
    """Add a pass to the registry. It must be complete, and its name and config type must be new.

    A pass that is defined again replaces the old one, for example when a notebook cell runs again.

    Raises:
        ValueError: the name or the config type is taken, or a pass that yields modules does not say how to rebuild one.
    """
    if any(entry.config is other.config for other in _REGISTRY.registered()):
        raise ValueError(f"a pass with config {entry.config.__name__} is registered already")
    if entry.yields in EAGER and entry.rebuild is None and entry.resize is None:
        raise ValueError(f"the pass {entry.name!r} yields modules: it must define how to rebuild one (rebuild=…)")
    return _REGISTRY.register(entry, defined_at(entry.config))


def passes() -> dict[str, Pass[Any]]:
    """Return all passes by name."""
    return _REGISTRY.all()


def find_pass(name: str) -> Pass[Any]:
    """Return the pass called ``name``.

    Raises:
        UserError: there is none. The message names the nearest and lists all.
    """
    return _REGISTRY.find(name)


def zeros_are_meant(artifact: Artifact) -> bool:
    """Tell whether a pass in an artifact's lineage set weights to zero on purpose, so that training must keep them."""
    known = passes()
    made_by = (known.get(ancestor.operation) for ancestor in artifact.card.lineage)
    return any(entry is not None and entry.leaves_zeros for entry in made_by)


def gradients_lost(artifact: Artifact, module: nn.Module, example: torch.Tensor) -> tuple[str, ...]:
    """Return a note on custom gradients of an artifact's original network that a training of ``module`` loses.

    A network that was never traced is trained as it is, and loses none.
    """
    written = next(artifact.line()).module
    return lost_gradients(written(), example) if isinstance(module, fx.GraphModule) else ()


def pass_of(config: Config) -> Pass[Any]:
    """Return the pass that a config belongs to."""
    kind = type(config)
    for entry in passes().values():
        if kind is entry.config:
            return entry
        if defined_at(kind) == defined_at(entry.config):
            raise UserError(f"{kind.__name__} was redefined after these settings were made; make them again")
    raise UserError(f"{type(config).__name__} is not the config of a pass")
