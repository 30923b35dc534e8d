"""Parses ``multipart/form-data`` bodies in memory. Their size was limited on arrival."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from serve.runtime.errors import RequestError

_MOST_PARTS = 64


@dataclass
class Part:
    """One part: its field's name, content type (lower case, without parameters, empty if none) and content."""

    name: str = ""
    content_type: str = ""
    content: bytearray = field(default_factory=bytearray)


def parts_of(body: bytes, content_type: str) -> Sequence[Part]:
    """Return the parts of a form, in order.

    Args:
        body: the whole form.
        content_type: the request's content type, with its boundary.

    Raises:
        RequestError: the form is invalid, incomplete, or has more than 64 parts.
    """
    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if not 1 <= len(boundary) <= 200:
        raise RequestError("the content type of the multipart form has no boundary")
    collected = _PartCollector()
    try:
        parser = MultipartParser(boundary, collected.callbacks())  # type: ignore[arg-type]
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise RequestError(f"the multipart form cannot be read: {str(error)[:100]}") from None
    if not collected.ended:
        raise RequestError("the multipart form ends before its last boundary")
    return collected.parts


class _PartCollector:
    """The callbacks of a parser, and the parts that they collect."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.ended = False
        self._field = bytearray()
        self._value = bytearray()

    def callbacks(self) -> dict[str, object]:
        return {
            "on_part_begin": self._begin,
            "on_part_data": self._data,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_end": self._end,
        }

    def _begin(self) -> None:
        if len(self.parts) == _MOST_PARTS:
            raise RequestError(f"the multipart form has more than {_MOST_PARTS} parts")
        self.parts.append(Part())

    def _data(self, data: bytes, start: int, end: int) -> None:
        self.parts[-1].content += memoryview(data)[start:end]

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        name, value = bytes(self._field).lower(), bytes(self._value)
        self._field.clear()
        self._value.clear()
        if name == b"content-disposition":
            _, options = parse_options_header(value)
            self.parts[-1].name = options.get(b"name", b"").decode("utf-8", "replace")
        elif name == b"content-type":
            self.parts[-1].content_type = parse_options_header(value)[0].decode("latin-1").lower()

    def _end(self) -> None:
        self.ended = True
