"""The tools of every chart of a report: colours by role, an empty canvas, and rendering to SVG or an image."""

from __future__ import annotations

import html
import io
import re
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

#: matplotlib's settings while a chart is drawn.
SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "font.size": 9,
    "font.family": "DejaVu Sans",
}


@dataclass(frozen=True)
class Palette:
    """Colours by role. Those of the three families also differ in lightness, and always come with a shape."""

    ink: str
    muted: str
    grid: str
    surface: str
    float: str
    half: str
    int: str
    front: str


#: On white paper.
PAPER = Palette("#1b1f24", "#57606a", "#e3e6ea", "#ffffff", "#3565b5", "#a4540a", "#127a52", "#8a93a0")
#: In a page each colour is a marker, which is replaced below by the CSS variable of the same name.
PAGE = Palette("#0a0b01", "#0a0b02", "#0a0b03", "#0a0b04", "#0a0b05", "#0a0b06", "#0a0b07", "#0a0b08")


class Chart(Figure):
    """A figure that a notebook shows by itself. matplotlib's own figure needs pyplot's backend for notebooks."""

    def _repr_png_(self) -> bytes:
        return render(self, "png")


def canvas(palette: Palette, *, height: float, right: float, top: float) -> tuple[Figure, Axes]:
    """Return an empty chart of ``height`` inches. Its axes end at ``right`` and ``top``, as parts of the figure."""
    figure = _figure(palette, height)
    figure.subplots_adjust(left=0.08, right=right, top=top, bottom=0.48 / height)
    return figure, _styled(figure.add_subplot(facecolor="none"), palette)


def canvases(palette: Palette, count: int, *, height: float) -> tuple[Figure, list[Axes]]:
    """Return ``count`` empty charts beside each other, with room for a second axis at the right of each."""
    figure = _figure(palette, height)
    figure.subplots_adjust(left=0.08, right=0.97, top=1 - 0.3 / height, bottom=0.48 / height, wspace=0.5)
    axes = [figure.add_subplot(1, count, number + 1, facecolor="none") for number in range(count)]
    return figure, [_styled(each, palette) for each in axes]


def _figure(palette: Palette, height: float) -> Figure:
    # 72 dots per inch make a display pixel one point, so that label boxes can be laid out in points.
    figure = Chart(figsize=(9.4, height), dpi=72, facecolor=palette.surface)
    FigureCanvasAgg(figure)
    return figure


def _styled(axes: Axes, palette: Palette) -> Axes:
    axes.grid(color=palette.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(palette.muted)
    axes.tick_params(color=palette.muted, labelcolor=palette.muted, length=3)
    for text in (axes.xaxis.label, axes.yaxis.label, axes.title):
        text.set_color(palette.ink)
    return axes


def render(figure: Figure, kind: str) -> bytes:
    """Render the figure as ``png`` or ``svg``. The same figure always gives the same bytes."""
    buffer = io.BytesIO()
    with mpl.rc_context(SETTINGS):
        figure.savefig(buffer, format=kind, dpi=200, metadata={"Date": None} if kind == "svg" else None)
    return buffer.getvalue()


def inline(figure: Figure, description: str, prefix: str) -> str:
    """Render the figure as an SVG element with the page's colours and font. ``prefix`` makes its ids unique."""
    figure.patch.set_visible(False)
    svg = render(figure, "svg").decode()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"(\sid=\"|url\(#|href=\"#)", rf"\g<1>{prefix}-", svg)
    svg = re.sub(r"font: ((?:\w+ )*?)([\d.]+px) [^;\"]*", r"font: \1\2 var(--sans)", svg)
    for role, colour in vars(PAGE).items():
        svg = svg.replace(colour, f"var(--{role})")
    box = re.search(r"viewBox=\"[^\"]*\"", svg)
    assert box is not None
    opening = f'<svg {box.group()} role="img" aria-label="{html.escape(description)}" class="chart">'
    return re.sub(r"<svg[^>]*>", lambda _: opening, svg, count=1).replace("xlink:href", "href")
