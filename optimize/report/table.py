"""The results as a table for the terminal: all columns where they fit, the key figures where they do not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from optimize.report.view import NONE, SLOWER, Report, Row, rows, verdict

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult


def table(report: Report) -> Table:
    """The results for the terminal: all columns where they fit, the key figures where they do not."""
    every = rows(report)
    return _ResultsTable([_table(report, every, columns) for columns in (_WIDE, _MIDDLE, _NARROW)])


class _ResultsTable(Table):
    """Tables of the same results, widest first, of which the console shows the first that it has room for."""

    def __init__(self, widest_first: list[Table]) -> None:
        super().__init__()
        self.__dict__.update(widest_first[0].__dict__)
        self._variants = widest_first

    def _fitting(self, console: Console, options: ConsoleOptions) -> Table:
        unbounded = options.update(width=1000)
        fitting = (
            variant
            for variant in self._variants
            if Measurement.get(console, unbounded, variant).maximum <= options.max_width
        )
        return next(fitting, self._variants[-1])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self._fitting(console, options)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, self._fitting(console, options))


_WIDE = (
    "artifact",
    "precision",
    "top-1 %",
    "Δ points",
    "95 %",
    "p50 ms",
    "p99 ms",
    "speed",
    "vs parent",
    "img/s",
    "size",
)


_MIDDLE = tuple(column for column in _WIDE if column not in ("precision", "p99 ms"))


_NARROW = ("artifact", "top-1 %", "Δ points", "p50 ms", "speed", "vs parent", "size")


def _table(report: Report, every: list[Row], columns: tuple[str, ...]) -> Table:
    result = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        title=Text(f"{report.get('run') or report.get('model') or ''}: measured artifacts", style="bold"),
        title_justify="left",
        caption=_caption(report, every),
        caption_justify="left",
    )
    for column in columns:
        left = column in ("artifact", "precision")
        result.add_column(Text(column), justify="left" if left else "right", no_wrap=column != "artifact")
    for position, row in enumerate(every):
        cells = _cells(row)
        result.add_row(
            *(cells[column] for column in columns),
            style="bold green" if row.recommended else "dim" if row.skipped else None,
            end_section=position + 1 < len(every) and row.kind != every[position + 1].kind,
        )
    return result


def _cells(row: Row) -> dict[str, Text]:
    mark = "★ " if row.recommended else "  "
    return {
        "artifact": Text(mark + row.name),
        "precision": Text(row.precision),
        "top-1 %": Text("skipped" if row.skipped else row.top1),
        "Δ points": Text(row.delta),
        "95 %": Text(row.interval.replace(" to ", " … ") or NONE),
        "p50 ms": Text(row.p50),
        "p99 ms": Text(row.p99),
        "speed": Text(row.speedup),
        "vs parent": Text(row.vs_parent + " slower", style="bold red") if row.slower else Text(row.vs_parent),
        "img/s": Text(row.throughput),
        "size": Text(row.size),
    }


def _caption(report: Report, every: list[Row]) -> Text:
    """The verdict, the rule, and in words whatever a cell has no room for."""
    lines = [Text(f"★ {verdict(report)}" if report.get("recommended") else verdict(report), style="bold")]
    rule = (report.get("recommendation") or {}).get("rule")
    lines += [Text(f"Rule: {rule}")] if rule else []
    lines += [
        Text(f"{row.name}: {row.vs_parent} the speed of {row.parents}, {SLOWER}", style="red")
        for row in every
        if row.slower
    ]
    lines += [Text(f"{row.name}: skipped, {row.skipped}") for row in every if row.skipped]
    return Text("\n").join(lines)
