"""Compares the artifacts of a run class by class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from optimize.measure.figures import ClassDifference, ClassFigures
from optimize.measure.rows import Pair, Row
from optimize.tasks.base import Evidence, Task


def main_pairs(rows: Sequence[Row], chosen: str | None) -> list[Pair]:
    """Return the pair that stands for each measured artifact: the recommended one, or else its best."""
    found = []
    for row in rows:
        recommended = [pair for pair in row.pairs if pair.id == chosen]
        found += recommended or ([row.best] if row.best else [])
    return found


def compared_pairs(rows: Sequence[Row], chosen: str | None) -> tuple[str, ...]:
    """Return the ids of the pairs that a report compares with the baseline class by class, the main one first.

    It is the recommended pair if that computes with integers, and otherwise the fastest that does: integers cost
    accuracy. The recommended one comes next. Pairs of the baseline are not compared with it.
    """
    integers = [row.best for row in rows[1:] if row.best and row.file and not row.file.is_float]
    times = {pair.id: pair.measured.latency_ms.p50 for pair in integers if pair.measured}
    of_integers = {pair.id for row in rows if row.file and not row.file.is_float for pair in row.pairs}
    fastest = min(times, key=lambda pair: times[pair], default=None)
    wanted = [chosen] if chosen in of_integers else [fastest, chosen]
    own = {pair.id for pair in rows[0].pairs}
    return tuple(pair for pair in dict.fromkeys(wanted) if pair is not None and pair not in own)


def class_figures(
    rows: Sequence[Row], chosen: str | None, evidence: Mapping[str, Evidence], task: Task, classes: Sequence[str]
) -> tuple[ClassFigures, ...]:
    """Return the figures of each class, of the main pair of each artifact. Empty if the task scores no classes.

    Args:
        rows: the measured rows, the baseline's first.
        chosen: id of the recommended pair.
        evidence: the evidence of each measured pair by its id. The first is the one that all are compared with.
        task: what the network is for.
        classes: the names of the classes.
    """
    first = next(iter(evidence))
    names = dict.fromkeys([first, *(pair.id for pair in main_pairs(rows, chosen))])
    scores = {name: found for name in names if (found := task.by_class(evidence[name], len(classes)))}
    if not scores:
        return ()
    differences = {
        name: task.class_differences(evidence[first], evidence[name], len(classes))
        for name in compared_pairs(rows, chosen)
    }
    shown = sum(count > 0 for count in scores[first].counts)
    return tuple(
        ClassFigures(
            name=label,
            count=int(scores[first].counts[place]),
            images=int(scores[first].images[place]),
            scores={name: float(own.scores[place]) for name, own in scores.items() if own.counts[place]},
            differences={
                name: ClassDifference.of(own, shown) for name, every in differences.items() if (own := every[place])
            },
        )
        for place, label in enumerate(classes)
    )
