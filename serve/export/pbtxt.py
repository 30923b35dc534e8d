"""Writes nested values in the text format of protocol buffers, as in Triton's ``config.pbtxt``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


class Word(str):
    """The name of an enumeration value, which has no quotes."""

    __slots__ = ()


def text(message: Mapping[str, Any]) -> str:
    """Return a message as text. A list is a repeated field, a mapping a nested message."""
    return "".join(f"{line}\n" for line in _lines(message, ""))


def _lines(message: Mapping[str, Any], indent: str) -> Iterator[str]:
    for name, value in message.items():
        for entry in value if isinstance(value, list) else [value]:
            if isinstance(entry, Mapping):
                yield f"{indent}{name} {{"
                yield from _lines(entry, indent + "  ")
                yield f"{indent}}}"
            else:
                yield f"{indent}{name}: {_scalar(entry)}"


def _scalar(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Word):
        return str(value)
    if isinstance(value, str):
        # Bytes beyond ASCII become octal escapes, which every reader of the format knows.
        escaped = "".join(
            chr(byte) if 32 <= byte < 127 and chr(byte) not in '"\\' else f"\\{byte:03o}" for byte in value.encode()
        )
        return f'"{escaped}"'
    return str(value)
