"""What a program gives the API: checked by kind, named, and compared, each in one line where it is wrong."""

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

#: As a recipe allows it.
_LONGEST_NAME = 64
#: Letters of a name that say settings in full, and those of one value.
_SAID, _VALUE = 48, 24
#: How an observer that is not the project's is written down ends: with a digest of its code.
_DIGEST = re.compile(r"@[0-9a-f]{12}\b")


def step_name(config: Config) -> str:
    """The name of a step: the pass's and the settings that are not as usual, in short: ``ptq-observer-minmax``.

    Equal settings have equal names, and what a name leaves out of long settings is in a few digits of their digest. The
    code of classes is not in it.
    """
    return _joined(pass_of(config).name, _changed(config))


def step_names(configs: Sequence[Config]) -> list[str]:
    """The names of steps side by side: as `step_name`, without what all of one pass have in common, and each once."""
    names: list[str] = []
    for config in configs:
        alike = [_changed(other) for other in configs if type(other) is type(config)]
        own = _changed(config)
        if len(alike) > 1:
            own = {name: words for name, words in own.items() if any(other.get(name) != words for other in alike)}
        names.append(unused(names, _joined(pass_of(config).name, own)))
    return names


def unused(taken: Collection[str], *names: str) -> str:
    """The first of some names that is not taken; where all are, the first with the next number: ``ptq-2``."""
    numbered = (f"{names[0]}-{number}" for number in itertools.count(2))
    return next(name for name in itertools.chain(names, numbered) if name not in taken)


def _changed(config: BaseModel) -> dict[str, str]:
    """The settings that were given and are not as usual: what of a name says them, by the settings' names."""
    usual = defaults(type(config))
    plain = config.model_dump(mode="json", exclude_unset=True)
    return {
        name: _legal(f"{name.replace('_', '')}-{_said(getattr(config, name), plain[name])}")
        for name in plain
        if name not in usual or getattr(config, name) != usual[name]
    }


def _said(value: object, plain: Any) -> str:
    """A setting's value in a few letters; what is lost of it is in four digits of its digest."""
    if isinstance(value, BaseModel):
        said = "-".join(_changed(value).values())
    elif isinstance(plain, float):
        said = f"{plain:.6g}"
        if math.isclose(float(said), plain, rel_tol=1e-9):  # the sum of 0.1 and 0.2 is 0.3 to anybody
            return said
    elif isinstance(plain, dict | list):
        said = "-".join(map(str, _leaves(plain)))
    else:
        return _DIGEST.sub("", str(plain))
    said = _DIGEST.sub("", said)
    if isinstance(plain, float) or len(said) > _VALUE:
        return f"{said if isinstance(plain, float) else len(plain)}-{_digits(plain)}"
    return said


def _leaves(plain: Any) -> Iterator[object]:
    """Names and values of what settings hold, in their order."""
    if isinstance(plain, dict):
        for name, value in plain.items():
            yield name
            yield from _leaves(value)
    elif isinstance(plain, list):
        for value in plain:
            yield from _leaves(value)
    else:
        yield _said(plain, plain)


def _joined(name: str, settings: Mapping[str, str]) -> str:
    """A pass and what is said of its settings, as many as there is room for: of a long value its digits."""
    words = [name]
    for number, (setting, part) in enumerate(settings.items()):
        short = f"{_legal(setting)}-{_digits(part)}"
        fits = next((said for said in (part, short) if len("-".join([*words, said])) <= _SAID), None)
        if fits is None:
            rest = list(settings.values())[number:]
            words.append(f"{len(rest)}-more-{_digits(rest)}")
            break
        words.append(fits)
    return "-".join(words)[:_LONGEST_NAME]


def _legal(words: str) -> str:
    """Words as part of a name that is legal in recipes and folders."""
    return re.sub(r"[^a-z0-9.]+", "-", words.replace("_", "").lower()).strip("-.")


def _digits(plain: Any) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:4]


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
