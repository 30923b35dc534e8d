"""Traces a write into a part of a tensor (``x[:, 1:] += y``) as a concatenation of the tensor's parts.

Values in a graph do not change. Later readers read a concatenation of the written value and the parts beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.proxy import TraceError

#: An axis that is written in part: its number, the start and end of that part, and its size.
_Place = tuple[int, int, int, int]


def written(
    tensor: torch.Tensor, which: Any, value: Any, asked: Callable[[Any], tuple[torch.Tensor, ...]]
) -> torch.Tensor:
    """Return a tensor as it is after ``tensor[which] = value``. The given tensor does not change.

    Args:
        tensor: a proxy of a tensor.
        which: integers, slices without steps, and an ellipsis. Axes whose size depends on the batch must be whole.
        value: a number, or a tensor that is broadcast as in PyTorch.
        asked: gives the values of a proxy for batches of several sizes.

    Raises:
        TraceError: the index is a mask, a list, has steps, or selects a part of the batch. Or the number of axes
            depends on the batch.
    """
    found = asked(tensor)
    if len({batch.dim() for batch in found}) > 1:
        raise TraceError("it writes into a tensor whose number of axes depends on the batch")
    entries = _entries(which, found[0].dim())
    places: list[_Place] = []
    for axis, (entry, sizes) in enumerate(
        zip(entries, zip(*(batch.shape for batch in found), strict=True), strict=True)
    ):
        size = sizes[0]
        if (ends := _ends(entry, size, len(set(sizes)) > 1)) != (0, size):
            places.append((axis, *ends, size))
    if 0 in found[0][which].shape:
        return tensor
    if isinstance(value, int | float):
        value = torch.full_like(tensor[which], value)
    else:
        given = asked(value)
        if given[0].dtype != found[0].dtype:
            value = value.to(found[0].dtype)
        if any(mine.shape != batch[which].shape for mine, batch in zip(given, found, strict=True)):
            value = torch.Tensor.expand_as(value, tensor[which])
    for axis, entry in enumerate(entries):
        if isinstance(entry, int):
            value = value.unsqueeze(axis)
    return _put(tensor, places, value)


def in_its_memory(value: Any, found: Iterable[tuple[fx.Node, Any]]) -> set[fx.Node]:
    """Return the nodes that share memory with a tensor: its views, the tensor that it is a view of, and itself."""
    place = value.untyped_storage().data_ptr()
    return {
        node for node, other in found if isinstance(other, torch.Tensor) and other.untyped_storage().data_ptr() == place
    }


def _entries(which: Any, rank: int) -> list[int | slice]:
    """Return one index entry for each axis.

    Raises:
        TraceError: an entry is neither an integer nor a slice.
    """
    given = list(which) if isinstance(which, tuple) else [which]
    place = next((number for number, entry in enumerate(given) if entry is Ellipsis), None)  # `in` compares proxies
    if place is not None:
        given[place : place + 1] = [slice(None)] * (rank - len(given) + 1)
    for entry in given:
        bounds = (entry.start, entry.stop) if isinstance(entry, slice) else (entry,)
        if any(not isinstance(bound, int | None) or isinstance(bound, bool) for bound in bounds) or entry is None:
            raise TraceError("it writes into a tensor at indices that are neither integers nor slices of integers")
        if isinstance(entry, slice) and entry.step not in (None, 1):
            raise TraceError(f"it writes into a tensor in steps of {entry.step}")
    return given + [slice(None)] * (rank - len(given))


def _ends(entry: int | slice, size: int, varies: bool) -> tuple[int, int]:
    """Return the start and the end of the written part of one axis.

    Raises:
        TraceError: it is a part of the batch.
    """
    if isinstance(entry, slice) and entry.start in (None, 0) and entry.stop is None:
        return 0, size
    if varies:
        raise TraceError("it writes into a part of the batch")
    if isinstance(entry, int):
        return entry % size, entry % size + 1
    return entry.indices(size)[:2]


def _put(tensor: torch.Tensor, places: Sequence[_Place], value: torch.Tensor) -> torch.Tensor:
    """Return a tensor with a value written to some places. The value has all axes of the tensor."""
    if not places:
        return value
    (axis, low, high, size), *rest = places

    def part(first: int, last: int) -> torch.Tensor:
        return tensor[(*[slice(None)] * axis, slice(first, last))]

    if rest:
        value = _put(part(low, high), rest, value)
    parts = [part(0, low)] * (low > 0) + [value] + [part(high, size)] * (high < size)
    return torch.cat(parts, axis) if len(parts) > 1 else value
