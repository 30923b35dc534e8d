"""The report's charts, drawn by matplotlib: SVG that follows the page's colours, or an image that stands alone."""

from __future__ import annotations

import html
import io
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from matplotlib.transforms import Bbox

from optimize.measure.rows import Accuracy, Results, Row
from optimize.report.columns import family_of
from optimize.report.words import Family, number, size

_MARKERS: dict[Family, str] = {"float": "o", "half": "D", "int": "s"}
_WORDS: dict[Family, str] = {"float": "32-bit float", "half": "16-bit float", "int": "8-bit integer"}
_SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "font.size": 9,
    "font.family": "DejaVu Sans",
}


@dataclass(frozen=True)
class _Palette:
    """Colours by role. Those of the three families differ in lightness too, and never stand without a shape."""

    ink: str
    muted: str
    grid: str
    surface: str
    float: str
    half: str
    int: str
    front: str


_PAPER = _Palette("#1b1f24", "#57606a", "#e3e6ea", "#ffffff", "#3565b5", "#a4540a", "#127a52", "#8a93a0")
# In a page each colour is a marker, replaced below by the CSS variable of the same name.
_PAGE = _Palette("#0a0b01", "#0a0b02", "#0a0b03", "#0a0b04", "#0a0b05", "#0a0b06", "#0a0b07", "#0a0b08")


@dataclass(frozen=True)
class Point:
    """One mark of the accuracy/latency plot; ``bounds`` are the ends of its whisker, fractions."""

    name: str
    latency: float
    top1: float
    bounds: tuple[float, float] | None
    bytes: float
    family: Family
    recommended: bool
    slower: bool

    @property
    def label(self) -> str:
        """Name and size, a star if recommended, and whether it is slower than its parent."""
        words = f"{self.name}, {size(self.bytes)}" if self.bytes else self.name
        return ("★ " if self.recommended else "") + words + (" (slower)" if self.slower else "")


def pareto_svg(results: Results) -> str:
    """The accuracy/latency plot for a page, or a sentence in place of it if nothing was measured."""
    if not (found := marks(results)):
        return "<p>No artifact has both an accuracy and a latency.</p>"
    spoken = "; ".join(f"{p.name}: {100 * p.top1:.2f} % at {number(p.latency)} ms" for p in found)
    return _inline(_pareto(found, _PAGE), f"Top-1 accuracy against median latency of {spoken}.", "pareto")


def pareto_image(results: Results, kind: str) -> bytes:
    """The same plot on white paper, as ``png`` or ``svg``.

    Raises:
        ValueError: Another kind was asked for, or no artifact has both an accuracy and a latency.
    """
    if kind not in ("png", "svg"):
        raise ValueError(f"a plot is written as .png or .svg, not {kind!r}")
    if not (found := marks(results)):
        raise ValueError("no artifact has both an accuracy and a latency, so there is nothing to plot")
    return _render(_pareto(found, _PAPER, title=results.title), kind)


def throughput_svg(results: Results) -> str:
    """Images per second by batch size, one line for each artifact and baseline."""
    series = [(line, sorted(line.measured.throughput.items())) for line in results.lines if line.measured]
    if not series:
        return "<p>No throughput was measured.</p>"
    with mpl.rc_context(_SETTINGS):
        figure, axes = _canvas(_PAGE, height=4.2, right=0.83, top=0.96)
        axes.set_xscale("log", base=2)
        ends = []
        for line, measured in series:
            reference, kind = not isinstance(line, Row), family_of(line)
            chosen = line is results.chosen
            axes.plot(
                *zip(*measured, strict=True),
                color=_PAGE.muted if reference else getattr(_PAGE, kind),
                linewidth=2.6 if chosen else 1.3,
                linestyle=(0, (4, 2)) if reference else "-",
                marker=None if reference else _MARKERS[kind],
                markersize=6 if chosen else 4,
                zorder=3 if chosen else 2,
            )
            label = ("★ " if chosen else "") + line.name
            ends.append((measured[-1], label, _PAGE.muted if reference else getattr(_PAGE, kind), chosen))
        batches = sorted({batch for _, measured in series for batch, _ in measured})
        axes.xaxis.set_major_locator(FixedLocator(batches))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}"))
        axes.set_ylim(0, 1.06 * max(value for _, measured in series for _, value in measured))
        axes.set_xlabel("batch size (images)")
        axes.set_ylabel("images per second")
        _end_labels(axes, ends)
        spoken = "; ".join(f"{line.name}: best {number(max(v for _, v in measured))}" for line, measured in series)
        return _inline(figure, f"Images per second by batch size. {spoken}.", "throughput")


