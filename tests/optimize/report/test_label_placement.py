"""A chart's labels are read: none lies over another, a mark, or the frame."""

from __future__ import annotations

import itertools
import random

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.transforms import Bbox

from optimize.report.drawing import PAGE, canvas
from optimize.report.label_placement import Label, place_labels

NAMES = ("baseline, 45.0 MB", "★ onnx-int8, 11.3 MB", "fuse, 44.8 MB", "ptq, 11.3 MB (slower)", "half, 22.4 MB")


def overlap(one: Bbox, other: Bbox) -> bool:
    return min(one.x1, other.x1) > max(one.x0, other.x0) and min(one.y1, other.y1) > max(one.y0, other.y0)


@pytest.mark.parametrize("seed", range(12))
def test_no_label_touches_a_mark_another_or_the_frame(seed: int) -> None:
    drawn = random.Random(seed)
    figure, axes = canvas(PAGE, height=5.0, right=0.98, top=0.93)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    spots = [(0.03 if number == 1 else drawn.uniform(0.03, 0.97), drawn.uniform(0.1, 0.9)) for number in range(5)]
    labels = [Label(name, spot, 80.0, None, bold=name[0] == "★") for name, spot in zip(NAMES, spots, strict=True)]
    place_labels(figure, axes, labels, PAGE, front=[])
    assert isinstance(figure.canvas, FigureCanvasAgg)
    renderer = figure.canvas.get_renderer()
    boxes = [text.get_window_extent(renderer) for text in axes.texts]
    assert sorted(text.get_text() for text in axes.texts) == sorted(NAMES)
    frame, marks = axes.get_window_extent(), [axes.transData.transform(spot) for spot in spots]
    for box in boxes:
        assert box.x0 >= frame.x0 + 3
        assert box.y0 >= frame.y0 + 3
        assert box.x1 <= frame.x1 - 3
        assert box.y1 <= frame.y1 - 3
        assert not any(box.contains(x, y) for x, y in marks)
    assert not any(overlap(one, other) for one, other in itertools.combinations(boxes, 2))
