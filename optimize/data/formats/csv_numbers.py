"""``csvnumbers:FILE``: a CSV that names pictures and one or several numbers of each, for regression."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from optimize.data.formats.base import DataFormat, register
from serve.runtime.errors import UserError

if TYPE_CHECKING:
    import torch

    from optimize.data.formats.csv_file import CsvFile, Row
    from optimize.data.records import ImageData
    from optimize.listener import Listener

#: The spread of a number must lie in this range. Later trainings take steps of the usual size in its unit.
_SPREADS: Final = (0.1, 1e9)


def _open(place: str, seed: int, listener: Listener) -> ImageData:
    import torch

    from optimize.data.formats.csv_file import parsed, read_csv
    from optimize.data.pixels import native_size
    from optimize.data.records import ImageData

    table = read_csv(place, CSV_NUMBERS.usage)
    listener.progressed(0.5, "numbers")

    def parse(row: Row) -> list[float]:
        return [_number(name, cell) for name, cell in zip(table.columns, row.cells, strict=True)]

    vectors = torch.tensor(parsed(table, parse), dtype=torch.float32)
    _check_spread(table, vectors)
    train, val = table.splits(vectors, seed)
    # Neither moved nor mirrored: the numbers may be places in the picture.
    return ImageData(table.name, "regression", table.columns, train, val, "none", native_size(train), notes=table.notes)


def _number(name: str, cell: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not abs(value) < 1e30:
        raise ValueError(f"column {name} has {cell[:40]!r}; it must be a number")
    return value


def _check_spread(table: CsvFile, vectors: torch.Tensor) -> None:
    """Refuse columns whose numbers are all equal, or in an unsuitable unit."""
    from optimize.explained_error import spreads

    low, high = _SPREADS
    _, found = spreads(vectors.double().numpy())
    for name, spread in zip(table.columns, found.tolist(), strict=True):
        if spread == 0:
            raise UserError(f"{table.rows[0].file}: column {name} has the same number for all pictures; remove it")
        if not low <= spread <= high:
            raise UserError(
                f"{table.rows[0].file}: the numbers in column {name} are {spread:.2g} from their median, on average; "
                f"write them in a unit in which that is from {low:g} to {high:g}"
            )


CSV_NUMBERS = register(
    DataFormat(
        name="csvnumbers",
        open=_open,
        place="FILE",
        summary="a CSV of pictures and a column for each number of them",
    )
)
