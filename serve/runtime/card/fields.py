"""Checks of a card's values, their types and ranges, without a library that every archive would need."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from ..errors import CardError

#: A file beside the card: no separator, no parent folder, not hidden.
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,254}")
_WORD = re.compile(r"[a-z][a-z0-9_]{0,63}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LONGEST = 100_000  # characters of a text
_LARGEST = 2**63 - 1
_DEPTH = 32


def text(where: str, value: object, longest: int = 1000) -> None:
    """Check a string: UTF-8 (JSON allows lone surrogates, which UTF-8 does not) and no control characters.

    Raises:
        CardError: the value is another one. ``where`` names it in the message.
    """
    if not isinstance(value, str):
        raise CardError(f"{where} must be a string, found {shown(value)}")
    if len(value) > longest:
        raise CardError(f"{where} has {len(value)} characters, more than {longest}")
    if any(character < " " or "\ud800" <= character <= "\udfff" for character in value):
        raise CardError(f"{where} has characters that are not valid text: {shown(value)}")


def whole(where: str, value: object, low: int, high: int) -> None:
    """Check an integer from ``low`` to ``high``. True and False are not integers.

    Raises:
        CardError: the value is another one.
    """
    if type(value) is not int or not low <= value <= high:
        raise CardError(f"{where} must be a whole number from {low} to {high}, found {shown(value)}")


def number(where: str, value: object, low: float, high: float) -> None:
    """Check a finite number from ``low`` to ``high``.

    Raises:
        CardError: the value is another one.
    """
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise CardError(f"{where} must be a number from {low:g} to {high:g}, found {shown(value)}")


def word(where: str, value: object) -> None:
    """Check a short lower-case word of letters, digits and ``_``.

    Raises:
        CardError: the value is another one.
    """
    if not isinstance(value, str) or not _WORD.fullmatch(value):
        raise CardError(f"{where} must be a word of a-z, 0-9 and '_', found {shown(value)}")


def one_of(where: str, value: object, allowed: tuple[str, ...]) -> None:
    """Check one of a few words.

    Raises:
        CardError: the value is another one.
    """
    if not isinstance(value, str) or value not in allowed:
        raise CardError(f"{where} {shown(value)} is not one of {', '.join(allowed)}")


def sequence(where: str, value: object) -> tuple[Any, ...]:
    """Return a tuple, which a parsed JSON list becomes.

    Raises:
        CardError: the value is another one.
    """
    if not isinstance(value, tuple):
        raise CardError(f"{where} must be a list, found {shown(value)}")
    return value


def mapping(where: str, value: object) -> Mapping[str, Any]:
    """Return a JSON object. Its keys are strings.

    Raises:
        CardError: the value is another one.
    """
    if not isinstance(value, Mapping):
        raise CardError(f"{where} must be a JSON object, found {shown(value)}")
    for key in value:
        text(f"{where}: a key", key)
    return value


def json_object(where: str, value: object) -> None:
    """Check a JSON object with any content that can be written and read again: finite numbers, texts, 64-bit integers.

    Raises:
        CardError: the value is another one.
    """
    mapping(where, value)
    _json(where, value, _DEPTH)


def files(where: str, value: object, *, folders: bool = False) -> None:
    """Check SHA-256 hashes (lower-case hexadecimal) of files by plain names, or by paths with ``folders``.

    Raises:
        CardError: the value is another one, or a name could lead out of the folder.
    """
    for name, digest in mapping(where, value).items():
        parts = name.split("/") if folders else [name]
        if not all(_FILE.fullmatch(part) for part in parts):
            raise CardError(f"{where}: {shown(name)} is not a plain file name within the folder")
        if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
            raise CardError(f"{where}: the SHA-256 of {name} must be 64 hexadecimal digits, found {shown(digest)}")


def shown(value: object) -> str:
    """Return the beginning of a value for a message, on one line."""
    return ascii(value)[:60]


def _json(where: str, value: object, depth: int) -> None:
    if depth == 0:
        raise CardError(f"{where} is nested too deeply")
    if isinstance(value, Mapping):
        for key, item in value.items():
            text(f"{where}: a key", key)
            _json(f"{where}.{key[:40]}", item, depth - 1)
    elif isinstance(value, list | tuple):
        for item in value:
            _json(where, item, depth - 1)
    elif isinstance(value, str):
        if len(value) > _LONGEST or any("\ud800" <= character <= "\udfff" for character in value):
            raise CardError(f"{where} has a string that is too long or cannot be encoded: {shown(value)}")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise CardError(f"{where} must be finite, found {shown(value)}")
    elif isinstance(value, int):  # also True and False
        if abs(value) > _LARGEST:
            raise CardError(f"{where} has a number that is too large")
    elif value is not None:
        raise CardError(f"{where} has a value that JSON cannot express: {shown(value)}")
