"""The settings that ``ptq`` and ``qat`` share: the integers, and which layers stay in float."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from pydantic import ConfigDict, Field, with_config
from torch import nn
from typing_extensions import TypedDict  # pydantic takes typing's from Python 3.12 on

from optimize.models.module_patterns import around, classes, matching, unmatched
from optimize.quantization.gate import Gate
from optimize.quantization.graph.repeated_calls import called_layer
from optimize.quantization.observer_choice import Observer, spelled
from optimize.quantization.ranges import Granularity, WeightObserver
from optimize.quantization.targets import TargetName, check_target
from serve.runtime.errors import UserError

_T = TypeVar("_T")

#: Layers with a weight that is quantized.
_WEIGHTED = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)


@with_config(ConfigDict(extra="forbid"))
class Override(TypedDict, total=False):
    """Settings of single layers that differ from the general ones."""

    observer: Observer
    weights: Granularity
    weight_observer: WeightObserver


class Choices(Gate):
    """The settings that ``ptq`` and ``qat`` share.

    A pattern is a module's name (``layer4``, ``features.*.conv``) or its class's (``Linear``); ``*`` matches anything.
    It also covers everything inside the module.
    """

    target: TargetName = Field(
        default="auto",
        description="target of the integers: x86-vnni (8-bit weights; CPUs without VNNI refuse them), x86 (7-bit "
        "weights, for every x86 CPU), auto (this machine's CPU) or tensorrt (symmetric activations). "
        "torch has no kernels for tensorrt, so its program uses float arithmetic",
    )
    keep_float: tuple[str, ...] = Field(
        default=(),
        description="modules whose layers stay in float, as patterns of their names (layer4, features.*.conv) or "
        "classes (SqueezeExcitation); submodules are included",
    )
    overrides: dict[str, Override] = Field(
        default={},
        description="settings by pattern, as in keep_float: {classifier: {observer: minmax}}. ptq also allows "
        "weights and weight_observer: {stem: {weights: per-tensor}}. The last match wins",
    )

    def patterns(self) -> Mapping[str, Iterable[str]]:
        """Return the patterns of modules by setting."""
        return {"keep_float": self.keep_float, "overrides": self.overrides}


@dataclass(frozen=True)
class Chosen:
    """The choices, resolved for one model.

    Attributes:
        kept: names of modules in float.
        observers: observers of modules' outputs, by name.
        granularities: number of scales of their weights, by name.
        weight_observers: rules for the ranges of their weights, by name.
    """

    kept: frozenset[str] = frozenset()
    observers: Mapping[str, Observer] = field(default_factory=dict)
    granularities: Mapping[str, Granularity] = field(default_factory=dict)
    weight_observers: Mapping[str, WeightObserver] = field(default_factory=dict)

    def in_float(self, target: str) -> bool:
        """Tell whether the layer called ``target`` in a traced graph stays in float."""
        return any(name in self.kept for name in _owners(target))

    def observer(self, target: str) -> Observer | None:
        """Return the observer chosen for the output of the layer called ``target``, or None."""
        return _nearest(self.observers, target)

    def granularity(self, target: str) -> Granularity | None:
        """Return the number of scales chosen for its weight, or None."""
        return _nearest(self.granularities, target)

    def weight_observer(self, target: str) -> WeightObserver | None:
        """Return the rule chosen for the range of its weight, or None."""
        return _nearest(self.weight_observers, target)


def of_activations(overrides: Mapping[str, Override], why: str) -> None:
    """Refuse overrides of weights with the error of a validator.

    Raises:
        ValueError: there are some. ``why`` says what training does instead.
    """
    for pattern, own in overrides.items():
        if others := sorted(own.keys() - {"observer"}):
            raise ValueError(f"{pattern!r}: {' and '.join(others)}: only ptq has this setting; {why}")


def check_choices(build: Callable[[], nn.Module], choices: Choices) -> None:
    """Refuse a target that this machine cannot build, and patterns that match nothing in the model or change nothing.

    Args:
        build: makes the model. It is not called if nothing was chosen.
        choices: the user's choices.

    Raises:
        UserError: this CPU would saturate. Or patterns match no module (a line for each, with the nearest names). Or an
            override is for layers without weights, or for layers that stay in float.
    """
    check_target(choices.target)
    chosen = choices.patterns()
    if not any(chosen.values()):
        return
    model = build()
    modules = classes(model)
    title = re.sub(r"(?<!^)(?=[A-Z])", "-", type(choices).__name__).lower()
    wrong = [line for field, patterns in chosen.items() for line in unmatched(modules, f"{title}.{field}", patterns)]
    if faults := wrong or [f"{title}.overrides: {fault}" for fault in _idle(model, modules, choices)]:
        raise UserError("\n".join(faults))


def _idle(model: nn.Module, modules: Mapping[str, str], choices: Choices) -> Iterator[str]:
    """Yield the reasons why overrides would change nothing."""
    layers = [name for name, layer in model.named_modules() if isinstance(layer, _WEIGHTED)]
    kept = {name for pattern in choices.keep_float for name in matching(modules, pattern)}
    for pattern, settings in choices.overrides.items():
        names = set(matching(modules, pattern))
        covered = [layer for layer in layers if names.intersection(_owners(layer))]
        of_weights = sorted(settings.keys() & {"weights", "weight_observer"})
        if of_weights and not covered:
            yield f"{pattern!r} has no quantized weights, and so no {' and no '.join(of_weights)}"
        elif covered and all(kept.intersection(_owners(layer)) for layer in covered):
            yield f"{pattern!r} stays in float because of keep_float: settings of int8 have no effect there"


def resolve(build: Callable[[], nn.Module], choices: Choices) -> Chosen:
    """Resolve the choices for the model that ``build`` makes: with its original names, before any pass."""
    if not choices.keep_float and not choices.overrides:
        return Chosen()
    modules = classes(build())
    each = [(name, own) for pattern, own in choices.overrides.items() for name in matching(modules, pattern)]
    return Chosen(
        kept=frozenset(name for pattern in choices.keep_float for name in matching(modules, pattern)),
        observers={name: own["observer"] for name, own in each if "observer" in own},
        granularities={name: own["weights"] for name, own in each if "weights" in own},
        weight_observers={name: own["weight_observer"] for name, own in each if "weight_observer" in own},
    )


def named(build: Callable[[], nn.Module], patterns: Collection[str]) -> frozenset[str]:
    """Return the names of the modules that patterns match in the model that ``build`` makes."""
    modules = classes(build()) if patterns else {}
    return frozenset(name for pattern in patterns for name in matching(modules, pattern))


def covered(target: str, names: Collection[str]) -> bool:
    """Tell whether the layer called ``target`` in a traced graph, or a module around it, is among ``names``."""
    return any(name in names for name in _owners(target))


def overrides_note(watched: Iterable[str], chosen: Chosen) -> tuple[str, ...]:
    """Return a note of the number of ranges with their own observer, if any was chosen.

    Args:
        watched: for each range, the layer whose output has it.
        chosen: the choices.
    """
    if not chosen.observers:
        return ()
    found = Counter(chosen.observer(name) for name in watched)
    counts = sorted(f"{spelled(observer)} on {found[observer]}" for observer in set(chosen.observers.values()))
    return (f"observers chosen for single activations: {', '.join(counts)}",)


def weights_note(layers: Iterable[str], chosen: Chosen) -> tuple[str, ...]:
    """Return a note of the number of quantized layers with their own weight settings, if any were chosen."""
    if not chosen.granularities and not chosen.weight_observers:
        return ()
    found: Counter[str] = Counter()
    for layer in layers:
        found.update(own for own in (chosen.granularity(layer), chosen.weight_observer(layer)) if own is not None)
    counts = [f"{own} on {count}" for own, count in sorted(found.items())]
    return (f"weights of single layers: {', '.join(counts) or 'none of the quantized ones'}",)


def _nearest(chosen: Mapping[str, _T], target: str) -> _T | None:
    """Return the choice for a layer, or for the nearest module around it."""
    return next((chosen[name] for name in _owners(target) if name in chosen), None)


def _owners(target: str) -> Iterable[str]:
    """Return the module and those around it, from the inside. A second call of a layer counts as the layer."""
    return around(called_layer(target))
