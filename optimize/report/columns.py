"""The columns of a report's table, one record each. The terminal and the page loop over them.

For a new column, add a field to the row (`optimize.measure.rows`) and a record here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from optimize.measure.figures import Measured, OutputParity, Parity, Ratio, Timed
from optimize.measure.rows import FLOAT_GRAPHS, Results
from optimize.report.number_format import (
    NONE,
    Family,
    count,
    day,
    family,
    number,
    percent,
    points,
    seconds,
    signed,
    size,
    small,
    times,
)
from optimize.report.table_rows import Line, lines
from optimize.tasks.base import Metric, find_task

SLOWER = "slower than its parent"


@dataclass(frozen=True)
class Cell:
    """One cell of the table.

    Attributes:
        text: the figure, or a dash if there is none.
        details: small print that the page adds below it.
        alarm: a word after the figure if it is bad news, else empty.
        share: length of the bar behind it, as a part of the longest (0 to 1).
    """

    text: str
    details: tuple[str, ...] = ()
    alarm: str = ""
    share: float | None = None


EMPTY = Cell(NONE)


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        key: its name in code.
        title: its title.
        unit: follows the title. Empty if the cells have their own units.
        cell: returns its cell for a line.
        rank: a terminal that is too narrow leaves out the columns with the highest rank first. Rank 1 always stays.
        table: which of the page's two tables it belongs to. The terminal has one table.
        left: whether it is text rather than figures.
        fields: its fields in the row, named like a data frame's columns: ``latency_ms.p50``. Nested fields are
            included.
    """

    key: str
    title: str
    unit: str
    cell: Callable[[Line, Results], Cell]
    rank: int = 7
    table: Literal["results", "details"] = "results"
    left: bool = False
    fields: tuple[str, ...] = ()

    @property
    def head(self) -> str:
        """Return title and unit."""
        return f"{self.title} {self.unit}".strip()


def _timed(show: Callable[[Timed], Cell | str]) -> Callable[[Line, Results], Cell]:
    """Make the cell function of a timed artifact or reference."""
    return lambda line, _: _cell(show(line.measured)) if line.measured else EMPTY


def _measured(show: Callable[[Measured], Cell | str]) -> Callable[[Line, Results], Cell]:
    """Make the cell function of a measured artifact. References have no accuracy, parity or memory of their own."""
    return lambda line, _: _cell(show(line.measured)) if isinstance(line.measured, Measured) else EMPTY


def _cell(shown: Cell | str) -> Cell:
    return shown if isinstance(shown, Cell) else Cell(shown)


def precision(line: Line) -> str:
    """Return the real precision of the arithmetic. The references run the baseline's float32."""
    if line.row is None:
        return "float32"
    return line.row.file.precision if line.row.file else NONE


def family_of(line: Line) -> Family:
    """Return the line's family, which decides its colour and shape."""
    return family(precision(line))


def parent_of(line: Line) -> str | None:
    """Return the name of the artifact that it was made from."""
    return line.row.parent if line.row else None


def _precision(line: Line, _: Results) -> Cell:
    written = line.row.file.format.replace("_", " ") if line.row and line.row.file else ""
    return Cell(precision(line), (written,) if written else ())


def _difference(measured: Measured) -> str:
    return points(measured.accuracy.difference.delta) if measured.accuracy.difference else NONE


def _interval(measured: Measured) -> str:
    difference = measured.accuracy.difference
    return f"{points(difference.low)} to {points(difference.high)}" if difference else NONE


def _speedup(line: Line, results: Results) -> Cell:
    if line.measured is None:
        return EMPTY
    longest = max(other.measured.speedup.value for other in lines(results, every=True) if other.measured)
    own = line.measured.speedup.value
    measure = ("fastest float" if results.float_yardstick else "the measure",) if line.id == results.yardstick else ()
    return Cell(times(own), (*measure, f"{times(line.measured.vs_eager.value)} eager"), share=own / longest)


def _vs_parent(measured: Measured) -> Cell:
    ratio = measured.vs_parent
    if ratio is None:
        return EMPTY
    unclear = ("unclear",) if ratio.unclear else ()
    return Cell(times(ratio.value), (_spread(ratio), *unclear), "slower" if ratio.slower else "")


def _spread(ratio: Ratio) -> str:
    return f"{times(ratio.low)} to {times(ratio.high)}"


def _p99(timed: Timed) -> Cell:
    return Cell(number(timed.latency_ms.p99), (f"of {count(timed.latency_ms.samples)}",))


def _throughput(timed: Timed) -> Cell:
    return Cell(number(timed.best_throughput), (f"batch {timed.best_batch}",))


def _size(line: Line, _: Results) -> Cell:
    return Cell(size(line.row.file.bytes)) if line.row and line.row.file and not line.skip else EMPTY


def _moved(measured: Measured) -> Cell:
    if (difference := measured.accuracy.difference) is None:
        return EMPTY
    text = f"{signed(difference.gained, '+')}, {signed(difference.lost, '−')}"
    left_out = measured.accuracy.left_out
    details = (f"of {count(measured.accuracy.images)}", *((f"{count(left_out)} unreadable",) if left_out else ()))
    return Cell(text, details)


