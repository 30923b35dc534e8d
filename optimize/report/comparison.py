"""Results for Python programs and notebooks: printed, shown, plotted, as a data frame."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, overload

from optimize.measure.rows import Recommendation, Reference, Results, Row
from optimize.report.columns import columns_of
from optimize.report.console import text
from optimize.report.number_format import plural
from optimize.report.page import fragment, plot
from optimize.report.table import table
from optimize.report.table_rows import lines
from serve.runtime.errors import UserError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False)
class Comparison:
    """Artifacts measured side by side. Prints as a table, and shows as one in a notebook.

    ``rows`` has a typed `Row` per artifact, as in ``report.json``. ``references`` are the eager references.
    ``recommendation`` says which artifact to take, and by which rule.
    """

    results: Results

    @property
    def rows(self) -> tuple[Row, ...]:
        """Return one row per artifact, in the order in which they were given."""
        return self.results.rows

    @property
    def references(self) -> tuple[Reference, ...]:
        """Return the references: the first artifact's eager module, run in other ways."""
        return self.results.references

    @property
    def recommendation(self) -> Recommendation:
        """Return which artifact to take, by which rule, and why not the others."""
        return self.results.recommendation

    def __repr__(self) -> str:
        return f"<Comparison {plural(len(self.rows), 'artifact')}; recommended {self.recommendation.pair}>"

    def __str__(self) -> str:
        return text(table(self.results))

    def _repr_html_(self) -> str:
        return fragment(self.results)

    @overload
    def plot(self, path: None = None) -> Figure: ...

    @overload
    def plot(self, path: str | Path) -> Path: ...

    def plot(self, path: str | Path | None = None) -> Figure | Path:
        """Draw accuracy against latency: as matplotlib's figure, which a notebook shows, or into a file.

        Args:
            path: a ``.png`` or ``.svg`` to write, which is returned. By default the figure is returned.

        Raises:
            UserError: ``path`` has another suffix or cannot be written, or nothing was measured.
        """
        from optimize.report.plots import pareto_figure

        try:
            if path is None:
                return pareto_figure(self.results)
            plot(self.results, Path(path))
        except ValueError as error:
            raise UserError(f"{path}: {error}" if path is not None else str(error)) from None
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror}") from None
        return Path(path)

    def to_pandas(self, *, every: bool = False) -> pd.DataFrame:
        """Return a data frame with one row per artifact, indexed by name.

        Nested fields become columns such as ``latency_ms.p50``.

        The columns of the printed table come first, in its order, with the reason why nothing was measured. All others
        follow.

        Args:
            every: one row for each execution of an artifact, rather than only the best. ``id`` tells them apart.
        """
        import pandas

        flat = []
        for line in lines(self.results, every=every):
            if line.row is None:
                continue
            # The measured fields are the main subject, so they get no prefix, like the row's and the pair's own fields.
            pair = line.pair.to_json() if line.pair else {}
            measured = pair.pop("measured", None) or {}
            row = {name: value for name, value in line.row.to_json().items() if name != "pairs"}
            flat.append(row | pair | measured)
        frame = pandas.json_normalize(flat).set_index("name")
        # The fields of the table's columns come first, and the reason if these are empty. Others keep their order.
        fields = (name for column in columns_of(self.results) for name in column.fields)
        first = (*fields, "skip.kind", "skip.reason")

        def place(column: object) -> int:
            return next((at for at, name in enumerate(first) if f"{column}.".startswith(f"{name}.")), len(first))

        return frame[sorted(frame.columns, key=place)]
