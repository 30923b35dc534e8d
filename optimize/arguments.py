"""What a program gives the API: checked by kind, named, and compared, each in one line where it is wrong."""

from __future__ import annotations

import hashlib
import re
import reprlib

from torch import nn

from optimize.passes.base import find_pass, pass_of
from optimize.run.session import Session
from serve.config import Config, defaults
from serve.runtime.errors import UserError

#: As a recipe allows it.
_LONGEST_NAME = 64


def step_name(config: Config) -> str:
    """The name of a step: the pass's and the settings that were given: ``ptq-observer-minmax``."""
    usual = defaults(type(config))
    plain = config.model_dump(mode="json", exclude_unset=True)
    given = {
        name: plain[name] for name in plain if name in config.model_fields_set and getattr(config, name) != usual[name]
    }
    name = "-".join([pass_of(config).name, *(_words(name, value) for name, value in given.items())])
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[: _LONGEST_NAME - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _words(name: str, value: object) -> str:
    """A setting as part of a name that is legal in recipes and folders: ``keepfloat-conv2d``."""
    return re.sub(r"[^a-z0-9.]+", "-", f"{name}-{value}".replace("_", "").lower()).strip("-.")


def differences(one: Session, other: Session) -> list[str]:
    """In what two sessions differ that variants must share to be compared."""
    here_, there = one.context, other.context
    pairs = {
        "evaluation images": (here_.data.fingerprint, there.data.fingerprint),
        "preprocessing": (here_.preprocessing, there.preprocessing),
        "device": (here_.device, there.device),
        "store": (one.store.root.resolve(), other.store.root.resolve()),
    }
    return [name for name, (first, second) in pairs.items() if first != second]


def must_be_model(value: object) -> None:
    """See that ``value`` is what `load` takes for a model.

    Raises:
        UserError: it is not; what is meant is named.
    """
    if isinstance(value, str | nn.Module):
        return
    built = ""
    if isinstance(value, type) and issubclass(value, nn.Module):
        built = f"; give one of it: {value.__name__}(…)"
    raise UserError(
        "model: must be the name of a torchvision classifier, timm:NAME, path/to/file.py:factory, "
        f"package.module:factory or an nn.Module, and not {reprlib.repr(value)} ({type(value).__name__}){built}"
    )


def must_be(kind: type | tuple[type, ...], value: object, rule: str) -> None:
    """See that ``value`` is of a kind, or of one of several.

    Raises:
        UserError: ``rule``, and what was given instead.
    """
    if not isinstance(value, kind):
        raise UserError(f"{rule}, and not {reprlib.repr(value)} ({type(value).__name__})")


def nearest_settings(word: object) -> str:
    """The settings that somebody means who gives a pass's name in their place."""
    return find_pass(word).config.__name__ if isinstance(word, str) else "Ptq"
