"""JSON documents that lie beside a card: of bounded size, and what is wrong with one told by its path."""

from __future__ import annotations

import json
from pathlib import Path

from .errors import CardError


def read_document(path: Path, longest: int) -> str | None:
    """The text of a file, no more than one character beyond ``longest`` of it; None if there is no such file.

    Raises:
        CardError: it cannot be read.
    """
    try:
        with path.open(encoding="utf-8") as stream:
            return stream.read(longest + 1)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CardError(f"{path}: cannot be read ({error})") from None


def parse_document(document: str, path: Path, longest: int) -> object:
    """The JSON value of a text; ``path`` names it in messages.

    Raises:
        CardError: it has more than ``longest`` characters, or is no JSON.
    """
    try:
        if len(document) > longest:
            raise ValueError(f"more than {longest} characters")
        value: object = json.loads(document)
    except (ValueError, RecursionError) as error:
        raise CardError(f"{path}: cannot be read ({error})") from None
    return value
