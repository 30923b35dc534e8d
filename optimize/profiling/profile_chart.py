"""A profile as bars: the time of each layer, and its share of the machine's peak."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from optimize.profiling.profile_records import Profile
from optimize.report.drawing import PAPER, SETTINGS, render
from optimize.report.number_format import family

#: Inches.
_LINE, _MARGIN, _WIDTH = 0.2, 1.1, 11.0
_BAR = 0.72
_COLOURS = {"float": PAPER.float, "half": PAPER.half, "int": PAPER.int}


def profile_svg(title: str, found: Profile) -> bytes:
    """Draw three panels with a bar for each layer: milliseconds, share of the peak, share of a copy's rate.

    Colours show the precision that a layer computes in. A layer without a figure has no bar.
    """
    layers = found.layers
    colours = [_COLOURS[family(layer.precision)] if layer.precision else PAPER.front for layer in layers]
    peaks, copies = ([share(layer) for layer in layers] for share in (found.of_peak, found.of_copy))
    with mpl.rc_context(SETTINGS):
        drawing = Figure(figsize=(_WIDTH, _MARGIN + _LINE * max(len(layers), 4)), dpi=72, facecolor=PAPER.surface)
        FigureCanvasAgg(drawing)
        panels: Sequence[Axes] = drawing.subplots(1, 3, sharey=True)
        shown: tuple[tuple[str, list[float | None]], ...] = (
            ("time, ms", [layer.ms for layer in layers]),
            ("MACs, % of the peak", [100 * share if share is not None else None for share in peaks]),
            ("bytes, % of a copy's rate", [100 * share if share is not None else None for share in copies]),
        )
        for axes, (head, values) in zip(panels, shown, strict=True):
            there: list[tuple[int, float]] = [(place, value) for place, value in enumerate(values) if value is not None]
            axes.barh(
                [place for place, _ in there],
                [value for _, value in there],
                height=_BAR,
                color=[colours[place] for place, _ in there],
            )
            axes.set_title(head, color=PAPER.ink, fontsize=9)
            axes.grid(axis="x", color=PAPER.grid, linewidth=0.8)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(colors=PAPER.muted)
        panels[0].set_yticks(range(len(layers)), [f"{layer.name} · {layer.kind}" for layer in layers])
        panels[0].set_ylim(len(layers) - 0.4, -0.6)
        drawing.suptitle(title, color=PAPER.ink, fontsize=10)
        drawing.tight_layout()
    return render(drawing, "svg")
