"""Which observer a setting means: one of `OBSERVERS` or of an installed distribution by its name, or a class.

What is not the project's is written down with a digest of its code: ``clip@1f2e3d4c5b6a`` in keys, cards and reports.
"""

from __future__ import annotations

import functools
import re
import warnings
from dataclasses import dataclass
from typing import Annotated, Any, Final

import torch
from pydantic import PlainSerializer, PlainValidator
from torch.ao.quantization.observer import ObserverBase

from optimize.models.live_objects import live_digest
from optimize.quantization.ranges import OBSERVERS
from serve.runtime.errors import did_you_mean, one_line
from serve.runtime.registry import Registry, defined_at

#: A class of observers, or what its ``with_args`` gives.
Maker = Any
#: The setting that tries all of `OBSERVERS`.
AUTO: Final = "auto"

_NAME = re.compile(r"[a-z0-9][a-z0-9.-]*")
_DIGITS = 12  # of a digest that are written down
#: What `torch.ao.quantization.ObserverBase.with_args` makes; torch (2.11 to 2.14) does not export it.
_Partial: Any = type(ObserverBase.with_args())
#: What an observer is tried with: a range of integers as `Target` has them, and an activation ``(N, C, H, W)``.
_RANGE: dict[str, Any] = {"dtype": torch.quint8, "quant_min": 0, "quant_max": 255}
_SHAPE = (2, 4, 4, 2)

#: What was given in this process, by how it is written down: what was written is read again, as a search does.
_given: dict[str, Observer] = {}


@dataclass(frozen=True)
class ObserverType:
    """An observer of activations by name.

    Attributes:
        name: the word for it in recipes and on the command line.
        make: a class that derives from torch.ao's ``ObserverBase``, or its ``with_args(…)``; see `check_maker`.
        summary: one line: which range it finds.
    """

    name: str
    make: Maker
    summary: str


_REGISTRY: Registry[ObserverType] = Registry("observer", package=__name__, group="optimize.observers")


def register(entry: ObserverType) -> ObserverType:
    """Add an observer to the registry.

    Raises:
        ValueError: its name is taken or not legal, or it is no observer of activations.
    """
    if not _NAME.fullmatch(entry.name):
        raise ValueError(f"the observer {entry.name!r} must be called by a-z, 0-9, '-' and '.'")
    if entry.name in (*OBSERVERS, AUTO):
        raise ValueError(f"an observer named {entry.name!r} is registered already")
    check_maker(entry.make)
    return _REGISTRY.register(entry, defined_at(_kind(entry.make)))


def maker(observer: Observer) -> Maker:
    """What makes observers of a kind: called with ``dtype``, ``quant_min`` and ``quant_max``, and asked `with_args`."""
    if not isinstance(observer, str):
        return observer
    return OBSERVERS[observer] if observer in OBSERVERS else _REGISTRY.find(observer).make


def spelled(observer: Observer) -> str:
    """An observer in words: its name, and what is not the project's with its settings and a digest of its code."""
    if isinstance(observer, str) and observer in (*OBSERVERS, AUTO):
        return observer
    make = maker(observer)
    name = observer if isinstance(observer, str) else _called(make)
    # What is registered is found by its distribution, of which a new installation may have the old version.
    home = _kind(make).__module__ if isinstance(observer, str) else ""
    return f"{name}@{live_digest(make, home='' if home.startswith('torch.') else home)[:_DIGITS]}"


def check_maker(make: Maker) -> None:
    """See that something makes observers of activations, by trying it.

    Raises:
        ValueError: it does not derive from torch.ao's ``ObserverBase``, fails, or gives more than one scale.
    """
    kind = _kind(make)
    if not (isinstance(kind, type) and issubclass(kind, ObserverBase)):
        raise ValueError("an observer must be a class that derives from torch.ao.quantization.ObserverBase")
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            observer = make(**_RANGE)
            observer(torch.linspace(-1, 1, 64).view(_SHAPE))
            scale, zero_point = observer.calculate_qparams()
            sizes = {torch.as_tensor(part).numel() for part in (scale, zero_point)}
        except Exception as error:  # noqa: BLE001 - whatever the user's class raises
            raise ValueError(f"the class {_called(make)} cannot observe an activation: {one_line(error)}") from None
    if sizes != {1}:
        raise ValueError(f"the class {_called(make)} gives {max(sizes)} scales, and an activation has one")


def _chosen(value: Any, *more: str) -> Observer:
    """What was given as a setting; in a validator's words where it is none."""
    if isinstance(value, str):
        return _by_name(value, more)
    if isinstance(value, functools.partial) and not value.args and hasattr(value.func, "with_args"):
        value = value.func.with_args(**value.keywords)
    for name, own in OBSERVERS.items():
        if value is own:
            return name
    if isinstance(value, ObserverBase):
        raise ValueError(f"must be an observer's class, or {type(value).__name__}.with_args(…), and none that is made")
    check_maker(value)
    _given[spelled(value)] = value
    return value  # type: ignore[no-any-return]


def _by_name(given: str, more: tuple[str, ...]) -> Observer:
    if given in _given:
        return _given[given]
    name, _, written = given.replace("_", "-").partition("@")
    if name in (*OBSERVERS, *more) and not written:
        return name
    others = _REGISTRY.all()
    if name not in others:
        known = (*OBSERVERS, *others, *more)
        near = did_you_mean(name, known)
        raise ValueError(f"unknown{near}; must be one of {', '.join(known)}, or an observer's class")
    if written and given != spelled(name):
        raise ValueError(f"the code of {name} has changed since; it is {spelled(name)} now")
    return name


def _taken_apart(make: Maker) -> tuple[Any, dict[str, Any]]:
    """The class, and the settings that it was given, once or one after the other."""
    settings: dict[str, Any] = {}
    while isinstance(make, _Partial):
        settings = make.p.keywords | settings
        make = make.p.func
    return make, settings


def _kind(make: Maker) -> Any:
    return _taken_apart(make)[0]


def _called(make: Maker) -> str:
    """A class by its name, with the settings that were given: ``Clip(share=0.9)``."""
    kind, settings = _taken_apart(make)
    name = getattr(kind, "__name__", type(kind).__name__)
    return f"{name}({', '.join(f'{key}={_short(value)}' for key, value in settings.items())})" if settings else name


def _short(value: object) -> str:
    """A value without the address that it may show."""
    return f"{value:.6g}" if isinstance(value, float) else re.sub(" at 0x[0-9a-f]+", "", repr(value))


#: How a range is found: a name (``moving_average`` is taken for ``moving-average``), or a class of torch.ao's kind.
Observer = Annotated[
    str | type[ObserverBase] | functools.partial[ObserverBase],
    PlainValidator(_chosen),
    PlainSerializer(spelled, when_used="json"),
]
#: The same, or ``auto``.
AnyObserver = Annotated[
    str | type[ObserverBase] | functools.partial[ObserverBase],
    PlainValidator(lambda value: _chosen(value, AUTO)),
    PlainSerializer(spelled, when_used="json"),
]
