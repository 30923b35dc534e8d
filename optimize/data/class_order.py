"""Determines which output of a network means which class: by the checkpoint, the user, or the data's own order."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from optimize.data.classes import read_classes
from optimize.data.fingerprint import Fingerprint
from optimize.data.records import ImageData, Split
from serve.runtime.errors import UserError, listed

ORDER_FLAG: Final = "--class-order"

#: The checkpoint's order, whatever the data's is. By default it is used only if it states the same names.
CHECKPOINT: Final = "checkpoint"


def _natural(name: str) -> tuple[object, ...]:
    """Return the sort key that timm (1.0) uses for folders of classes: numbers by their values."""
    return tuple(int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name.lower()))


#: The named orders: from the names in the data's own order to the same names in this order.
ORDERS: Final[Mapping[str, Callable[[Sequence[str]], Sequence[str]]]] = {
    "data": lambda names: names,
    "sorted": sorted,
    "natural": lambda names: sorted(names, key=_natural),
}

Asked = str | Path | Sequence[str] | None


def with_order(
    data: ImageData,
    own: Sequence[str],
    asked: Asked = None,
    stated: Mapping[str, tuple[str, ...]] | None = None,
    origin: object = "the checkpoint",
) -> ImageData:
    """Return ``data`` with classes and targets in the order of the network's outputs.

    Args:
        data: the data in its own order.
        own: the data's own names of the classes, if ``data.classes`` has others from a file.
        asked: ``data``, ``sorted``, ``natural``, ``checkpoint``, a file with one name a line, or the names. None: the
            checkpoint's order if it states these classes, else the data's own.
        stated: lists of classes in the checkpoint, by their places.
        origin: the checkpoint, for messages.

    Raises:
        UserError: the names are not those of the data, the order does not exist, or the checkpoint states two.
    """
    if asked is None or asked == CHECKPOINT:
        return _as_stated(data, own, asked, stated or {}, origin)
    if isinstance(asked, str) and asked in ORDERS:
        place, names = asked, tuple(ORDERS[asked](own))
    elif isinstance(asked, str | Path):
        if not Path(asked).is_file():
            words = ", ".join([*ORDERS, CHECKPOINT])
            raise UserError(
                f"{ORDER_FLAG} {asked}: there is no such file; give a file with one name per line, or {words}"
            )
        place, names = str(asked), read_classes(Path(asked))
    else:
        place, names = "class_order", tuple(asked)
    rows = _rows(names, own, data)
    if rows is None:
        raise UserError(f"{place}: has other classes than {data.name}: {_difference(names, own)}")
    return _permuted(data, own, rows, f"{ORDER_FLAG} {place}")


def in_recorded_order(data: ImageData, card_data: Mapping[str, Any]) -> ImageData:
    """Return ``data`` in the order of the run that wrote a card; see `ImageData.order`.

    Raises:
        UserError: the data has other classes now.
    """
    names = card_data.get("class_order")
    if names is None:
        return data
    notes = tuple(card_data.get("notes", ()))
    return dataclasses.replace(with_order(data, data.classes, tuple(names)), notes=notes)


def _as_stated(
    data: ImageData, own: Sequence[str], asked: Asked, stated: Mapping[str, tuple[str, ...]], origin: object
) -> ImageData:
    orders: dict[tuple[int, ...], str] = {}
    for place, names in stated.items():
        if (rows := _rows(names, own, data)) is not None:
            orders.setdefault(tuple(rows), place)
    if len(orders) > 1:
        places = " and ".join(map(repr, orders.values()))
        raise UserError(
            f"{origin}: states two orders of the classes, in {places}; choose one: {ORDER_FLAG} data or FILE"
        )
    for order, place in orders.items():
        file = getattr(origin, "name", origin)  # a card must not show the folder of the file
        return _permuted(data, own, order, f"{file}, {place!r}")
    near = {place: names for place, names in stated.items() if len(names) == len(own)}
    if asked == CHECKPOINT:
        place, names = next(iter({**near, **stated}.items()), ("", ()))
        found = f"{place!r} has {_difference(names, own)}" if place else "it states no classes"
        raise UserError(f"{ORDER_FLAG} {CHECKPOINT}: {origin} does not state the classes of {data.name}: {found}")
    for place, names in near.items():
        said = f"{origin}: {place!r} states other classes than {data.name} has: {_difference(names, own)}"
        if set(names) & {*own, *data.classes}:
            raise UserError(f"{said}; rename them, or use the order of the data: {ORDER_FLAG} data")
        return dataclasses.replace(
            data, notes=(*data.notes, f"{said}; the outputs are assumed to be in the order of the data")
        )
    return data


def _rows(names: Sequence[str], own: Sequence[str], data: ImageData) -> list[int] | None:
    """Return the data's class for each of ``names``, by its own names or a file's. None if they are others."""
    for known in (own, data.classes):
        if len(names) == len(known) == len(set(names)) and set(names) == set(known):
            places = {name: row for row, name in enumerate(known)}
            return [places[name] for name in names]
    return None


def _permuted(data: ImageData, own: Sequence[str], rows: Sequence[int], whose: str) -> ImageData:
    """Reorder the classes: class ``rows[i]`` of the data becomes class ``i``."""
    if list(rows) == list(range(len(rows))):
        return data
    places = torch.empty(len(rows), dtype=torch.int64)
    places[torch.tensor(rows)] = torch.arange(len(rows))

    def moved(split: Split) -> Split:
        known = split.known and Fingerprint(split.known.part(np.asarray(rows)).digest, split.known.kind)
        return Split(split.sources, split.targets.renumbered(places), known, split.groups)

    classes = tuple(data.classes[row] for row in rows)
    note = f"the order of the classes is that of {whose}, not the data's: {listed(classes, 4)}"
    return dataclasses.replace(
        data,
        classes=classes,
        train=moved(data.train),
        val=moved(data.val),
        order=tuple(own[row] for row in rows),
        notes=(*data.notes, note),
    )


def _difference(names: Sequence[str], own: Sequence[str]) -> str:
    more, less = [sorted(set(a) - set(b)) for a, b in ((names, own), (own, names))]
    if not more and not less:
        return "a name twice"
    parts = [f"{len(names)} names where there are {len(own)} classes"] if len(names) != len(own) else []
    parts += [f"{listed(more, 4)} that the data does not have"] if more else []
    return ", ".join(parts + ([f"not {listed(less, 4)}"] if less else []))
