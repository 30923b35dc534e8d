"""What is known of the table: its cells, numbers without weights, in one file that outlives the machine."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from optimize.measure.figures import Record
from optimize.statistics import PairedDifference, paired_interval
from optimize.store.atomic_files import write_json
from serve.runtime.errors import UserError, one_line


class Judged(Record):
    """How a cell answers the evaluation images beside its control: both right, only one of them, none."""

    both: int
    gained: int
    lost: int
    neither: int

    @property
    def images(self) -> int:
        """How many there are."""
        return self.both + self.gained + self.lost + self.neither

    @property
    def top1(self) -> float:
        """The cell's, a fraction."""
        return (self.both + self.gained) / self.images

    @property
    def control(self) -> float:
        """The control's top-1."""
        return (self.both + self.lost) / self.images

    @property
    def difference(self) -> PairedDifference:
        """The cell's top-1 minus the control's, with the interval that these images leave."""
        return paired_interval(self.gained, self.lost, self.images)


class Faster(Record):
    """How many times as fast as its control at batch 16, each in its best float engine: median of rounds, interval.

    ``running`` are the processes that the machine ran when it was timed.
    """

    ratio: float
    low: float
    high: float
    engine: str
    control_engine: str
    running: float


class Cell(Record):
    """A row with one seed.

    Attributes:
        key: of all that it depends on but the code; equal ones are not made again.
        row: its name.
        recipe: file of the examples, and the stage of it that is judged.
        seed: of every random choice.
        epochs: that each training had where that is not the recipe's.
        trained: epochs that the cell was trained in all, and its control.
        short: whether it was made only to see that everything works; its figures mean nothing.
        baseline: how the network was trained here, the settings that are not defaults; None where it had a checkpoint.
        start: passes and settings before the recipe, those that are not defaults.
        stages: those of the recipe.
        control: those of the control.
        model: what the architecture is.
        checkpoint: SHA-256 of the weights that it starts from; None: trained here.
        data: name of the data set.
        judged: top-1; None where it could not be made.
        reason: why not.
        precision: as the artifact's card says it.
        engines: what ran the cell and its control.
        bytes: size of the cell's model file, and of its control's.
        macs: how many times fewer multiply-accumulates; None where none were removed.
        faster: None where it was not timed.
        unimproved: whether a training of it left what it began with: no epoch was better on the held-out images.
        notes: what the artifact says of itself.
        seconds: that its stages, and those of its control, took when they were made.
        command: that made it.
        machine: processor, cores, GPU.
        versions: of libraries.
        code: digest of the sources that made and measured it.
        created: when.
    """

    key: str
    row: str
    recipe: str
    stage: str
    seed: int
    epochs: int | None
    trained: int
    short: bool
    baseline: dict[str, Any] | None = None
    start: tuple[tuple[str, dict[str, Any]], ...]
    stages: tuple[tuple[str, dict[str, Any]], ...]
    control: tuple[tuple[str, dict[str, Any]], ...]
    model: str
    checkpoint: str | None
    data: str
    judged: Judged | None = None
    reason: str | None = None
    precision: str | None = None
    engines: tuple[str, str] | None = None
    bytes: tuple[int, int] | None = None
    macs: float | None = None
    faster: Faster | None = None
    unimproved: bool = False
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    command: str
    machine: dict[str, Any]
    versions: dict[str, str]
    code: str
    created: datetime.datetime

    @property
    def operations(self) -> frozenset[str]:
        """The passes that made it and its control."""
        return frozenset(name for name, _ in (*self.start, *self.stages, *self.control))


class Table(Record):
    """All cells."""

    cells: tuple[Cell, ...] = Field(default=())

    def cell(self, key: str) -> Cell | None:
        """The one of this key, if it was made."""
        return next((cell for cell in self.cells if cell.key == key), None)

    def with_cell(self, cell: Cell, order: Sequence[str]) -> Table:
        """With this one in the place of one of its key, in the order of the rows' names, then as they were made."""
        cells = [*(other for other in self.cells if other.key != cell.key), cell]
        places = {name: place for place, name in enumerate(order)}
        return Table(cells=tuple(sorted(cells, key=lambda each: (places.get(each.row, len(places)), each.created))))


def read(path: Path) -> Table:
    """The cells of a file; none where there is no such file yet.

    Raises:
        UserError: it is not what `write` wrote.
    """
    if not path.exists():
        return Table()
    try:
        return Table.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:  # pydantic's and JSON's are ValueErrors
        raise UserError(
            f"{path}: is no table of cells ({one_line(error)}); move it away, or give another file with --records"
        ) from None


def write(table: Table, path: Path) -> None:
    """Keep a table, whole or not at all."""
    write_json(table.to_json(), path)
