"""The report's charts: accuracy against latency, and throughput by batch size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from optimize.measure.figures import Accuracy, Measured
from optimize.measure.rows import Results
from optimize.report.columns import family_of
from optimize.report.drawing import PAGE, PAPER, SETTINGS, Palette, canvas, inline, render
from optimize.report.label_placement import End, Label, label_ends, place_labels
from optimize.report.number_format import Family, number, size
from optimize.report.table_rows import Line, lines, others, shown
from optimize.tasks.base import find_task

_MARKERS: dict[Family, str] = {"float": "o", "half": "D", "int": "s"}
_WORDS: dict[Family, str] = {"float": "32-bit float", "half": "16-bit float", "int": "8-bit integer"}


@dataclass(frozen=True)
class Point:
    """One mark of the accuracy/latency plot. ``bounds`` are the ends of its whisker, fractions.

    ``beside`` marks a further execution of an artifact, which is drawn small and without text.
    """

    name: str
    latency: float
    score: float
    bounds: tuple[float, float] | None
    bytes: float
    family: Family
    recommended: bool
    slower: bool
    beside: bool = False

    @property
    def label(self) -> str:
        """Return name and size, with a star if recommended, and whether it is slower than its parent."""
        words = f"{self.name}, {size(self.bytes)}" if self.bytes else self.name
        return ("★ " if self.recommended else "") + words + (" (slower)" if self.slower else "")


def pareto_svg(results: Results) -> str:
    """Return the accuracy/latency plot for a page, or a sentence if nothing was measured."""
    if not (found := marks(results)):
        return "<p>No artifact has both an accuracy and a latency.</p>"
    spoken = "; ".join(f"{p.name}: {100 * p.score:.2f} % at {number(p.latency)} ms" for p in found if not p.beside)
    metric = find_task(results.task).metric.spoken
    return inline(
        _pareto(found, PAGE, metric),
        f"{metric[:1].upper() if metric.islower() else metric[:1]}{metric[1:]} against median latency of {spoken}.",
        "pareto",
    )


def pareto_image(results: Results, kind: str) -> bytes:
    """Return the accuracy/latency plot on white paper, as ``png`` or ``svg``.

    Raises:
        ValueError: another kind was requested, or no artifact has both an accuracy and a latency.
    """
    if kind not in ("png", "svg"):
        raise ValueError(f"a plot is written as .png or .svg, not {kind!r}")
    return render(pareto_figure(results), kind)


def pareto_figure(results: Results) -> Figure:
    """Return the accuracy/latency plot on white paper, as matplotlib's figure.

    Raises:
        ValueError: no artifact has both an accuracy and a latency.
    """
    if not (found := marks(results)):
        raise ValueError("no artifact has both an accuracy and a latency, so there is nothing to plot")
    return _pareto(found, PAPER, find_task(results.task).metric.spoken, title=results.title)


def throughput_svg(results: Results) -> str:
    """Plot images per second by batch size, one line for each artifact and reference. Other executions are faint."""
    found = [(line, sorted(line.measured.throughput.items())) for line in lines(results, every=True) if line.measured]
    if not found:
        return "<p>No throughput was measured.</p>"
    with mpl.rc_context(SETTINGS):
        figure, axes = canvas(PAGE, height=4.2, right=0.83, top=0.96)
        axes.set_xscale("log", base=2)
        ends = []
        for line, measured in found:
            colour = PAGE.muted if line.row is None else getattr(PAGE, family_of(line))
            axes.plot(*zip(*measured, strict=True), color=colour, **_stroke(line))
            if line.first:
                ends.append(End(measured[-1], ("★ " if line.chosen else "") + line.name, colour, line.chosen))
        batches = sorted({batch for _, measured in found for batch, _ in measured})
        axes.xaxis.set_major_locator(FixedLocator(batches))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}"))
        axes.set_ylim(0, 1.06 * max(value for _, measured in found for _, value in measured))
        axes.set_xlabel("batch size (images)")
        axes.set_ylabel("images per second")
        label_ends(axes, ends)
        best = [(line.id, max(value for _, value in measured)) for line, measured in found if line.first]
        spoken = "; ".join(f"{name}: best {number(value)}" for name, value in best)
        return inline(figure, f"Images per second by batch size. {spoken}.", "throughput")


def _stroke(line: Line) -> dict[str, Any]:
    """Return the style of a line of the throughput chart."""
    if not line.first:
        return {"linewidth": 1.0, "alpha": 0.3, "zorder": 1}
    if line.row is None:
        return {"linewidth": 1.3, "linestyle": (0, (4, 2)), "zorder": 2}
    marker = {"marker": _MARKERS[family_of(line)], "markersize": 6 if line.chosen else 4}
    return {"linewidth": 2.6 if line.chosen else 1.3, "zorder": 3 if line.chosen else 2, **marker}


def marks(results: Results) -> list[Point]:
    """Return the marks in the report's order: one for each measured artifact, and one for each other execution."""
    found = []
    for row in results.rows:
        for line in (shown(results, row), *others(results, row)):
            if not isinstance(line.measured, Measured):
                continue
            found.append(
                Point(
                    name=line.name if line.first else line.id,
                    latency=line.measured.latency_ms.p50,
                    score=line.measured.accuracy.score,
                    bounds=_bounds(line.measured.accuracy) if line.first else None,
                    bytes=row.file.bytes if row.file else 0,
                    family=family_of(line),
                    recommended=line.chosen,
                    slower=line.measured.vs_parent is not None and line.measured.vs_parent.slower,
                    beside=not line.first,
                )
            )
    return found


