"""Draws the charts of a run's report once, and keeps them in the store under a key of their content.

In a run that makes nothing new, drawing would take longer than all the rest. So nothing here imports matplotlib.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from optimize.measure.rows import Report
from optimize.measure.stored_examples import Examples, stored_examples
from optimize.store.keys import ChartsKey
from optimize.store.objects import Store
from optimize.store.sources import source_digest
from optimize.tasks.base import find_task

#: Fields of a report and of its rows that no chart shows. Most differ between runs with the same results.
_OF_THE_RUN: Final = frozenset({"created", "seconds", "measurement", "classes", "examples"})
_OF_THE_ROWS_MAKING: Final = frozenset({"cached", "made", "seconds", "archive"})

_PLOTS: Final = ("optimize.report.plots", "optimize.report.training_curves")
_PARETO, _THROUGHPUT, _PAPER, _CURVES = "pareto-page.svg", "throughput-page.svg", "pareto.svg", "curves-page.json"


@dataclass(frozen=True)
class Charts:
    """The charts of a report.

    Attributes:
        pareto: accuracy against latency, as an element of the page.
        throughput: throughput by batch size, as an element of the page.
        paper: accuracy against latency on white, an SVG file. None if no artifact has both.
        curves: the curves of each training of an artifact, by its name, as elements of the page.
        examples: pictures of answers, if the report has some.
        key: key of the object in the store.
    """

    pareto: str
    throughput: str
    paper: bytes | None
    curves: Mapping[str, tuple[str, ...]]
    examples: Examples | None
    key: str


def stored_charts(report: Report, store: Store) -> Charts:
    """Return the charts of a report, from the store or newly drawn."""
    task = find_task(report.task)

    def draw(folder: Path) -> None:
        from optimize.report.plots import marks, pareto_image, pareto_svg, throughput_svg
        from optimize.report.training_curves import curves_svg

        (folder / _PARETO).write_text(pareto_svg(report), encoding="utf-8")
        (folder / _THROUGHPUT).write_text(throughput_svg(report), encoding="utf-8")
        if marks(report):
            (folder / _PAPER).write_bytes(pareto_image(report, "svg"))
        curves = {
            row.name: [
                curves_svg(history, row.name, f"curves-{place}-{number}", task.metric.title)
                for number, history in enumerate(row.training)
            ]
            for place, row in enumerate(report.rows)
            if row.training
        }
        (folder / _CURVES).write_text(json.dumps(curves), encoding="utf-8")

    key = ChartsKey(
        report=drawn_of(report),
        libraries={"matplotlib": metadata.version("matplotlib")},
        code=source_digest(*_PLOTS, type(task).__module__),
    ).digest
    folder = store.obtain(key, draw, about=f"{report.model} on {report.data.name}: charts").folder
    return Charts(
        (folder / _PARETO).read_text(encoding="utf-8"),
        (folder / _THROUGHPUT).read_text(encoding="utf-8"),
        (folder / _PAPER).read_bytes() if (folder / _PAPER).exists() else None,
        {name: tuple(each) for name, each in json.loads((folder / _CURVES).read_text(encoding="utf-8")).items()},
        stored_examples(report.examples, store),
        key,
    )


def drawn_of(report: Report) -> dict[str, Any]:
    """Return what charts may show of a report, as JSON values. A new field counts until it is named above."""
    body = {name: value for name, value in report.to_json().items() if name not in _OF_THE_RUN}
    rows = [{name: value for name, value in row.items() if name not in _OF_THE_ROWS_MAKING} for row in body["rows"]]
    return body | {"rows": rows}
