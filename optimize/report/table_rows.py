"""The lines of a report's table: an artifact as its best execution runs it, or as each of them, and the references."""

from __future__ import annotations

from dataclasses import dataclass

from optimize.measure.figures import Timed
from optimize.measure.rows import Pair, Reference, Results, Row, Skip


@dataclass(frozen=True)
class Line:
    """One line: a row with one of its pairs, a row of which none was measured, or a reference.

    Attributes:
        of: the row or reference.
        pair: the execution that is shown; None for a reference, and for a row that has none.
        first: whether it stands for the whole row; the others of a row follow it.
        chosen: whether it is the recommended pair.
    """

    of: Row | Reference
    pair: Pair | None = None
    first: bool = True
    chosen: bool = False

    @property
    def name(self) -> str:
        """The artifact's or reference's."""
        return self.of.name

    @property
    def id(self) -> str:
        """What code and recommendations call it: the pair's id, else the name."""
        return self.pair.id if self.pair else self.of.name

    @property
    def row(self) -> Row | None:
        """The artifact's row; None for a reference."""
        return self.of if isinstance(self.of, Row) else None

    @property
    def measured(self) -> Timed | None:
        """What was measured; of a pair it is a `Measured`."""
        if isinstance(self.of, Reference):
            return self.of.measured
        return self.pair.measured if self.pair else None

    @property
    def skip(self) -> Skip | None:
        """Why nothing was."""
        if self.pair is not None:
            return self.pair.skip
        return self.of.skip


def shown(results: Results, row: Row) -> Line:
    """The line that stands for a row: its recommended pair, else its best, else why there is none."""
    chosen = results.chosen_pair
    pair = chosen if chosen is not None and row is results.chosen else row.best
    return Line(row, pair, chosen=pair is not None and pair is chosen)


def others(results: Results, row: Row) -> list[Line]:
    """The row's further pairs: the measured by their p50, then the skipped; a single one that was skipped is none."""
    first = shown(results, row).pair
    rest = [pair for pair in row.pairs if pair is not first]
    if first is None and len(rest) < 2:
        return []
    return [Line(row, pair, first=False) for pair in sorted(rest, key=_p50)]


def lines(results: Results, *, every: bool = False) -> list[Line]:
    """A line for each row, with ``every`` one for each of its pairs; then the references."""
    found = []
    for row in results.rows:
        found += [shown(results, row), *(others(results, row) if every else ())]
    return found + references(results)


def references(results: Results) -> list[Line]:
    """A line for each reference."""
    return [Line(reference) for reference in results.references]


def _p50(pair: Pair) -> float:
    return pair.measured.latency_ms.p50 if pair.measured else float("inf")