def _bounds(accuracy: Accuracy) -> tuple[float, float] | None:
    """Return the ends of the whisker: the baseline's accuracy plus the interval of the difference, within 0 and 1."""
    if (difference := accuracy.difference) is None:
        return None
    start = accuracy.score - difference.delta
    return max(start + difference.low, 0.0), min(start + difference.high, 1.0)


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of the (latency, accuracy) points that no other beats in both, from fast to slow."""
    front: list[int] = []
    for index in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1])):
        if not front or points[index][1] > points[front[-1]][1]:
            front.append(index)
    return front


def _pareto(points: list[Point], palette: Palette, metric: str, title: str = "") -> Figure:
    with mpl.rc_context(SETTINGS):
        figure, axes = canvas(palette, height=5.0, right=0.98, top=0.88 if title else 0.93)
        if title:
            axes.set_title(f"{title}: accuracy and latency", loc="left", fontweight="bold", pad=26)
        xs = [p.latency for p in points]
        ys = [100 * v for p in points for v in (p.score, *(p.bounds or ()))]
        axes.set_xscale("log")
        axes.set_xlim(min(xs) / 1.35, max(xs) * 1.5)
        pad = max(0.09 * (max(ys) - min(ys)), 0.3)
        axes.set_ylim(min(ys) - pad, max(ys) + pad)
        axes.xaxis.set_major_locator(FixedLocator(_log_ticks(*axes.get_xlim())))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.yaxis.set_major_locator(MaxNLocator(7))
        axes.set_xlabel("median latency of one image, ms (log scale; further left is faster)")
        axes.set_ylabel(f"{metric}, %")

        front = [points[i] for i in pareto_front([(p.latency, p.score) for p in points])]
        steps_x = [*(p.latency for p in front), axes.get_xlim()[1]]
        steps_y = [*(100 * p.score for p in front), 100 * front[-1].score]
        if len(points) > 1:
            axes.step(
                steps_x, steps_y, where="post", color=palette.front, linewidth=1.4, linestyle=(0, (5, 3)), zorder=1
            )

        largest = max((p.bytes for p in points), default=0.0) or 1.0
        labels = []
        for point in points:
            area = 20.0 if point.beside else max(300 * point.bytes / largest, 26.0)
            _mark(axes, point, area, palette)
            whisker = (100 * point.bounds[0], 100 * point.bounds[1]) if point.bounds else None
            if not point.beside:
                at = (point.latency, 100 * point.score)
                labels.append(Label(point.label, at, area, whisker, bold=point.recommended))
        _legend(axes, palette, sorted({p.family for p in points}), front=len(points) > 1)
        corners = list(zip(steps_x, steps_y, strict=True))
        unnamed = [(p.latency, 100 * p.score) for p in points if p.beside]
        place_labels(figure, axes, labels, palette, front=corners, unnamed=unnamed)
    return figure


def _mark(axes: Axes, point: Point, area: float, palette: Palette) -> None:
    colour = getattr(palette, point.family)
    if point.bounds:
        low, high = (100 * bound for bound in point.bounds)
        axes.vlines(point.latency, low, high, color=colour, linewidth=1.2, alpha=0.55)
        for bound in point.bounds:
            axes.plot(point.latency, 100 * bound, marker="_", color=colour, markersize=7, alpha=0.55)
    if point.recommended:
        ring = (math.sqrt(area) + 7) ** 2
        axes.scatter(point.latency, 100 * point.score, s=ring, facecolor="none", edgecolor=palette.ink, zorder=4)
    axes.scatter(
        point.latency,
        100 * point.score,
        s=area,
        marker=_MARKERS[point.family],
        facecolor=colour,
        edgecolor="none" if point.beside else palette.surface,
        linewidth=0.8,
        alpha=0.45 if point.beside else 0.9,
        zorder=2 if point.beside else 3,
    )


def _legend(axes: Axes, palette: Palette, families: Sequence[Family], *, front: bool) -> None:
    style: dict[str, Any] = {"linestyle": "none", "markersize": 6, "markeredgewidth": 0}
    keys = [Line2D([], [], marker=_MARKERS[f], color=getattr(palette, f), label=_WORDS[f], **style) for f in families]
    bar = Line2D([], [], marker="|", markersize=10, color=palette.muted, linestyle="none")
    bar.set_label("95 % interval of the difference to the baseline")
    keys.append(bar)
    if front:
        keys.append(Line2D([], [], color=palette.front, linestyle=(0, (5, 3)), label="Pareto front"))
    axes.legend(
        handles=keys,
        loc="lower left",
        bbox_to_anchor=(-0.01, 1.0),
        ncols=len(keys),
        frameon=False,
        fontsize=8.5,
        labelcolor=palette.muted,
        handletextpad=0.4,
        columnspacing=1.6,
    )


def _log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers in the range, from the coarsest set that has at least four of them."""
    found: list[float] = []
    for steps in (
        (1, 2, 5),
        (1, 1.5, 2, 3, 5, 7),
        [n / 10 for n in range(10, 100, 2)],
        [n / 20 for n in range(20, 200)],
    ):
        found = [s * 10.0**e for e in range(-6, 8) for s in steps if low <= s * 10.0**e <= high]
        if len(found) >= 4:
            break
    return found
