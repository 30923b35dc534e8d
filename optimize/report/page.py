"""Writes a run's report as one HTML page, and its plot as a file. Writes are atomic."""

from __future__ import annotations

import base64
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from optimize.measure.rows import Report, Results, Row
from optimize.report import parity_text
from optimize.report.class_table import class_losses, class_table
from optimize.report.columns import Column, columns_of, family_of
from optimize.report.lineage import layout
from optimize.report.number_format import count, day, figure, moment, number, percent, plain, plural, seconds, size
from optimize.report.report_text import facts, method, notes, verdict, yardsticks
from optimize.report.stored_charts import Charts
from optimize.report.table_rows import Line, lines, others, references, shown
from optimize.store.atomic_files import write_atomically
from optimize.store.training_history import PARTS, History, shares
from optimize.tasks.base import find_task

if TYPE_CHECKING:
    import jinja2

_TEMPLATES = Path(__file__).with_name("templates")


@dataclass(frozen=True)
class Bar:
    """One labelled bar. ``share`` is its length as a part of the longest (0 to 1)."""

    name: str
    share: float
    value: str
    note: str


@dataclass(frozen=True)
class Trained:
    """A training on the page: its curves, and the parts of its time (name, text, share)."""

    name: str
    history: History
    chart: str
    parts: list[tuple[str, str, float]]


@dataclass(frozen=True)
class LayerChart:
    """A profile on the page: its title, and its chart as an SVG file."""

    name: str
    said: str
    drawing: bytes

    @property
    def source(self) -> str:
        """Return the chart as a data URL."""
        return f"data:image/svg+xml;base64,{base64.b64encode(self.drawing).decode()}"


def write_html(
    report: Report,
    path: Path,
    charts: Charts,
    profiles: Sequence[LayerChart] = (),
    columns: Sequence[Column] | None = None,
) -> None:
    """Write the report as one self-contained page without scripts."""
    from markupsafe import Markup

    columns, task = columns or columns_of(report), find_task(report.task)
    page = (
        _environment()
        .get_template("report.html.j2")
        .render(
            report=report,
            verdict=verdict(report),
            yardsticks=yardsticks(report),
            rejected=_rejected(report),
            notes=notes(report),
            effects=[(row.name, row.effects) for row in report.rows if row.effects],
            parities=[(row.name, row.certificate) for row in report.rows if row.certificate],
            parity_heads=parity_text.heads(task),
            explained=functools.partial(parity_text.explained, task=task),
            task=task,
            taken=moment(report.measurement.taken),
            created=moment(report.created),
            results=[column for column in columns if column.table == "results"],
            details=[column for column in columns if column.table == "details"],
            # matplotlib escapes the text it draws. The template escapes everything else on the page.
            pareto=Markup(charts.pareto),
            throughput=Markup(charts.throughput),
            throughput_table=_throughput_table(report),
            classes=class_table(report),
            class_losses=class_losses(report),
            examples=charts.examples,
            lineage=layout(report.rows),
            trainings=_trainings(report, charts),
            profiles=profiles,
            shown={row.name: shown(report, row) for row in report.rows},
            groups=_groups(report),
            references=references(report),
            steps=_step_bars(report),
            step_total=_step_total(report),
            facts=facts(report),
            method=method(report),
        )
    )
    write_atomically(path, page.encode())


def fragment(results: Results, columns: Sequence[Column] | None = None) -> str:
    """Return the table of results as an HTML element for a notebook."""
    columns = columns or columns_of(results)
    template = _environment().get_template("comparison.html.j2")
    return template.render(
        results=results,
        shown=[column for column in columns if column.table == "results"],
        details=[column for column in columns if column.table == "details"],
        verdict=verdict(results),
        yardsticks=yardsticks(results),
        groups=_groups(results),
        references=references(results),
    )


def plot(results: Results, path: Path) -> None:
    """Write the accuracy/latency plot as PNG or SVG, by the suffix of ``path``.

    Raises:
        ValueError: the suffix is neither.
    """
    from optimize.report.plots import pareto_image

    write_atomically(path, pareto_image(results, path.suffix.lstrip(".").lower()))


def _environment() -> jinja2.Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "family": family_of,
        "percent": percent,
        "number": number,
        "settings": _settings,
        "size": size,
    }
    environment.filters |= {
        "figure": figure,
        "parity": parity_text.rows,
        "missing": parity_text.missing,
    }
    return environment


def _settings(row: Row) -> str:
    return ", ".join(f"{name} {plain(value)}" for name, value in row.config.items())


def _groups(results: Results) -> list[tuple[Line, list[Line]]]:
    """Return for each row its main line, and the lines of its other executions."""
    return [(shown(results, row), others(results, row)) for row in results.rows]


def _rejected(results: Results) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the reasons against each artifact's best execution, then those against the others, with their heads."""
    reasons = results.recommendation.rejected
    first = {line.id for line in lines(results)}
    split = (("Why not the others", True), ("Why not their other executions", False))
    groups = [(head, [entry for entry in reasons.items() if (entry[0] in first) is best]) for head, best in split]
    return [(head, entries) for head, entries in groups if entries]


def _trainings(report: Report, charts: Charts) -> list[Trained]:
    """Return each training of an artifact, in order."""
    from markupsafe import Markup

    return [
        Trained(
            f"{row.name}, {number} of {len(row.training)}" if len(row.training) > 1 else row.name,
            history,
            Markup(chart),
            [
                (name, f"{PARTS[name]} {100 * share:.0f} %", share)
                for name, share in shares(history.times).items()
                if share
            ],
        )
        for row in report.rows
        for number, (history, chart) in enumerate(
            zip(row.training, charts.curves.get(row.name, ()), strict=True), start=1
        )
    ]


def _throughput_table(results: Results) -> tuple[list[int], list[tuple[str, list[str]]]]:
    """Return the throughput chart as numbers: the batch sizes, and for each name its images per second."""
    timed = [(line.id, line.measured.throughput) for line in lines(results, every=True) if line.measured]
    batches = sorted({size for _, series in timed for size in series})
    return batches, [(name, [number(series.get(size)) for size in batches]) for name, series in timed]


def _step_bars(report: Report) -> list[Bar]:
    """Return the time that each step took, in this run or an earlier one."""
    longest = max((row.seconds or 0.0 for row in report.rows), default=0.0) or 1.0
    return [
        Bar(
            row.name,
            (row.seconds or 0.0) / longest,
            seconds(row.seconds) if row.file else "skipped",
            f"on {day(row.made)}" if row.cached and row.made else "",
        )
        for row in report.rows
    ]


def _step_total(report: Report) -> str:
    cached = sum(row.cached for row in report.rows)
    return (
        f"{plural(len(report.rows), 'step')}, {count(cached)} of them taken from the cache; "
        f"this run took {seconds(report.seconds)} in all."
    )
