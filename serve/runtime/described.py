"""How an object shows itself to whoever holds it: one line in a terminal, a small table in a notebook."""

from __future__ import annotations

import html
from collections.abc import Mapping


class Described:
    """Shows itself by its facts, and not by all that it holds, which may be thousands of images."""

    def _facts(self) -> Mapping[str, str]:
        """What of it is worth a glance, by its name; each is short and at hand: nothing is read or computed."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {'; '.join(f'{name} {value}' for name, value in self._facts().items())}>"

    def _repr_html_(self) -> str:
        return fact_table({name: (value,) for name, value in self._facts().items()})


def fact_table(rows: Mapping[str, tuple[str, ...]]) -> str:
    """An HTML table of a row for each name, with its cells."""
    cells = "".join(
        f"<tr><th>{html.escape(name)}</th>{''.join(f'<td>{html.escape(value)}</td>' for value in values)}</tr>"
        for name, values in rows.items()
    )
    return f"<table>{cells}</table>"
