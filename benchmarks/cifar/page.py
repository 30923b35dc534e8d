"""The page of the table: a line for each row and each schedule that it was made with, and every cell on its own."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.cifar.provenance import RECIPE_CHANGED
from benchmarks.cifar.record import Cell, Faster, Judged, Table
from benchmarks.cifar.rows import ROWS, Row
from optimize.report.number_format import NONE, percent, points, size, times

#: Says of a cell whether its recipe or the code that made it has changed since; nothing where that is not known.
Changed = Callable[[Cell], Iterable[str]]


@dataclass(frozen=True)
class Spread:
    """A mean over seeds with its two-sided 95 % interval; fractions."""

    mean: float
    low: float
    high: float


def over_seeds(values: Sequence[float]) -> Spread | None:
    """Mean and interval (Student's t) of two values or more; None of fewer, which have no interval."""
    if len(values) < 2:
        return None
    mean, error = statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
    half = student(len(values) - 1) * error
    return Spread(mean, mean - half, mean + half)


def student(freedom: int, confidence: float = 0.95) -> float:
    """The quantile of Student's t whose two sides leave ``1 - confidence``; ``freedom`` from 1.

    By bisection of the distribution, which is a finite sum for whole degrees of freedom: Abramowitz and Stegun,
    Handbook of Mathematical Functions (1964), 26.7.3 and 26.7.4.
    """

    def inside(t: float) -> float:
        angle = math.atan(t / math.sqrt(freedom))
        square, term, total = math.cos(angle) ** 2, 1.0, 0.0
        for k in range(freedom // 2):
            total += term
            term *= square * ((2 * k + 2) / (2 * k + 3) if freedom % 2 else (2 * k + 1) / (2 * k + 2))
        if freedom % 2:
            return 2 / math.pi * (angle + math.sin(angle) * math.cos(angle) * total)
        return math.sin(angle) * total

    low, high = 0.0, 1.0
    while inside(high) < confidence:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle) < confidence else (low, middle)
    return high


def page(table: Table, changed: Changed = lambda cell: (), rows: Sequence[Row] = ROWS) -> str:
    """What stands below the mark.

    Args:
        table: what is known.
        changed: asked of each cell.
        rows: in their order; those without cells are empty.
    """
    lines = [*_head(table), *_table(table, changed, rows), "", *_verdict(table, rows), ""]
    if table.cells:
        lines += ["## Cell by cell", "", *_cells(table, changed), "", *_made(table), ""]
    return "\n".join(lines).rstrip() + "\n"


def _head(table: Table) -> Iterator[str]:
    if any(cell.short for cell in table.cells):
        yield "Made with `--short`, which shows that everything works: **the figures mean nothing.**"
        yield ""


def _table(table: Table, changed: Changed, rows: Sequence[Row]) -> Iterator[str]:
    titles = ("row", "recipe", "epochs", "seeds", "control", "top-1", "difference, points", "aim", "", "beats", "file")
    yield f"| {' | '.join(titles)} |"
    yield "|---|---|---:|---:|---:|---:|---:|---:|---|---|---:|"
    for row in rows:
        found = schedules(table, row)
        for cells in found or [[]]:
            other = any(RECIPE_CHANGED in changed(cell) for cell in cells)
            title = f"{row.title}, by another recipe than now" if other else row.title
            yield f"| {' | '.join((title, *_line(row, cells)))} |"


def schedules(table: Table, row: Row) -> list[list[Cell]]:
    """A row's cells that were judged, those that differ by their seed alone together; those trained longest first."""
    found: dict[str, list[Cell]] = {}
    for cell in table.cells:
        if cell.row == row.name and cell.judged is not None:
            found.setdefault(_schedule(cell), []).append(cell)
    return sorted(found.values(), key=lambda cells: (-cells[0].trained, cells[0].created))


def _schedule(cell: Cell) -> str:
    """What cells have in common that differ by their seed alone."""
    images = cell.judged.images if cell.judged is not None else 0
    return repr((cell.baseline, cell.start, cell.stages, cell.control, cell.model, cell.checkpoint, cell.data, images))


def _line(row: Row, cells: Sequence[Cell]) -> Iterator[str]:
    recipe = f"[{row.recipe}](../../examples/{row.recipe})"
    if not cells:
        yield from (recipe, "", "", "", "", "", _aim(row), "", row.beats, "")
        return
    judged = [cell.judged for cell in cells if cell.judged is not None]
    yield recipe
    yield str(cells[0].trained)
    yield str(len(cells))
    yield percent(statistics.fmean(each.control for each in judged))
    yield percent(statistics.fmean(each.top1 for each in judged))
    yield _difference(judged)
    yield _aim(row)
    yield "reached" if _reached(row, cells) else "missed"
    yield row.beats
    yield size(cells[0].bytes[0]) if cells[0].bytes else NONE


def _difference(judged: Sequence[Judged]) -> str:
    """Over seeds where there are several; else over the images of the one that there is, which is said."""
    spread = over_seeds([each.difference.delta for each in judged])
    if spread is not None:
        return f"{points(spread.mean)} [{points(spread.low)}, {points(spread.high)}]"
    return f"{_paired(judged[0])} of images"


def _paired(judged: Judged) -> str:
    found = judged.difference
    return f"{points(found.delta)} [{points(found.low)}, {points(found.high)}]"


def _aim(row: Row) -> str:
    faster = f", {times(row.faster)}" if row.faster is not None else ""
    return f"{points(row.aim / 100)}{faster}"


def _reached(row: Row, cells: Sequence[Cell]) -> bool:
    """Whether the mean is what the row aims at, and the speed and the arithmetic where that is wanted."""
    mean = statistics.fmean(cell.judged.difference.delta for cell in cells if cell.judged is not None)
    speeds = [cell.faster.ratio for cell in cells if cell.faster is not None]
    fast = row.faster is None or (bool(speeds) and statistics.fmean(speeds) >= row.faster)
    small = row.fewer is None or all(cell.macs is not None and cell.macs >= row.fewer for cell in cells)
    return round(100 * mean, 2) >= row.aim and fast and small


def _verdict(table: Table, rows: Sequence[Row]) -> Iterator[str]:
    """What is not in the table, and why."""
    empty = [row.title for row in rows if not schedules(table, row)]
    if empty:
        yield from ("These rows are empty, because they are not finished:", "", *(f"- {title}" for title in empty))
    failed = [cell for cell in table.cells if cell.judged is None]
    if failed:
        said = (f"- {_title(cell, rows)}, seed {cell.seed}: `{cell.reason}`" for cell in failed)
        yield from ("", "These cells could not be made:", "", *said)


def _title(cell: Cell, rows: Sequence[Row]) -> str:
    return next((row.title for row in rows if row.name == cell.row), cell.row)


def _cells(table: Table, changed: Changed) -> Iterator[str]:
    yield "| row | seed | epochs | control | top-1 | difference, points | as the file says | made in | |"
    yield "|---|---:|---:|---:|---:|---:|---|---:|---|"
    for cell in table.cells:
        if cell.judged is None:
            continue
        fewer = [f"{times(cell.macs)} fewer MACs"] if cell.macs is not None else []
        words = [
            f"`{cell.row}`",
            str(cell.seed),
            str(cell.trained),
            percent(cell.judged.control),
            percent(cell.judged.top1),
            _paired(cell.judged),
            str(cell.precision),
            f"{cell.seconds / 60:.0f} min",
            "; ".join((*fewer, *_kept(cell), *_timed(cell.faster), *changed(cell))),
        ]
        yield f"| {' | '.join(words)} |"


def _kept(cell: Cell) -> Iterator[str]:
    """That a training left what it began with: the row shows nothing of it."""
    if cell.unimproved:
        yield "a training was no better on the held-out images after any epoch: what it began with was kept"


def _timed(faster: Faster | None) -> Iterator[str]:
    if faster is not None:
        yield (
            f"{times(faster.ratio)} [{times(faster.low)}, {times(faster.high)}] as fast ({faster.engine}; control "
            f"{faster.control_engine}), {faster.running:.1f} processes were running"
        )


def _made(table: Table) -> Iterator[str]:
    """Where, when and by which command cells were made, each said once."""
    found: dict[str, list[str]] = {}
    for cell in table.cells:
        gpu = cell.machine.get("gpu")
        versions = ", ".join(f"{name} {version}" for name, version in cell.versions.items())
        place = f"{cell.machine['cpu']}, {cell.machine['cores']} cores{', ' + gpu['name'] if gpu else ''}, {versions}"
        said = f"`{cell.command}` | {cell.created:%Y-%m-%d} | {place}"
        found.setdefault(said, []).append(f"`{cell.row}` {cell.seed}")
    yield from ("| row and seed | command | made on | machine |", "|---|---|---|---|")
    yield from (f"| {', '.join(cells)} | {said} |" for said, cells in found.items())
