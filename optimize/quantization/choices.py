"""What the user chooses for ``ptq`` and ``qat`` alike: the integers, and layer by layer what stays in float."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from pydantic import Field
from torch import fx, nn

from optimize.quantization.calls import called_layer
from optimize.quantization.gate import Gate
from optimize.quantization.observers import watched
from optimize.quantization.ranges import Observer
from optimize.quantization.targets import TargetName, check_target
from serve.runtime.errors import UserError, did_you_mean


class Choices(Gate):
    """The settings that ``ptq`` and ``qat`` share.

    A pattern is a module's name (``layer4``, ``features.*.conv``) or its class's (``Linear``); ``*`` stands for
    anything. It covers what lies beneath the module, too.
    """

    target: TargetName = Field(
        default="auto",
        description="what the integers are for: x86-vnni (activations of 8 bits; CPUs without VNNI refuse them), x86 "
        "(7 bits, for every x86 CPU), auto: this machine's CPU, or tensorrt (signed activations around 0; torch has no "
        "kernels for them, and its program computes what they mean in float arithmetic)",
    )
    keep_float: tuple[str, ...] = Field(
        default=(),
        description="modules whose layers stay in float, as patterns of their names (layer4, features.*.conv) or of "
        "their classes (SqueezeExcitation); what lies beneath is covered",
    )
    overrides: dict[str, dict[Literal["observer"], Observer]] = Field(
        default={},
        description="settings by pattern as in keep_float: {classifier: {observer: minmax}}; the last match holds",
    )


@dataclass(frozen=True)
class Chosen:
    """What choices mean for one model: names of modules in float, and observers by name of module."""

    kept: frozenset[str]
    observers: Mapping[str, Observer]

    def in_float(self, target: str) -> bool:
        """Whether the layer called ``target`` in a traced graph stays in float."""
        return any(name in self.kept for name in _owners(target))

    def observer(self, target: str) -> Observer | None:
        """How the range of what the layer called ``target`` gives is found; None where nothing was chosen."""
        return next((self.observers[name] for name in _owners(target) if name in self.observers), None)


def check_choices(build: Callable[[], nn.Module], choices: Choices) -> None:
    """Refuse a target that this machine cannot build, and patterns that match nothing in the model.

    Args:
        build: makes the model; not called where nothing was chosen.
        choices: what the user chose.

    Raises:
        UserError: this CPU would saturate, or patterns match no module; a line for each, with the nearest names.
    """
    check_target(choices.target)
    if not choices.keep_float and not choices.overrides:
        return
    modules = {name: type(layer).__name__ for name, layer in build().named_modules() if name}
    unmatched = []
    for field, patterns in (("keep_float", choices.keep_float), ("overrides", choices.overrides)):
        for pattern in patterns:
            if not _matching(modules, pattern):
                near = did_you_mean(pattern, [*modules, *modules.values()])
                unmatched.append(
                    f"{type(choices).__name__.lower()}.{field}: the model has no module whose name or class is "
                    f"{pattern!r}{near}"
                )
    if unmatched:
        raise UserError("\n".join(unmatched))


def resolve(build: Callable[[], nn.Module], choices: Choices) -> Chosen:
    """What ``choices`` mean for the model that ``build`` makes: as its code has it, before any pass."""
    if not choices.keep_float and not choices.overrides:
        return Chosen(frozenset(), {})
    modules = {name: type(layer).__name__ for name, layer in build().named_modules() if name}
    return Chosen(
        kept=frozenset(name for pattern in choices.keep_float for name in _matching(modules, pattern)),
        observers={
            name: settings["observer"]
            for pattern, settings in choices.overrides.items()
            if "observer" in settings
            for name in _matching(modules, pattern)
        },
    )


def overrides_note(prepared: fx.GraphModule, chosen: Chosen) -> tuple[str, ...]:
    """A note of how many ranges are found in a way of their own, if that was chosen."""
    if not chosen.observers:
        return ()
    found = Counter(chosen.observer(name) for name in watched(prepared).values())
    counts = [f"{name} on {found[name]}" for name in sorted(set(chosen.observers.values()))]
    return (f"observers chosen for single activations: {', '.join(counts)}",)


def _matching(modules: Mapping[str, str], pattern: str) -> list[str]:
    return [name for name, kind in modules.items() if fnmatchcase(name, pattern) or fnmatchcase(kind, pattern)]


def _owners(target: str) -> Iterable[str]:
    """The module itself and those around it, from the inside; a second call of a layer counts as the layer."""
    parts = called_layer(target).split(".")
    return (".".join(parts[:length]) for length in range(len(parts), 0, -1))
