"""Parses words of the command line for serving options that are no single number or truth value."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from serve.runtime.errors import UserError


def sizes(word: str) -> tuple[int, ...]:
    """Parse ``1,8,32``.

    Raises:
        UserError: a part is not a whole number.
    """
    try:
        return tuple(int(size) for size in word.split(","))
    except ValueError:
        raise UserError(f"--buckets must be whole numbers separated by commas, such as 1,8,32; got {word!r}") from None


def limits(words: Iterable[str]) -> dict[str, Any]:
    """Parse several ``LIMIT=VALUE`` into a mapping.

    Raises:
        UserError: a word has another form.
    """
    return dict(_pair("--budget", word) for word in words)


def engine_options(words: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Parse several ``ENGINE.NAME=VALUE`` into the options of each engine.

    Raises:
        UserError: a word has another form.
    """
    found: dict[str, dict[str, Any]] = {}
    for word in words:
        name, value = _pair("--option", word)
        engine, dot, option = name.partition(".")
        if not dot:
            raise UserError(f"--option must be ENGINE.NAME=VALUE, such as openvino.precision=f32; got {word!r}")
        found.setdefault(engine, {})[option] = value
    return found


def _pair(flag: str, word: str) -> tuple[str, Any]:
    """Parse ``NAME=VALUE``. The value becomes a number, true or false if possible, else text."""
    name, equals, value = word.partition("=")
    if not (name and equals):
        raise UserError(f"{flag} must be NAME=VALUE, got {word!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