def marks(results: Results) -> list[Point]:
    """What is drawn: a mark for each measured artifact, in the report's order."""
    found = []
    for row in results.rows:
        if row.measured is None:
            continue
        found.append(
            Point(
                name=row.name,
                latency=row.measured.latency_ms.p50,
                top1=row.measured.accuracy.top1,
                bounds=_bounds(row.measured.accuracy),
                bytes=row.file.bytes if row.file else 0,
                family=family_of(row),
                recommended=row is results.chosen,
                slower=row.measured.vs_parent is not None and row.measured.vs_parent.slower,
            )
        )
    return found


def _bounds(accuracy: Accuracy) -> tuple[float, float] | None:
    """Where the whisker ends: the interval of the difference, set on the baseline's accuracy, within 0 and 1."""
    if (difference := accuracy.difference) is None:
        return None
    start = accuracy.top1 - difference.delta
    return max(start + difference.low, 0.0), min(start + difference.high, 1.0)


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """The indices of the (latency, accuracy) points that no other beats in both, from fast to slow."""
    front: list[int] = []
    for index in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1])):
        if not front or points[index][1] > points[front[-1]][1]:
            front.append(index)
    return front


def _pareto(points: list[Point], palette: _Palette, title: str = "") -> Figure:
    with mpl.rc_context(_SETTINGS):
        figure, axes = _canvas(palette, height=5.0, right=0.98, top=0.88 if title else 0.93)
        if title:
            axes.set_title(f"{title}: accuracy and latency", loc="left", fontweight="bold", pad=26)
        xs = [p.latency for p in points]
        ys = [100 * v for p in points for v in (p.top1, *(p.bounds or ()))]
        axes.set_xscale("log")
        axes.set_xlim(min(xs) / 1.35, max(xs) * 1.5)
        pad = max(0.09 * (max(ys) - min(ys)), 0.3)
        axes.set_ylim(min(ys) - pad, max(ys) + pad)
        axes.xaxis.set_major_locator(FixedLocator(_log_ticks(*axes.get_xlim())))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axes.yaxis.set_major_locator(MaxNLocator(7))
        axes.set_xlabel("median latency of one image, ms (log scale; further left is faster)")
        axes.set_ylabel("top-1 accuracy, %")

        front = [points[i] for i in pareto_front([(p.latency, p.top1) for p in points])]
        steps_x = [*(p.latency for p in front), axes.get_xlim()[1]]
        steps_y = [*(100 * p.top1 for p in front), 100 * front[-1].top1]
        if len(points) > 1:
            axes.step(
                steps_x, steps_y, where="post", color=palette.front, linewidth=1.4, linestyle=(0, (5, 3)), zorder=1
            )

        largest = max((p.bytes for p in points), default=0.0) or 1.0
        areas = [max(300 * p.bytes / largest, 26.0) for p in points]
        for point, area in zip(points, areas, strict=True):
            colour = getattr(palette, point.family)
            if point.bounds:
                low, high = (100 * bound for bound in point.bounds)
                axes.vlines(point.latency, low, high, color=colour, linewidth=1.2, alpha=0.55)
                for bound in point.bounds:
                    axes.plot(point.latency, 100 * bound, marker="_", color=colour, markersize=7, alpha=0.55)
            if point.recommended:
                ring = (math.sqrt(area) + 7) ** 2
                axes.scatter(point.latency, 100 * point.top1, s=ring, facecolor="none", edgecolor=palette.ink, zorder=4)
            axes.scatter(
                point.latency,
                100 * point.top1,
                s=area,
                marker=_MARKERS[point.family],
                facecolor=colour,
                edgecolor=palette.surface,
                linewidth=0.8,
                alpha=0.9,
                zorder=3,
            )
        _legend(axes, palette, sorted({p.family for p in points}), front=len(points) > 1)
        _place_labels(figure, axes, points, areas, palette, front=list(zip(steps_x, steps_y, strict=True)))
    return figure


