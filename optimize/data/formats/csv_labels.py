"""``csvlabels:FILE``: a CSV that names pictures and the labels of each, for multi-label classification."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from optimize.data.formats.base import DataFormat, register
from serve.runtime.errors import UserError, listed

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from optimize.data.formats.csv_file import CsvFile, Row
    from optimize.data.records import ImageData, Split
    from optimize.listener import Listener

#: Names of a column with all labels of a picture, and what may be between them: the first that occurs.
_LABELS = ("labels", "label", "tags", "tag", "classes", "class", "categories", "category", "findinglabels")
_BETWEEN: Final = "|;, "

_YES, _NO = ("1", "1.0", "true"), ("0", "0.0", "false")


def _open(place: str, seed: int, listener: Listener) -> ImageData:
    import torch

    from optimize.data.formats.csv_file import plain, read_csv
    from optimize.data.pixels import native_size
    from optimize.data.records import ImageData

    table = read_csv(place, CSV_LABELS.usage)
    listener.progressed(0.5, "labels")
    column = next((number for number, name in enumerate(table.columns) if plain(name) in _LABELS), None)
    if column is None and len(table.columns) == 1 and not all(row.cells[0].lower() in _YES + _NO for row in table.rows):
        column = 0
    classes, rows, notes = _marked(table) if column is None else _named(table, column)
    if not classes:
        raise UserError(f"{table.rows[0].file}: has no labels")
    train, val = table.splits(torch.from_numpy(rows), seed)
    # Not mirrored: the pictures may show letters, signs, or a left and a right.
    return ImageData(
        table.name,
        "multilabel",
        classes,
        train,
        val,
        "shift",
        native_size(train),
        gaps=gaps_of(train, val, classes),
        notes=(*table.notes, *notes),
    )


def gaps_of(train: Split, val: Split, classes: Sequence[str]) -> tuple[str, ...]:
    """Return a line for each split in which some classes do not occur."""
    gaps = []
    for split, what in ((train, "training"), (val, "validation")):
        values = split.targets.values  # type: ignore[attr-defined]
        if never := [name for name, count in zip(classes, values.sum(0, dtype=int).tolist(), strict=True) if not count]:
            gaps.append(f"none of the {len(split)} {what} images has the label {listed(never, 4)}")
    return tuple(gaps)


def _marked(table: CsvFile) -> tuple[tuple[str, ...], NDArray[np.uint8], tuple[str, ...]]:
    """Read a column for each class. Returns the classes, a vector for each row, and notes."""
    import numpy as np

    from optimize.data.formats.csv_file import parsed

    def parse(row: Row) -> bytes:
        cells = [cell.lower() for cell in row.cells]
        for name, cell in zip(table.columns, cells, strict=True):
            if cell not in (*_YES, *_NO):
                raise ValueError(f"column {name} has {cell[:40]!r}; it must be 1 if the picture has that label, else 0")
        return bytes(cell in _YES for cell in cells)

    rows = np.frombuffer(b"".join(parsed(table, parse)), np.uint8).reshape(len(table.rows), -1)
    return table.columns, rows.copy(), ()


def _named(table: CsvFile, column: int) -> tuple[tuple[str, ...], NDArray[np.uint8], tuple[str, ...]]:
    """Read a column with all labels of a picture. Returns the classes, a vector for each row, and notes."""
    import numpy as np

    from optimize.data.targets import MOST_CLASSES

    cells = [row.cells[column] for row in table.rows]
    between = next((sign for sign in _BETWEEN if any(sign in cell for cell in cells)), ",")
    labels = [[label for part in cell.split(between) if (label := part.strip())] for cell in cells]
    classes = tuple(sorted({label for each in labels for label in each}))
    if len(classes) > MOST_CLASSES:
        raise UserError(
            f"{table.rows[0].file}: column {table.columns[column]} has {len(classes)} different labels, and there can "
            f"be {MOST_CLASSES}: is it the column of labels?"
        )
    places = {label: place for place, label in enumerate(classes)}
    rows = np.zeros((len(labels), len(classes)), np.uint8)
    for row, each in zip(rows, labels, strict=True):
        row[[places[label] for label in each]] = 1
    sign = "spaces" if between == " " else repr(between)
    notes = [f"the labels in column {table.columns[column]} are separated by {sign}"] * (max(map(len, labels)) > 1)
    if others := [name for number, name in enumerate(table.columns) if number != column]:
        notes.append(f"not used: the columns {listed(others, 6)}")
    return classes, rows, tuple(notes)


CSV_LABELS = register(
    DataFormat(
        name="csvlabels",
        open=_open,
        place="FILE",
        summary="a CSV of pictures and their labels, in one column or in one for each class",
    )
)
