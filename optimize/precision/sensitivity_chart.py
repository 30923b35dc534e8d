"""Draws each layer's cost and gain in int8 as bars."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Drawing

from optimize.measure.rows import Skip
from optimize.precision.precision_records import Figure, Sensitivity
from optimize.report.drawing import PAPER, SETTINGS, render

#: In inches.
_LINE, _MARGIN, _WIDTH = 0.24, 1.1, 11.0
#: As a share of a layer's line.
_BAR = 0.36


def sensitivity_svg(found: Sensitivity) -> bytes:
    """Draw three panels with bars for each layer, alone and all but it.

    They show the drop with its interval, the SQNR, and the gain.
    """
    names = [layer.name for layer in found.layers]
    pairs = (
        ("alone", PAPER.int, [layer.alone for layer in found.layers], 0.19),
        (
            "all but it",
            PAPER.half,
            [layer.all_but for layer in found.layers],
            -0.19,
        ),
    )
    with mpl.rc_context(SETTINGS):
        drawing = Drawing(figsize=(_WIDTH, _MARGIN + _LINE * max(len(names), 4)), dpi=72, facecolor=PAPER.surface)
        FigureCanvasAgg(drawing)
        panels: Sequence[Axes] = drawing.subplots(1, 3, sharey=True)
        for said, colour, figures, shift in pairs:
            _bars(panels, figures, said, colour, shift)
        titles = (f"{found.metric}, points from float", "SQNR of the logits, dB", "won by int8, ms an image")
        for axes, title in zip(panels, titles, strict=True):
            axes.set_title(title, color=PAPER.ink, fontsize=9)
            axes.grid(axis="x", color=PAPER.grid, linewidth=0.8)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(colors=PAPER.muted)
            axes.axvline(0, color=PAPER.muted, linewidth=0.8)
        panels[0].set_yticks(range(len(names)), names)
        panels[0].set_ylim(len(names) - 0.4, -0.6)
        panels[0].legend(loc="lower left", bbox_to_anchor=(0.0, 1.06), ncols=2, frameon=False, fontsize=8)
        drawing.tight_layout()
    return render(drawing, "svg")


def _bars(panels: Sequence[Axes], figures: Sequence[Figure | Skip], said: str, colour: str, shift: float) -> None:
    """Draw a series of bars in each panel. A layer without a figure has no bar."""
    there = [(place, figure) for place, figure in enumerate(figures) if isinstance(figure, Figure)]
    places = [place - shift for place, _ in there]
    drops = [100 * figure.difference.delta for _, figure in there]
    ends = (
        [100 * (figure.difference.delta - figure.difference.low) for _, figure in there],
        [100 * (figure.difference.high - figure.difference.delta) for _, figure in there],
    )
    if not there:
        return
    panels[0].barh(
        places, drops, xerr=ends, ecolor=PAPER.ink, error_kw={"linewidth": 0.8}, label=said, height=_BAR, color=colour
    )
    ratios = [(place, figure.sqnr_db) for place, (_, figure) in zip(places, there, strict=True)]
    panels[1].barh(
        [place for place, db in ratios if db is not None],
        [db for _, db in ratios if db is not None],
        height=_BAR,
        color=colour,
    )
    panels[2].barh(places, [figure.won_ms for _, figure in there], height=_BAR, color=colour)
