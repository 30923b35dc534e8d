"""Draws the curve behind a choice of settings: p99 over the arrival rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from serve.tune.search import Found, Goal, Point

_COLOURS = {"chosen": "#1a7f4b", "as it was": "#9aa4b1"}


def plot(found: Found, curves: Mapping[str, Sequence[Point]], goal: Goal, path: Path) -> None:
    """Draw the curves as SVG, and every other measured point with a rate as a dot."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5))
    others = [point for trial in found.trials for point in trial.points if point.rate is not None and point.p99 > 0]
    axes.scatter(
        [point.rate or 0 for point in others],
        [point.p99 for point in others],
        s=12,
        color="#d0d5db",
        label="all trials",
    )
    for name, points in curves.items():
        drawn = [point for point in points if point.p99 > 0]
        axes.plot(
            [point.rate or 0 for point in drawn],
            [point.p99 for point in drawn],
            marker="o",
            markersize=4,
            color=_COLOURS[name],
            label=name,
        )
    axes.axhline(goal.p99_ms, linestyle="--", linewidth=1, color="#c2703d", label=f"p99 of {goal.p99_ms:g} ms")
    axes.set_yscale("log")
    axes.set_xlabel("requests per second (Poisson, open loop)")
    axes.set_ylabel("p99 in ms, from the time when a request was due")
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, format="svg")
    plt.close(figure)
