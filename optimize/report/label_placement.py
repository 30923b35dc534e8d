"""Places a chart's labels so that none covers a mark, a line or another label."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from optimize.report.drawing import Palette


@dataclass(frozen=True)
class Label:
    """The label of a mark.

    Attributes:
        text: its text.
        at: the mark, in the axes' data.
        area: area of the mark, square points.
        whisker: ends of the bar through the mark, in the axes' data. None if it has none.
        bold: whether it is bold.
    """

    text: str
    at: tuple[float, float]
    area: float
    whisker: tuple[float, float] | None
    bold: bool


def place_labels(
    figure: Figure,
    axes: Axes,
    labels: Sequence[Label],
    palette: Palette,
    *,
    front: Sequence[tuple[float, float]],
    unnamed: Sequence[tuple[float, float]] = (),
) -> None:
    """Put each label at the nearest place that covers no marker, bar or other label, with a line to it if far.

    Args:
        figure: the figure, whose canvas measures text.
        axes: the axes to draw in, with their final limits.
        labels: one for each mark.
        palette: the chart's colours.
        front: corners of a stepped line, which no label covers either.
        unnamed: small marks without a label, in the axes' data.
    """
    canvas = figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    renderer = canvas.get_renderer()  # type: ignore[no-untyped-call]
    inside = axes.get_window_extent().padded(-4)  # beside the frame, and not on it
    spots = [axes.transData.transform(label.at) for label in labels]
    corners = [axes.transData.transform(corner) for corner in front]
    taken = [
        Bbox.from_extents(min(x1, x2) - 1, min(y1, y2) - 1, max(x1, x2) + 1, max(y1, y2) + 1)
        for (xa, ya), (xb, yb) in itertools.pairwise(corners)
        for x1, y1, x2, y2 in ((xa, ya, xb, ya), (xb, ya, xb, yb))  # along, then up: the front is drawn in steps
    ]
    marks: list[Bbox] = []
    for label, (x, y) in zip(labels, spots, strict=True):
        half = math.sqrt(label.area) / 2 + 2
        marks.append(Bbox.from_extents(x - half, y - half, x + half, y + half))
        if label.whisker:
            low, high = (axes.transData.transform((label.at[0], end))[1] for end in label.whisker)
            taken.append(Bbox.from_extents(x - 2, low, x + 2, high))
    taken += marks
    taken += [Bbox.from_extents(x - 4, y - 4, x + 4, y + 4) for x, y in map(axes.transData.transform, unnamed)]
    for label, (x, y) in sorted(zip(labels, spots, strict=True), key=lambda e: -e[1][1]):
        weight = "bold" if label.bold else "normal"
        probe = figure.text(0, 0, label.text, fontsize=9, fontweight=weight)
        extent = probe.get_window_extent(renderer)
        probe.remove()
        options = list(_candidates(x, y, math.sqrt(label.area) / 2 + 5, extent.width, extent.height))
        others = [spot for spot in marks if not spot.contains(x, y)]
        costs = [
            cost + away + (_crossings((x, y), box, others) if away > 14 else 0.0)
            for cost, (box, away) in zip(_costs([box for box, _ in options], taken, inside), options, strict=True)
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
            label.text,
            transform=axes.transAxes,
            va="center",
            fontsize=9,
            fontweight=weight,
            color=palette.ink,
            zorder=5,
        )


@dataclass(frozen=True)
class End:
    """The last point of a line, in the axes' data, and its name."""

    at: tuple[float, float]
    name: str
    colour: str
    bold: bool


def label_ends(axes: Axes, ends: Sequence[End]) -> None:
    """Write names at the right ends of lines, moved apart until none covers another."""
    spacing, inside = 12.5, axes.get_window_extent()
    ordered = sorted(ends, key=lambda end: end.at[1])
    heights = [float(axes.transData.transform(end.at)[1]) for end in ordered]
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + spacing)
    # If they are pushed over the top, let the whole stack sink as far as the labels below leave room.
    limit = inside.y1 + 10
    for i in reversed(range(len(heights))):
        heights[i] = min(heights[i], limit)
        limit = heights[i] - spacing
    right = inside.x1
    for end, height in zip(ordered, heights, strict=True):
        x, y = axes.transData.transform(end.at)
        path = axes.transAxes.inverted().transform([(x + 4, y), (right + 12, height), (right + 16, height)])
        axes.plot(*path[:2].T, color=end.colour, linewidth=0.6, alpha=0.6, transform=axes.transAxes, clip_on=False)
        axes.text(
            path[2][0],
            path[2][1],
            end.name,
            transform=axes.transAxes,
            va="center",
            color=end.colour,
            fontweight="bold" if end.bold else "normal",
        )


def _candidates(x: float, y: float, gap: float, width: float, height: float) -> Iterator[tuple[Bbox, float]]:
    for away in (0, 6, 14, 22, 34, 48, 64, 84):
        for turn in range(24):
            angle = 2 * math.pi * turn / 24
            cx = x + math.cos(angle) * (gap + away + width / 2)
            cy = y + math.sin(angle) * (gap + away + height / 2)
            yield Bbox.from_bounds(cx - width / 2, cy - height / 2, width, height), float(away)


def _costs(boxes: Sequence[Bbox], taken: Sequence[Bbox], inside: Bbox) -> list[float]:
    """Return the cost of a label in each box: for everything it covers, and for how far it juts out."""
    own = np.array([box.extents for box in boxes])
    padded = own + np.array([-1.5, -1.5, 1.5, 1.5])
    others = np.array([box.extents for box in taken])
    low = np.maximum(padded[:, None, :2], others[None, :, :2])
    high = np.minimum(padded[:, None, 2:], others[None, :, 2:])
    overlap = (high - low).clip(min=0).prod(axis=2).sum(axis=1)
    out = (inside.extents[:2] - own[:, :2]).clip(min=0).sum(axis=1)
    out += (own[:, 2:] - inside.extents[2:]).clip(min=0).sum(axis=1)
    costs: list[float] = (20 * overlap + 40 * out).tolist()
    return costs


def _nearest(spot: tuple[float, float], box: Bbox) -> tuple[float, float]:
    return min(max(spot[0], box.x0), box.x1), min(max(spot[1], box.y0), box.y1)


def _crossings(spot: tuple[float, float], box: Bbox, others: Sequence[Bbox]) -> float:
    """Return the cost of a line from a mark to its label over other marks: it would seem to start there."""
    end = _nearest(spot, box)
    steps = [(spot[0] + t * (end[0] - spot[0]), spot[1] + t * (end[1] - spot[1])) for t in (0.2, 0.4, 0.6, 0.8, 1.0)]
    return 100.0 * sum(other.contains(x, y) for other in others for x, y in steps)
