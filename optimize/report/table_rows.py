"""The lines of a report's table: each artifact with its best execution or with all, and the references."""

from __future__ import annotations

from dataclasses import dataclass

from optimize.measure.figures import Timed
from optimize.measure.rows import Pair, Reference, Results, Row, Skip


@dataclass(frozen=True)
class Line:
    """One line: a row with one of its pairs, a row without measured pairs, or a reference.

    Attributes:
        of: the row or reference.
        pair: the execution that is shown. None for a reference, and for a row without one.
        first: whether it is the row's main line, which the row's others follow.
        chosen: whether it is the recommended pair.
    """

    of: Row | Reference
    pair: Pair | None = None
    first: bool = True
    chosen: bool = False

    @property
    def name(self) -> str:
        """Return the name of the artifact or reference."""
        return self.of.name

    @property
    def id(self) -> str:
        """Return its name in code and recommendations: the pair's id, else the name."""
        return self.pair.id if self.pair else self.of.name

    @property
    def row(self) -> Row | None:
        """Return the artifact's row. None for a reference."""
        return self.of if isinstance(self.of, Row) else None

    @property
    def measured(self) -> Timed | None:
        """Return the measurement. For a pair it is a `Measured`."""
        if isinstance(self.of, Reference):
            return self.of.measured
        return self.pair.measured if self.pair else None

    @property
    def skip(self) -> Skip | None:
        """Return the reason if nothing was measured."""
        if self.pair is not None:
            return self.pair.skip
        return self.of.skip


def shown(results: Results, row: Row) -> Line:
    """Return a row's main line: its recommended pair, else its best, else the reason why there is none."""
    chosen = results.chosen_pair
    pair = chosen if chosen is not None and row is results.chosen else row.best
    return Line(row, pair, chosen=pair is not None and pair is chosen)


def others(results: Results, row: Row) -> list[Line]:
    """Return the row's further pairs: measured ones by p50, then skipped ones. Empty for a single skipped pair."""
    first = shown(results, row).pair
    rest = [pair for pair in row.pairs if pair is not first]
    if first is None and len(rest) < 2:
        return []
    return [Line(row, pair, first=False) for pair in sorted(rest, key=_p50)]


def lines(results: Results, *, every: bool = False) -> list[Line]:
    """Return a line for each row, or with ``every`` for each of its pairs, and then the references."""
    found = []
    for row in results.rows:
        found += [shown(results, row), *(others(results, row) if every else ())]
    return found + references(results)


def references(results: Results) -> list[Line]:
    """Return a line for each reference."""
    return [Line(reference) for reference in results.references]


def _p50(pair: Pair) -> float:
    return pair.measured.latency_ms.p50 if pair.measured else float("inf")