def _canvas(palette: _Palette, *, height: float, right: float, top: float) -> tuple[Figure, Axes]:
    # 72 dots per inch make a display pixel one point, so that label boxes can be laid out in points.
    figure = Figure(figsize=(9.4, height), dpi=72, facecolor=palette.surface)
    FigureCanvasAgg(figure)
    figure.subplots_adjust(left=0.08, right=right, top=top, bottom=0.48 / height)
    axes = figure.add_subplot(facecolor="none")
    axes.grid(color=palette.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(palette.muted)
    axes.tick_params(color=palette.muted, labelcolor=palette.muted, length=3)
    for text in (axes.xaxis.label, axes.yaxis.label, axes.title):
        text.set_color(palette.ink)
    axes.title.set_color(palette.ink)
    return figure, axes


def _legend(axes: Axes, palette: _Palette, families: Sequence[Family], *, front: bool) -> None:
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


def _place_labels(
    figure: Figure,
    axes: Axes,
    points: list[Point],
    areas: list[float],
    palette: _Palette,
    *,
    front: list[tuple[float, float]],
) -> None:
    """Puts each label at the nearest place that covers no marker, bar or other label, with a line to it if far."""
    canvas = figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    renderer = canvas.get_renderer()  # type: ignore[no-untyped-call]
    inside = axes.get_window_extent()
    spots = [axes.transData.transform((p.latency, 100 * p.top1)) for p in points]
    corners = [axes.transData.transform(corner) for corner in front]
    taken = [
        Bbox.from_extents(min(x1, x2) - 1, min(y1, y2) - 1, max(x1, x2) + 1, max(y1, y2) + 1)
        for (xa, ya), (xb, yb) in itertools.pairwise(corners)
        for x1, y1, x2, y2 in ((xa, ya, xb, ya), (xb, ya, xb, yb))  # along, then up: the front is drawn in steps
    ]
    marks: list[Bbox] = []
    for point, area, (x, y) in zip(points, areas, spots, strict=True):
        half = math.sqrt(area) / 2 + 2
        marks.append(Bbox.from_extents(x - half, y - half, x + half, y + half))
        if point.bounds:
            low, high = (axes.transData.transform((point.latency, 100 * b))[1] for b in point.bounds)
            taken.append(Bbox.from_extents(x - 2, low, x + 2, high))
    taken += marks
    for point, area, (x, y) in sorted(zip(points, areas, spots, strict=True), key=lambda e: -e[2][1]):
        weight = "bold" if point.recommended else "normal"
        probe = figure.text(0, 0, point.label, fontsize=9, fontweight=weight)
        extent = probe.get_window_extent(renderer)
        probe.remove()
        options = list(_candidates(x, y, math.sqrt(area) / 2 + 5, extent.width, extent.height))
        others = [spot for spot in marks if not spot.contains(x, y)]
        costs = [
            _cost(box, taken, inside) + away + (_crossings((x, y), box, others) if away > 14 else 0.0)
            for box, away in options
        ]
        box, away = options[costs.index(min(costs))]
        taken.append(box)
        if away > 14:
            line = axes.transData.inverted().transform([(x, y), _nearest((x, y), box)])
            axes.plot(line[:, 0], line[:, 1], color=palette.muted, linewidth=0.7, zorder=1.5)
        left, base = axes.transAxes.inverted().transform((box.x0, box.y0 + box.height / 2))
        axes.text(
            left,
            base,
            point.label,
            transform=axes.transAxes,
            va="center",
            fontsize=9,
            fontweight=weight,
            color=palette.ink,
            zorder=5,
        )


def _candidates(x: float, y: float, gap: float, width: float, height: float) -> Iterator[tuple[Bbox, float]]:
    for away in (0, 6, 14, 22, 34, 48, 64, 84):
        for turn in range(24):
            angle = 2 * math.pi * turn / 24
            cx = x + math.cos(angle) * (gap + away + width / 2)
            cy = y + math.sin(angle) * (gap + away + height / 2)
            yield Bbox.from_bounds(cx - width / 2, cy - height / 2, width, height), float(away)


def _cost(box: Bbox, taken: list[Bbox], inside: Bbox) -> float:
    padded = box.padded(1.5)
    overlap = sum(both.width * both.height for other in taken if (both := Bbox.intersection(padded, other)) is not None)
    out = (
        max(inside.x0 - box.x0, 0)
        + max(box.x1 - inside.x1, 0)
        + max(inside.y0 - box.y0, 0)
        + max(box.y1 - inside.y1, 0)
    )
    return float(20 * overlap + 40 * out)


def _nearest(spot: tuple[float, float], box: Bbox) -> tuple[float, float]:
    return min(max(spot[0], box.x0), box.x1), min(max(spot[1], box.y0), box.y1)


def _crossings(spot: tuple[float, float], box: Bbox, others: Sequence[Bbox]) -> float:
    """What it costs if the line from a mark to its label runs over other marks: it would seem to start there."""
    end = _nearest(spot, box)
    steps = [(spot[0] + t * (end[0] - spot[0]), spot[1] + t * (end[1] - spot[1])) for t in (0.2, 0.4, 0.6, 0.8, 1.0)]
    return 100.0 * sum(other.contains(x, y) for other in others for x, y in steps)


def _end_labels(axes: Axes, ends: list[tuple[tuple[int, float], str, str, bool]]) -> None:
    """Names at the right ends of lines, moved apart until none covers another."""
    spacing, inside = 12.5, axes.get_window_extent()
    ordered = sorted(ends, key=lambda end: end[0][1])
    wanted = [float(axes.transData.transform(end[0])[1]) for end in ordered]
    heights = list(wanted)
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + spacing)
    # Pushed over the top: let the whole stack sink, as far as the labels below leave room.
    limit = inside.y1 + 10
    for i in reversed(range(len(heights))):
        heights[i] = min(heights[i], limit)
        limit = heights[i] - spacing
    right = inside.x1
    for (end, name, colour, chosen), height in zip(ordered, heights, strict=True):
        x, y = axes.transData.transform(end)
        path = axes.transAxes.inverted().transform([(x + 4, y), (right + 12, height), (right + 16, height)])
        axes.plot(*path[:2].T, color=colour, linewidth=0.6, alpha=0.6, transform=axes.transAxes, clip_on=False)
        weight = "bold" if chosen else "normal"
        axes.text(path[2][0], path[2][1], name, transform=axes.transAxes, va="center", color=colour, fontweight=weight)


