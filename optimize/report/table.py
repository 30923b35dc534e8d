"""The results as a table for the terminal, with as many columns as fit, or all if there is no limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from optimize.measure.rows import Results
from optimize.report.class_table import class_losses
from optimize.report.columns import SLOWER, Column, columns_of, parent_of
from optimize.report.console import UNBOUNDED, output
from optimize.report.parity_text import parity_lines
from optimize.report.report_text import changes, tail, verdict, yardsticks
from optimize.report.table_rows import Line, lines

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult


def table(results: Results, columns: Sequence[Column] | None = None, *, every: bool = False) -> ResultsTable:
    """Return the results as a table with the columns that fit the console.

    Args:
        results: the measurements.
        columns: the columns to choose from. None: those of the task.
        every: whether to list each execution of an artifact rather than only its best, and the parity of INT8 ones.
    """
    columns = columns or columns_of(results)
    ranks = sorted({column.rank for column in columns}, reverse=True)
    found = lines(results, every=every)
    more = tuple(parity_lines(results)) if every else ()
    return ResultsTable([_table(results, found, [c for c in columns if c.rank <= rank], more) for rank in ranks])


def print_table(results: Results, *, every: bool = False) -> None:
    """Print the table to standard output. A file or a pipe gets every column, with lines of any length."""
    output().print(table(results, every=every))


class ResultsTable:
    """Tables of the same results, widest first. The console shows the first that fits."""

    def __init__(self, widest_first: list[Table]) -> None:
        self._variants = widest_first

    def _fitting(self, console: Console, options: ConsoleOptions) -> Table:
        unbounded = options.update(width=UNBOUNDED)
        fitting = (
            variant
            for variant in self._variants
            if Measurement.get(console, unbounded, variant).maximum <= options.max_width
        )
        return next(fitting, self._variants[-1])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._fitting(console, options)


def _table(results: Results, found: Sequence[Line], columns: Sequence[Column], more: Sequence[str]) -> Table:
    shown = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        title=Text(f"{results.title}: measured artifacts", style="bold"),
        title_justify="left",
        caption=_caption(results, found, more),
        caption_justify="left",
    )
    shown.add_column(Text("artifact"))
    for column in columns:
        shown.add_column(Text(column.head), justify="left" if column.left else "right", no_wrap=True)
    artifacts = sum(line.row is not None for line in found)
    for number, line in enumerate(found, start=1):
        cells = [Text(("★ " if line.chosen else "  ") + line.name)]
        for column in columns:
            cell = column.cell(line, results)
            skipped = line.skip is not None and column.key == "score"
            text = "skipped" if skipped else f"{cell.text} {cell.alarm}".strip()
            cells.append(Text(text.replace(" to ", " … "), style="bold red" if cell.alarm else ""))
        shown.add_row(*cells, style=_style(line), end_section=number == artifacts)
    return shown


def _style(line: Line) -> str | None:
    if line.chosen:
        return "bold green"
    return "dim" if line.skip or not line.first else None


def _caption(results: Results, found: Sequence[Line], more: Sequence[str]) -> Text:
    """Return the verdict, the rule, and text for everything that does not fit into a cell."""
    chosen, columns = results.recommendation, columns_of(results)
    warning = results.measurement.warning
    lines = [Text(warning, style="bold yellow")] if warning else []
    lines += [Text(("★ " if chosen.name else "") + verdict(results), style="bold")]
    lines += [Text(chosen.selection)] if chosen.selection else []
    lines += [Text(f"Rule: {chosen.rule}")]
    lines += [Text(remark, style="yellow") for remark in chosen.remarks]
    lines += [Text(said) for said in (yardsticks(results), tail(results)) if said]
    for line in found:
        if line.skip is not None:
            lines.append(Text(f"{line.id}: skipped, {line.skip}"))
        for column in columns:
            if line.first and (cell := column.cell(line, results)).alarm:
                words = f"{line.id}: {cell.text} the speed of {parent_of(line)}, {SLOWER}"
                lines.append(Text(words, style="red"))
    lines += map(Text, (*changes(results), *class_losses(results), *more))
    return Text("\n").join(lines)
