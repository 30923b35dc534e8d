"""Which code a cell was made by, and whether that, or its recipe, has changed since."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator
from typing import Final

from benchmarks.cifar.chains import chain, told, with_epochs
from benchmarks.cifar.record import Cell
from benchmarks.cifar.rows import EXAMPLES, MODELS, ROWS
from optimize.models.model_names import resolve_model
from optimize.passes.base import find_pass
from optimize.run.recipe import load_recipe
from optimize.store.sources import source_digest

#: What judges a cell, and makes what it starts from.
_MEASURING: Final = ("optimize.measure.accuracy", "optimize.measure.bench", "optimize.training.baseline")

#: What is said of a cell that its recipe would not make any more.
RECIPE_CHANGED: Final = "the recipe has changed since"


def code(operations: Iterable[str], model: str) -> str:
    """Digest of the sources of passes, of the architecture, and of what measures."""
    return _code(tuple(sorted(set(operations))), model)


@functools.cache
def _code(operations: tuple[str, ...], model: str) -> str:
    digests = [find_pass(name).source_digest() for name in operations]
    digests += [source_digest(*_MEASURING), resolve_model(model).fingerprint]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def changed(cell: Cell) -> Iterator[str]:
    """What is not any more as it was when a cell was made, in words.

    Raises:
        UserError: its recipe is illegal now.
    """
    row = next((row for row in ROWS if row.name == cell.row), None)
    if row is None:
        yield "the table has no such row any more"
        return
    links = chain(load_recipe(EXAMPLES / row.recipe), row.stage)
    links = links if cell.epochs is None else with_epochs(links, cell.epochs)
    if not cell.short and told(links) != list(cell.stages):
        yield RECIPE_CHANGED
    if code(cell.operations, MODELS[row.network]) != cell.code:
        yield "the code has changed since"
