"""Helpers of the Python API: check the types of arguments, name steps, compare sessions."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import reprlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from torch import nn

from optimize.passes.base import find_pass, pass_of
from optimize.run.session import Session
from serve.common.config import Config, defaults
from serve.runtime.errors import UserError

#: The longest name that a recipe allows.
_LONGEST_NAME = 64
#: The most characters of a name that spell out settings, and the most that spell out one value.
_LONGEST_SETTINGS, _LONGEST_VALUE = 48, 24
#: The digest of its code that ends the stored name of a user's own observer.
_DIGEST = re.compile(r"@[0-9a-f]{12}\b")


def step_name(config: Config) -> str:
    """Return the name of a step: its pass and a short form of its changed settings, such as ``ptq-observer-minmax``.

    Equal settings give equal names. Long settings are shortened, and a few digits of their digest keep the names apart.
    The code of classes does not affect the name.
    """
    return _joined(pass_of(config).name, _changed(config))


def step_names(configs: Sequence[Config]) -> list[str]:
    """Return a unique name for each step of a comparison.

    Each name is built as in `step_name`, but settings that all steps of one pass share are left out.
    """
    names: list[str] = []
    for config in configs:
        alike = [_changed(other) for other in configs if type(other) is type(config)]
        own = _changed(config)
        if len(alike) > 1:
            own = {name: words for name, words in own.items() if any(other.get(name) != words for other in alike)}
        names.append(unused(names, _joined(pass_of(config).name, own)))
    return names


def unused(taken: Collection[str], *names: str) -> str:
    """Return the first of ``names`` that is not taken. If all are, number the first: ``ptq-2``."""
    numbered = (f"{names[0]}-{number}" for number in itertools.count(2))
    return next(name for name in itertools.chain(names, numbered) if name not in taken)


def _changed(config: BaseModel) -> dict[str, str]:
    """Return the changed settings: for each name the part of a step's name that describes it."""
    usual = defaults(type(config))
    plain = config.model_dump(mode="json", exclude_unset=True)
    return {
        name: _legal(f"{name.replace('_', '')}-{_short_value(getattr(config, name), plain[name])}")
        for name in plain
        if name not in usual or getattr(config, name) != usual[name]
    }


def _short_value(value: object, plain: Any) -> str:
    """Return a short form of a setting's value. Four digits of its digest replace whatever is cut off."""
    if isinstance(value, BaseModel):
        text = "-".join(_changed(value).values())
    elif isinstance(plain, float):
        text = f"{plain:.6g}"
        if math.isclose(float(text), plain, rel_tol=1e-9):  # 0.1 + 0.2 should read 0.3
            return text
    elif isinstance(plain, dict | list):
        text = "-".join(map(str, _leaves(plain)))
    else:
        return _DIGEST.sub("", str(plain))
    text = _DIGEST.sub("", text)
    if isinstance(plain, float) or len(text) > _LONGEST_VALUE:
        return f"{text if isinstance(plain, float) else len(plain)}-{_digits(plain)}"
    return text


def _leaves(plain: Any) -> Iterator[object]:
    """Yield the names and values of nested settings in their order."""
    if isinstance(plain, dict):
        for name, value in plain.items():
            yield name
            yield from _leaves(value)
    elif isinstance(plain, list):
        for value in plain:
            yield from _leaves(value)
    else:
        yield _short_value(plain, plain)


def _joined(name: str, settings: Mapping[str, str]) -> str:
    """Join a pass and as many of its settings as there is room for; a long value is replaced by its digest."""
    words = [name]
    for number, (setting, part) in enumerate(settings.items()):
        short = f"{_legal(setting)}-{_digits(part)}"
        fits = next((text for text in (part, short) if len("-".join([*words, text])) <= _LONGEST_SETTINGS), None)
        if fits is None:
            rest = list(settings.values())[number:]
            words.append(f"{len(rest)}-more-{_digits(rest)}")
            break
        words.append(fits)
    return "-".join(words)[:_LONGEST_NAME]


def _legal(words: str) -> str:
    """Turn words into a part of a name that is legal in recipes and folders."""
    return re.sub(r"[^a-z0-9.]+", "-", words.replace("_", "").lower()).strip("-.")


def _digits(plain: Any) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:4]


def differences(one: Session, other: Session) -> list[str]:
    """Name the differences between two sessions that prevent comparing their variants."""
    here_, there = one.context, other.context
    pairs = {
        "evaluation images": (here_.data.fingerprint, there.data.fingerprint),
        "preprocessing": (here_.preprocessing, there.preprocessing),
        "device": (here_.device, there.device),
        "store": (one.store.root.resolve(), other.store.root.resolve()),
    }
    return [name for name, (first, second) in pairs.items() if first != second]


def must_be_model(value: object) -> None:
    """Check that `load` accepts ``value`` as a model.

    Raises:
        UserError: it does not. The message says what is accepted.
    """
    if isinstance(value, str | nn.Module):
        return
    built = ""
    if isinstance(value, type) and issubclass(value, nn.Module):
        built = f"; give an instance of it: {value.__name__}(…)"
    raise UserError(
        "model: must be the name of a network (torchvision's, cnn_small, unet_small or timm:NAME), "
        f"path/to/file.py:factory, package.module:factory or an nn.Module, not {reprlib.repr(value)} "
        f"({type(value).__name__}){built}"
    )


def must_be(kind: type | tuple[type, ...], value: object, rule: str) -> None:
    """Check that ``value`` has a type, or one of several.

    Raises:
        UserError: it has another type. The message is ``rule`` and the value that was given.
    """
    if not isinstance(value, kind):
        raise UserError(f"{rule}, not {reprlib.repr(value)} ({type(value).__name__})")


def nearest_settings(word: object) -> str:
    """Name the settings class to suggest to a caller who passed a pass's name instead of its settings."""
    return find_pass(word).config.__name__ if isinstance(word, str) else "Ptq"
