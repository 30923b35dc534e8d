"""What a pass is: a typed config, what it takes and gives, and one function. And the registry of them.

A pass is one file of this package; importing the package finds it, so adding one means adding a file.
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


#: A network that is trained, and what nodes of the one that users know are called in it.
Learner = tuple[nn.Module, Mapping[str, str]]


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
        libraries: distributions whose versions its result depends on, whatever its settings.
        more_libraries: those that it calls besides, given its settings.
        reads_device: whether what it makes, or whether it makes anything, depends on the run's device. Where it
            only computes on the device, it does not.
        rebuild: for passes that yield a module: from the parent's eager module and an example input to a
            module of this one's structure, into which its weights are then loaded.
        resize: instead, where only the pass could find that structure out: from these and what the product says of it.
        timed: the executions that it times networks with, given its settings: its result then depends on the machine,
            which is in its key. What was measured is not, nor its noise: it is measured once, and the answer kept.
        leaves_zeros: whether zeros among the weights that it leaves are meant: whatever trains what descends from it
            keeps them; see `zeros_are_meant`.
        learner: for passes that train another graph than the parent's: that graph, and what those of the parent's nodes
            are called in it whose values it has. It is given the parent's eager module, the config, what builds the
            model as `check` is given it, and an example input.
        check: refuses a config that does not fit the model, with a `UserError`, before anything is made. It is given
            a function that builds the model, with random weights.
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
        """Why this pass cannot follow an artifact of ``kind``; None if it can."""
        if kind in self.accepts:
            return None
        accepted = " or ".join(KIND_NAMES[accepted] for accepted in sorted(self.accepts))
        return f"{self.name} takes {accepted}, not {KIND_NAMES[kind]}"

    def rebuilt(self, module: nn.Module, example: torch.Tensor, structure: Mapping[str, Any]) -> nn.Module:
        """A module of the structure that this pass gave to an artifact, from its parent's; with any weights."""
        if self.resize is not None:
            return self.resize(module, example, structure)
        assert self.rebuild is not None
        return self.rebuild(module, example)

    def source_digest(self) -> str:
        """SHA-256 of the pass's code and all that it refers to: changed code takes no old result from the cache."""
        makers = (self.config, self.apply, self.rebuild, self.resize, self.learner)
        return live_digest(*makers, home=self.config.__module__)


_REGISTRY: Registry[Pass[Any]] = Registry("pass", package="optimize.passes", group="optimize.passes")


def register(entry: Pass[C]) -> Pass[C]:
    """Add a pass to the registry; its name and its config type must be new, and it must be complete.

    One that is defined again, by a notebook's cell that is run again, takes the place of what it was.

    Raises:
        ValueError: the name or the config's type is taken, or a pass that yields modules does not say how they
            are rebuilt.
    """
    if any(entry.config is other.config for other in _REGISTRY.registered()):
        raise ValueError(f"a pass with config {entry.config.__name__} is registered already")
    if entry.yields in EAGER and entry.rebuild is None and entry.resize is None:
        raise ValueError(f"the pass {entry.name!r} yields modules: it must say how one is rebuilt (rebuild=…)")
    return _REGISTRY.register(entry, defined_at(entry.config))


def passes() -> dict[str, Pass[Any]]:
    """All passes by name."""
    return _REGISTRY.all()


def find_pass(name: str) -> Pass[Any]:
    """The pass called ``name``.

    Raises:
        UserError: there is none; the message names the nearest and lists all.
    """
    return _REGISTRY.find(name)


def zeros_are_meant(artifact: Artifact) -> bool:
    """Whether a pass in an artifact's lineage has set weights to zero, so that a training must leave them so."""
    known = passes()
    made_by = (known.get(ancestor.operation) for ancestor in artifact.card.lineage)
    return any(entry is not None and entry.leaves_zeros for entry in made_by)


def gradients_lost(artifact: Artifact, module: nn.Module, example: torch.Tensor) -> tuple[str, ...]:
    """A note of functions whose gradient of their own a training of ``module``, which comes of an artifact, has not.

    A network that was never traced is trained as it is written.
    """
    written = next(artifact.line()).module
    return lost_gradients(written(), example) if isinstance(module, fx.GraphModule) else ()


def pass_of(config: Config) -> Pass[Any]:
    """The pass that a config belongs to."""
    kind = type(config)
    for entry in passes().values():
        if kind is entry.config:
            return entry
        if defined_at(kind) == defined_at(entry.config):
            raise UserError(f"{kind.__name__} was defined again since these settings were made; make them again")
    raise UserError(f"{type(config).__name__} is not the config of a pass")