def _agreement(measured: Measured) -> Cell:
    parity = measured.parity
    return Cell(percent(parity.agreement), (f"as {parity.reference}",)) if parity else EMPTY


def _sqnr(measured: Measured) -> Cell:
    if measured.parity is None:
        return EMPTY
    others = (f"{each.output} {_decibels(each)}" for each in measured.parity.others)
    return Cell(_decibels(measured.parity), tuple(others))


def _decibels(parity: Parity | OutputParity) -> str:
    return "exact" if parity.sqnr_db is None and parity.max_abs == 0 else number(parity.sqnr_db)


def _apart(measured: Measured) -> Cell:
    if measured.parity is None:
        return EMPTY
    return Cell(small(measured.parity.max_abs), (f"mean {small(measured.parity.mean_abs)}",))


def _runs_on(line: Line, _: Results) -> Cell:
    if line.row is None:
        return Cell(FLOAT_GRAPHS.get(line.name, "PyTorch")) if line.measured else EMPTY
    return Cell(line.pair.runs_on) if line.pair else EMPTY


def _provider(line: Line, _: Results) -> Cell:
    return Cell(line.pair.provider) if line.pair and line.pair.provider else EMPTY


def _made(line: Line, _: Results) -> Cell:
    row = line.row
    if row is None or row.seconds is None:
        return EMPTY
    return Cell(seconds(row.seconds), (f"on {day(row.made)}",) if row.cached and row.made else ())


def _score(metric: Metric, key: str, **place: Any) -> Column:
    shown, unit = (percent, "%") if metric.share else (number, "")
    cell = _measured(lambda measured: shown(measured.accuracy.scores[metric.key]))
    return Column(key, metric.title, unit, cell, fields=(f"accuracy.{metric.key}",), **place)


def columns_of(results: Results) -> tuple[Column, ...]:
    """Return the columns in the order of the table, with the task's own. The name of the line comes before them."""
    task = find_task(results.task)
    return (
        Column("runs_on", "runs on", "", _runs_on, rank=1, left=True, fields=("execution.engine", "execution.device")),
        Column("precision", "precision", "", _precision, rank=6, left=True, fields=("file.precision",)),
        _score(task.metric, "score", rank=1),
        Column("delta", "Δ", "points", _measured(_difference), rank=1, fields=("accuracy.difference.delta",)),
        Column(
            "interval",
            "95 %",
            "",
            _measured(_interval),
            rank=2,
            fields=("accuracy.difference.low", "accuracy.difference.high"),
        ),
        Column("p50", "p50", "ms", _timed(lambda t: number(t.latency_ms.p50)), rank=1, fields=("latency_ms.p50",)),
        Column("p95", "p95", "ms", _timed(lambda t: number(t.latency_ms.p95)), fields=("latency_ms.p95",)),
        Column("p99", "p99", "ms", _timed(_p99), rank=6, fields=("latency_ms.p99",)),
        Column(
            "samples",
            "calls",
            "",
            _timed(lambda t: count(t.latency_ms.samples)),
            table="details",
            fields=("latency_ms.samples",),
        ),
        Column("speedup", "speed", "", _speedup, rank=1, fields=("speedup.value",)),
        Column(
            "vs_eager",
            "vs eager",
            "",
            _timed(lambda t: times(t.vs_eager.value)),
            rank=5,
            table="details",
            fields=("vs_eager.value",),
        ),
        Column("vs_parent", "vs parent", "", _measured(_vs_parent), rank=3, fields=("vs_parent.value",)),
        Column("throughput", "img/s", "", _timed(_throughput), rank=4, fields=("throughput",)),
        Column("size", "size", "", _size, rank=1, fields=("file.bytes",)),
        *(_score(metric, metric.key, table="details") for metric in task.metrics[1:]),
        Column(
            "moved",
            "gained, lost",
            "",
            _measured(_moved),
            table="details",
            fields=("accuracy.difference.gained", "accuracy.difference.lost"),
        ),
        Column(
            "agreement",
            task.agreement.title,
            "%",
            _measured(_agreement),
            table="details",
            fields=(f"parity.{task.agreement.key}",),
        ),
        Column("sqnr", "SQNR", "dB", _measured(_sqnr), table="details", fields=("parity.sqnr_db",)),
        Column("apart", "largest difference", "", _measured(_apart), table="details", fields=("parity.max_abs",)),
        Column(
            "memory",
            "memory",
            "",
            _measured(lambda m: size(m.footprint.memory_bytes)),
            table="details",
            fields=("footprint.memory_bytes",),
        ),
        Column(
            "load",
            "load",
            "ms",
            _measured(lambda m: number(m.footprint.load_ms)),
            table="details",
            fields=("footprint.load_ms",),
        ),
        Column("provider", "executed by", "", _provider, table="details", left=True, fields=("provider",)),
        Column("made", "made in", "", _made, table="details", fields=("seconds",)),
    )
