"""A training's curves as a chart: loss and learning rate beside the accuracy that chose the best epoch."""

from __future__ import annotations

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from optimize.report.drawing import PAGE, SETTINGS, Palette, canvases, inline
from optimize.report.number_format import percent
from optimize.store.training_history import History


def curves_svg(history: History, name: str, prefix: str, metric: str) -> str:
    """Return the curves of the training of ``name`` for a page.

    ``prefix`` makes its ids unique. ``metric`` is the title of the score.
    """
    with mpl.rc_context(SETTINGS):
        figure, (left, right) = canvases(PAGE, 2, height=2.9)
        _losses(left, history, PAGE)
        _accuracies(right, history, PAGE, metric)
        first, last = history.points[0].loss, history.points[-1].loss
        spoken = f"Training of {name}: loss {first:.3g} to {last:.3g} in {len(history.epochs)} epochs."
        return inline(figure, spoken, prefix)


def _losses(axes: Axes, history: History, palette: Palette) -> None:
    """Draw the loss, and faintly the learning rate, by epochs."""
    places = [point.step / history.steps for point in history.points]
    marker = "o" if len(places) == 1 else ""
    axes.plot(places, [point.loss for point in history.points], marker=marker, color=palette.float, linewidth=1.6)
    axes.set_ylabel("loss (nats)", color=palette.float)
    axes.set_xlabel("epochs")
    rates = axes.twinx()
    rates.plot(places, [point.learning_rate for point in history.points], color=palette.muted, linewidth=1.1, ls="--")
    rates.set_ylim(bottom=0)
    rates.spines[:].set_visible(False)
    rates.tick_params(color=palette.muted, labelcolor=palette.muted, length=3)
    rates.yaxis.set_major_locator(MaxNLocator(5))
    rates.yaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:.3g}"))
    rates.set_ylabel("learning rate (dashed)", color=palette.muted)


def _accuracies(axes: Axes, history: History, palette: Palette, metric: str) -> None:
    """Draw the score on the held-out images after each epoch, and before the first if judged. The kept is ringed."""
    scores = {number: epoch.held_out_score for number, epoch in enumerate(history.epochs, start=1)}
    if history.before is not None:
        scores = {0: history.before} | scores
    kept = 0 if history.best is None else history.best + 1
    axes.plot(list(scores), [100 * score for score in scores.values()], color=palette.int, marker="o", markersize=3)
    axes.plot([kept], [100 * scores[kept]], "o", markersize=10, markerfacecolor="none", color=palette.int, zorder=3)
    for drawn in axes.lines:
        drawn.set_clip_on(False)  # the axis ends at 101 %, less than half a ring's height above 100 %
    axes.set_title(f"kept: {percent(scores[kept])} %", fontsize=9, loc="right", color=palette.int)
    axes.set_ylabel(f"held-out {metric} (%)")
    axes.set_xlabel("epochs")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.margins(y=0.15)
    axes.set_ylim(top=min(axes.get_ylim()[1], 101.0))
