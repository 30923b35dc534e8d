"""Short displays of objects: one line in a terminal, a small table in a notebook."""

from __future__ import annotations

import dataclasses
import html
import reprlib
from collections.abc import Mapping, Sequence, Sized

#: Most characters of a displayed value.
_LONG = 60


class Described:
    """Shows the object's facts instead of all its contents, which may be thousands of images."""

    def _facts(self) -> dict[str, str]:
        """Return the facts to display, by name. They are short, and need no reading or computing.

        By default these are the non-empty fields of a record. Of a collection only its size is shown.
        """
        names = getattr(type(self), "model_fields", None)  # pydantic's
        if names is None:
            names = [field.name for field in dataclasses.fields(self) if field.repr]  # type: ignore[arg-type]
        values = ((name, getattr(self, name)) for name in names if not name.startswith("_"))
        return {name: glance(value) for name, value in values if not _is_empty(value)}

    def _more(self) -> dict[str, str]:
        """Return further rows for the table."""
        return {}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {'; '.join(f'{name} {value}' for name, value in self._facts().items())}>"

    def _repr_html_(self) -> str:
        return fact_table({name: (value,) for name, value in (self._facts() | self._more()).items()})


def glance(value: object) -> str:
    """Return a value in a few characters."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Described):
        held = ", ".join(f"{name} {fact}" for name, fact in value._facts().items())
        return f"({held})" if len(held) <= _LONG else type(value).__name__
    if isinstance(value, Mapping | Sequence) and not isinstance(value, str):
        return str(value) if _is_plain(value) else str(len(value))
    said = str(value)
    return said if len(said) <= _LONG else reprlib.repr(said)


def _is_empty(value: object) -> bool:
    return value is None or (isinstance(value, Sized) and not len(value))


def _is_plain(values: Mapping[object, object] | Sequence[object]) -> bool:
    """Whether numbers or words are short enough to be shown."""
    inside = values.values() if isinstance(values, Mapping) else values
    return len(values) <= 4 and all(isinstance(v, int | float | str) for v in inside) and len(str(values)) <= _LONG


def fact_table(rows: Mapping[str, tuple[str, ...]]) -> str:
    """Return an HTML table with a row for each name."""
    cells = "".join(
        f"<tr><th>{html.escape(name)}</th>{''.join(f'<td>{html.escape(value)}</td>' for value in values)}</tr>"
        for name, values in rows.items()
    )
    return f"<table>{cells}</table>"
