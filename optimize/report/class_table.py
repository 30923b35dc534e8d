"""The figures of the single classes: as a table for the page, and as sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from optimize.measure.figures import ClassDifference, ClassFigures
from optimize.measure.rows import Results
from optimize.report.number_format import NONE, count, percent, points
from optimize.tasks.base import find_task

#: So many classes are on the page at first, and so many in a sentence.
_LINES: Final = 20
_NAMED: Final = 5


@dataclass(frozen=True)
class ClassTable:
    """A table with a line for each class.

    Attributes:
        heads: title and artifact of each column.
        lines: the cells of the first lines, and whether each is that of a loss beyond chance.
        others: the same of the others.
    """

    heads: tuple[tuple[str, str], ...]
    lines: tuple[tuple[tuple[str, ...], bool], ...]
    others: tuple[tuple[tuple[str, ...], bool], ...]


def class_table(results: Results) -> ClassTable | None:
    """Return the table of the classes, those that lose most first. None: the report has no classes.

    Without an artifact that is compared, those with the lowest scores come first.
    """
    if not results.classes:
        return None
    task, compared, first = find_task(results.task), _compared(results), _baseline(results)
    parts = [task.counted] if any(one.count != one.images for one in results.classes) else []
    score = f"{task.of_class} %"
    heads = [(task.entry, "")]
    for name in compared:
        heads += [("Δ points", name), ("95 %", "")]
    heads += [(score, name) for name in (first, *compared)]
    heads += [(title, "") for title in (*parts, "images")]
    order = sorted(results.classes, key=lambda one: _rank(one, first, compared))
    lines = tuple(
        (
            (
                one.name,
                *(cell for name in compared for cell in _difference(one.differences.get(name))),
                *(percent(one.scores.get(name)) for name in (first, *compared)),
                *([count(one.count)] if parts else []),
                count(one.images),
            ),
            any(difference.worse for difference in one.differences.values()),
        )
        for one in order
    )
    return ClassTable(tuple(heads), lines[:_LINES], lines[_LINES:])


def class_losses(results: Results) -> list[str]:
    """Return a sentence for each artifact that is compared class by class, on the classes in which it is worse."""
    task, shown = find_task(results.task), sum(one.count > 0 for one in results.classes)
    found = []
    for name in _compared(results):
        worse = [(one.name, one.differences[name]) for one in results.classes if _is_worse(one.differences.get(name))]
        worse.sort(key=lambda entry: entry[1].delta)
        named = ", ".join(f"{label} {points(difference.delta)}" for label, difference in worse[:_NAMED])
        more = f" and {len(worse) - _NAMED} more" if len(worse) > _NAMED else ""
        against = f"{name} against {_baseline(results)}"
        if worse:
            said = f"{task.of_class} is lower in {len(worse)} of {shown} {task.named}, beyond chance: {named}{more}"
        else:
            said = f"{task.of_class} is lower beyond chance in none of {shown} {task.named}"
        found.append(f"{against}: {said}.")
    return found


def _is_worse(difference: ClassDifference | None) -> bool:
    return difference is not None and difference.worse


def _compared(results: Results) -> list[str]:
    return list(dict.fromkeys(name for one in results.classes for name in one.differences))


def _baseline(results: Results) -> str:
    return next(iter(dict.fromkeys(name for one in results.classes for name in one.scores)), "")


def _rank(one: ClassFigures, first: str, compared: Sequence[str]) -> tuple[float, float]:
    difference = one.differences.get(compared[0]) if compared else None
    return difference.delta if difference else math.inf, one.scores.get(first, math.inf)


def _difference(difference: ClassDifference | None) -> tuple[str, str]:
    if difference is None:
        return NONE, NONE
    return points(difference.delta), f"{points(difference.low)} to {points(difference.high)}"
