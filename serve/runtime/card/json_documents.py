"""JSON documents of limited size, with paths in their error messages, and seals with their own hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ..errors import CardError

#: The field of a sealed document with the SHA-256 of all its other fields.
SEAL: Final = "seal"


def read_document(path: Path, longest: int) -> str | None:
    """Return the text of a file, at most ``longest`` + 1 characters. None if there is no such file.

    Raises:
        CardError: the file cannot be read.
    """
    try:
        with path.open(encoding="utf-8") as stream:
            return stream.read(longest + 1)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CardError(f"{path}: cannot be read ({error})") from None


def parse_document(document: str, path: Path, longest: int) -> object:
    """Parse a JSON text. ``path`` is only for messages.

    Raises:
        CardError: the text has more than ``longest`` characters, or is not JSON.
    """
    try:
        if len(document) > longest:
            raise ValueError(f"more than {longest} characters")
        value: object = json.loads(document)
    except (ValueError, RecursionError) as error:
        raise CardError(f"{path}: cannot be read ({error})") from None
    return value


def canonical(body: object) -> bytes:
    """Return one byte string per JSON value, whatever the order of its keys.

    Raises:
        ValueError: a number is NaN or infinite.
    """
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def seal_of(body: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a document's content, in hexadecimal."""
    return hashlib.sha256(canonical(body)).hexdigest()


def sealed(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document with its own hash in the field `SEAL`."""
    return {**body, SEAL: seal_of(body)}


def unsealed(document: str) -> dict[str, Any]:
    """Return the document that `sealed` received, from the JSON text of its result.

    Raises:
        ValueError: the text is not JSON, or not the document that was sealed.
    """
    try:
        body = json.loads(document)
    except RecursionError:
        raise ValueError("it is not JSON") from None
    if not isinstance(body, dict):
        raise ValueError("it is not a JSON object")
    if body.pop(SEAL, None) != seal_of(body):
        raise ValueError("its seal does not match its content")
    return body
