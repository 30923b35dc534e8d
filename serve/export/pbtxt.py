"""Protocol buffers' text format of nested values, as Triton's ``config.pbtxt`` is written in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


class Word(str):
    """A name of an enumeration, which stands without quotes."""

    __slots__ = ()


def text(message: Mapping[str, Any]) -> str:
    """A message as text: fields by name, a list for a repeated one, a mapping for a message within."""
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
        # Bytes beyond ASCII as octal escapes, which every reader of the format knows.
        escaped = "".join(
            chr(byte) if 32 <= byte < 127 and chr(byte) not in '"\\' else f"\\{byte:03o}" for byte in value.encode()
        )
        return f'"{escaped}"'
    return str(value)
