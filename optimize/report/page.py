"""A run's report as JSON, as a page, as a table for the terminal and as a plot for a README.

The report is one plain dict that the pipeline builds; nothing here measures or decides. Every
output is tolerant of ``None`` and of missing entries, and writes are atomic.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from optimize.report.lineage import layout
from optimize.report.view import NONE, SLOWER, Report, facts, method, rows, seconds, stage_bars, verdict
from optimize.report.view import number as format_number
from optimize.store.files import write_atomically

if TYPE_CHECKING:
    from optimize.report.view import Bar


_TEMPLATES = Path(__file__).with_name("templates")


def write_html(report: Report, path: Path) -> None:
    """Writes the report as one page that refers to nothing outside itself and needs no script."""
    import jinja2
    from markupsafe import Markup

    from optimize.report.plots import pareto_svg, throughput_svg

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
    from optimize.report.plots import pareto_image

    write_atomically(path, pareto_image(report, path.suffix.lstrip(".").lower()))


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
