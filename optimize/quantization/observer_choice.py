"""Resolves an observer setting: a name of `OBSERVERS` or of an installed distribution, or a class.

An observer from outside the project is written with a digest of its code: ``clip@1f2e3d4c5b6a`` in keys, cards and
reports.
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

#: An observer class, or the result of its ``with_args``.
Maker = Any
#: The setting that tries all of `OBSERVERS`.
AUTO: Final = "auto"

_NAME = re.compile(r"[a-z0-9][a-z0-9.-]*")
_DIGITS = 12  # length of a written digest
#: The type that `torch.ao.quantization.ObserverBase.with_args` returns. Torch (2.11 to 2.14) does not export it.
_Partial: Any = type(ObserverBase.with_args())
#: The trial of an observer: a range of integers as in `Target`, and the shape of an activation ``(N, C, H, W)``.
_RANGE: dict[str, Any] = {"dtype": torch.quint8, "quant_min": 0, "quant_max": 255}
_SHAPE = (2, 4, 4, 2)

#: The observers given in this process, by their written form. A search reads written forms back.
_given: dict[str, Observer] = {}


@dataclass(frozen=True)
class ObserverType:
    """An observer of activations by name.

    Attributes:
        name: its name in recipes and on the command line.
        make: a class that derives from torch.ao's ``ObserverBase``, or its ``with_args(…)``. See `check_maker`.
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
        raise ValueError(f"the name of the observer {entry.name!r} must have a-z, 0-9, '-' and '.' only")
    if entry.name in (*OBSERVERS, AUTO):
        raise ValueError(f"an observer named {entry.name!r} is registered already")
    check_maker(entry.make)
    return _REGISTRY.register(entry, defined_at(_kind(entry.make)))


def maker(observer: Observer) -> Maker:
    """Return the factory of an observer. It takes ``dtype``, ``quant_min`` and ``quant_max``, and has `with_args`."""
    if not isinstance(observer, str):
        return observer
    return OBSERVERS[observer] if observer in OBSERVERS else _REGISTRY.find(observer).make


def spelled(observer: Observer) -> str:
    """Return the written form of an observer: its name, and for one from outside its settings and a code digest."""
    if isinstance(observer, str) and observer in (*OBSERVERS, AUTO):
        return observer
    make = maker(observer)
    name = observer if isinstance(observer, str) else _called(make)
    # A registered observer belongs to its distribution. A new installation may have the old version number.
    home = _kind(make).__module__ if isinstance(observer, str) else ""
    return f"{name}@{live_digest(make, home='' if home.startswith('torch.') else home)[:_DIGITS]}"


def check_maker(make: Maker) -> None:
    """Check by a trial that a factory makes observers of activations.

    Raises:
        ValueError: the result does not derive from torch.ao's ``ObserverBase``, fails, or gives more than one scale.
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
        raise ValueError(f"the class {_called(make)} gives {max(sizes)} scales, but an activation needs one")


def _chosen(value: Any, *more: str) -> Observer:
    """Return the observer given as a setting. Raise a validator's error if it is none."""
    if isinstance(value, str):
        return _by_name(value, more)
    if isinstance(value, functools.partial) and not value.args and hasattr(value.func, "with_args"):
        value = value.func.with_args(**value.keywords)
    for name, own in OBSERVERS.items():
        if value is own:
            return name
    if isinstance(value, ObserverBase):
        raise ValueError(f"must be an observer's class, or {type(value).__name__}.with_args(…), not an instance")
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
        raise ValueError(f"the code of {name} has changed; it is now {spelled(name)}")
    return name


def _taken_apart(make: Maker) -> tuple[Any, dict[str, Any]]:
    """Return the class, and all settings that were given to it, in one or several steps."""
    settings: dict[str, Any] = {}
    while isinstance(make, _Partial):
        settings = make.p.keywords | settings
        make = make.p.func
    return make, settings


def _kind(make: Maker) -> Any:
    return _taken_apart(make)[0]


def _called(make: Maker) -> str:
    """Return a class's name with the given settings: ``Clip(share=0.9)``."""
    kind, settings = _taken_apart(make)
    name = getattr(kind, "__name__", type(kind).__name__)
    return f"{name}({', '.join(f'{key}={_short(value)}' for key, value in settings.items())})" if settings else name


def _short(value: object) -> str:
    """Return a value as text, without the memory address that it may contain."""
    return f"{value:.6g}" if isinstance(value, float) else re.sub(" at 0x[0-9a-f]+", "", repr(value))


#: An observer: a name (``moving_average`` also works for ``moving-average``), or a class of torch.ao's kind.
Observer = Annotated[
    str | type[ObserverBase] | functools.partial[ObserverBase],
    PlainValidator(_chosen),
    PlainSerializer(spelled, when_used="json"),
]
#: An observer, or ``auto``.
AnyObserver = Annotated[
    str | type[ObserverBase] | functools.partial[ObserverBase],
    PlainValidator(lambda value: _chosen(value, AUTO)),
    PlainSerializer(spelled, when_used="json"),
]
