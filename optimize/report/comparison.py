"""Results as a Python program and a notebook see them: printed, shown, plotted, as a data frame."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from optimize.measure.rows import Recommendation, Reference, Results, Row
from optimize.report.console import output
from optimize.report.lines import lines
from optimize.report.page import fragment, plot
from optimize.report.table import table
from optimize.report.words import plural
from serve.runtime.errors import UserError

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, repr=False)
class Comparison:
    """Artifacts measured side by side; prints as a table, and is one in a notebook.

    ``rows`` has a typed `Row` per artifact, as ``report.json`` has them; ``references`` the eager references;
    ``recommendation`` which one to take, by which rule.
    """

    results: Results

    @property
    def rows(self) -> tuple[Row, ...]:
        """One per artifact, in the order in which they were given."""
        return self.results.rows

    @property
    def references(self) -> tuple[Reference, ...]:
        """The first one's eager module, run in other ways."""
        return self.results.references

    @property
    def recommendation(self) -> Recommendation:
        """Which one to take, by which rule, and why not the others."""
        return self.results.recommendation

    def __repr__(self) -> str:
        return f"<Comparison {plural(len(self.rows), 'artifact')}; recommended {self.recommendation.pair}>"

    def __str__(self) -> str:
        # As wide as the terminal that it is printed to; a file, a pipe or a notebook gets every column.
        console = Console(file=io.StringIO(), width=output().width)
        console.print(table(self.results))
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    def _repr_html_(self) -> str:
        return fragment(self.results)

    def plot(self, path: str | Path) -> Path:
        """Draw accuracy against latency into ``path``, a ``.png`` or ``.svg``, which is returned.

        Raises:
            UserError: it has another suffix, or nothing was measured.
        """
        target = Path(path)
        try:
            plot(self.results, target)
        except ValueError as error:
            raise UserError(f"{target}: {error}") from None
        return target

    def to_pandas(self, *, every: bool = False) -> pd.DataFrame:
        """One row per artifact, indexed by name; nested fields become columns such as ``latency_ms.p50``.

        Args:
            every: one row for each of its executions, and not the best alone; ``id`` tells them apart.
        """
        import pandas

        flat = []
        for line in lines(self.results, every=every):
            if line.row is None:
                continue
            # What was measured is the subject here, and stands beside the row's and the pair's own fields.
            pair = line.pair.to_json() if line.pair else {}
            measured = pair.pop("measured", None) or {}
            row = {name: value for name, value in line.row.to_json().items() if name != "pairs"}
            flat.append(row | pair | measured)
        return pandas.json_normalize(flat).set_index("name")
