"""The plot of all subjects: how each way's top-1 differs from the float network's, and how long an image takes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

from benchmarks.quant.page import TITLES, engines_of
from benchmarks.quant.record import SubjectRecord
from benchmarks.quant.ways import FLOAT
from optimize.statistics import paired_difference

mpl.use("Agg")
mpl.rcParams["svg.hashsalt"] = "bench-quant"  # the same figures give the same file

_OURS, _PEERS, _FLOAT = "#1a7f4b", "#c2703d", "#9aa4b1"
_MARKERS = {"onnxruntime": "o", "openvino": "s", "inductor": "^", "exported": "D"}


def plot(records: Sequence[SubjectRecord], path: Path) -> Path:
    """Draw a row of two panels for each subject into ``path``, an ``.svg``, which is returned."""
    import matplotlib.pyplot as plt

    lines = [max(2, len(record.rows)) for record in records] or [2]
    figure, panels = plt.subplots(
        len(lines),
        2,
        figsize=(10, 0.8 + sum(0.7 + 0.22 * count for count in lines)),
        squeeze=False,
        height_ratios=lines,
    )
    for (differences, times), record in zip(panels, records, strict=False):
        _differences(differences, record)
        _times(times, record)
    panels[-1, 0].set_xlabel("top-1 against float, points, paired, 95 %\n(green: ours, orange: peers)", fontsize=8)
    panels[-1, 1].set_xlabel("ms, one image\n(circle: ONNX Runtime, square: OpenVINO, triangle: Inductor)", fontsize=8)
    for axes in panels.flat:
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path


def _differences(axes: mpl.axes.Axes, record: SubjectRecord) -> None:
    floats = record.row(FLOAT)
    shown = [row for row in reversed(record.rows) if row.engine is not None and row.name != FLOAT]
    for place, row in enumerate(shown):
        if floats is None or floats.engine is None:
            break
        found = paired_difference(floats.answers.right, row.answers.right)
        ends = [[100 * (found.delta - found.low)], [100 * (found.high - found.delta)]]
        axes.errorbar(100 * found.delta, place, xerr=ends, fmt="o", ms=4, color=_OURS if row.ours else _PEERS)
    axes.axvline(0, color=_FLOAT, lw=0.8)
    axes.set_yticks(range(len(shown)), [row.name for row in shown])
    axes.set_title(record.title, loc="left", fontsize=9)


def _times(axes: mpl.axes.Axes, record: SubjectRecord) -> None:
    shown = [row for row in reversed(record.rows) if row.engine is not None]
    for place, row in enumerate(shown):
        colour = _FLOAT if row.name == FLOAT else _OURS if row.ours else _PEERS
        for engine in engines_of(record):
            if engine in row.medians:
                median = statistics.median(row.medians[engine])
                axes.plot(median, place, _MARKERS[engine], ms=4, color=colour)
    axes.set_yticks(range(len(shown)), [row.name for row in shown])
    axes.set_title("" if any(row.medians for row in shown) else "nothing was timed yet", loc="left", fontsize=9)
    axes.set_xlim(left=0)


assert set(_MARKERS) == set(TITLES)
