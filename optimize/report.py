"""A run's report as JSON, as a page, as a table for the terminal and as a plot for a README.

The report is one plain dict that the pipeline builds; nothing here measures or decides. Every
output is tolerant of ``None`` and of missing entries, and writes are atomic.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from optimize.files import write_atomically
from optimize.lineage import layout
from optimize.report_view import NONE, SLOWER, Report, Row, facts, method, rows, seconds, stage_bars, verdict
from optimize.report_view import number as format_number

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from optimize.report_view import Bar

_TEMPLATES = Path(__file__).with_name("templates")


def write_html(report: Report, path: Path) -> None:
    """Writes the report as one page that refers to nothing outside itself and needs no script."""
    import jinja2
    from markupsafe import Markup

    from optimize.plots import pareto_svg, throughput_svg

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    every = rows(report)
    page = environment.get_template("report.html.j2").render(
        run=report.get("run") or report.get("model") or NONE,
        model=report.get("model") or NONE,
        created=report.get("created") or NONE,
        seconds=seconds(report.get("seconds")),
        verdict=verdict(report),
        rule=(report.get("recommendation") or {}).get("rule") or "",
        rows=every,
        artifacts=[row for row in every if row.kind == "artifact"],
        slower_words=SLOWER,
        dash=NONE,
        # matplotlib escapes the text it draws; everything else on the page is escaped by the template.
        pareto=Markup(pareto_svg(report)),
        throughput=Markup(throughput_svg(report)),
        throughput_table=_throughput_table(report),
        lineage=layout(report, every),
        stages=stage_bars(report),
        stage_total=_stage_total(stage_bars(report), report),
        facts=facts(report),
        method=method(report),
    )
    write_atomically(path, page.encode())


def plot(report: Report, path: Path) -> None:
    """Writes the accuracy/latency plot as PNG or SVG, by the suffix of ``path``.

    Raises:
        ValueError: The suffix is neither.
    """
    from optimize.plots import pareto_image

    write_atomically(path, pareto_image(report, path.suffix.lstrip(".").lower()))


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


def _throughput_table(report: Report) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """The throughput chart in numbers: the batch sizes, and for each name its images per second."""
    series = {
        str(record.get("name")): {str(k): v for k, v in (record.get("throughput") or {}).items()}
        for key in ("artifacts", "baselines")
        for record in report.get(key) or ()
        if not record.get("skipped") and record.get("throughput")
    }
    batches = sorted({b for measured in series.values() for b in measured}, key=int)
    return batches, [(name, [format_number(m.get(b)) for b in batches]) for name, m in series.items()]


def _stage_total(bars: list[Bar], report: Report) -> str:
    cached = sum(bar.note == "from cache" for bar in bars)
    return f"{len(bars)} stages, {cached} of them from the cache; {seconds(report.get('seconds'))} in all."