def _log_ticks(low: float, high: float) -> list[float]:
    """Round numbers in the range, from the coarsest set that has at least four of them."""
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


def _render(figure: Figure, kind: str) -> bytes:
    buffer = io.BytesIO()
    with mpl.rc_context(_SETTINGS):
        # Without a date the same report gives the same bytes.
        figure.savefig(buffer, format=kind, dpi=200, metadata={"Date": None} if kind == "svg" else None)
    return buffer.getvalue()


def _inline(figure: Figure, description: str, prefix: str) -> str:
    """The figure as an SVG element that takes its colours and font from the page, and whose ids are its own."""
    figure.patch.set_visible(False)
    svg = _render(figure, "svg").decode()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"(\sid=\"|url\(#|href=\"#)", rf"\g<1>{prefix}-", svg)
    svg = re.sub(r"font: ((?:\w+ )*?)([\d.]+px) [^;\"]*", r"font: \1\2 var(--sans)", svg)
    for role, colour in vars(_PAGE).items():
        svg = svg.replace(colour, f"var(--{role})")
    box = re.search(r"viewBox=\"[^\"]*\"", svg)
    assert box is not None
    opening = f'<svg {box.group()} role="img" aria-label="{html.escape(description)}" class="chart">'
    return re.sub(r"<svg[^>]*>", lambda _: opening, svg, count=1).replace("xlink:href", "href")
