"""The group of training processes, as one of them sees it. A process that trains alone is a group of one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import distributed

from optimize.training.stopwatch import Stopwatch

T = TypeVar("T")

#: Counts the time that this process waits for the others. It is global, as the group is.
_stopwatch: Stopwatch | None = None


@contextmanager
def timed(stopwatch: Stopwatch) -> Iterator[None]:
    """Count the time that this process waits for the others within the block as communication on ``stopwatch``."""
    global _stopwatch  # noqa: PLW0603
    before, _stopwatch = _stopwatch, stopwatch
    try:
        yield
    finally:
        _stopwatch = before


def waiting_begins() -> None:
    """Count the following time as communication, until another part begins."""
    if _stopwatch is not None:
        _stopwatch.to("communication")


def _waiting() -> AbstractContextManager[None]:
    return nullcontext() if _stopwatch is None else _stopwatch.during("communication")


def together() -> bool:
    """Return whether this process is one of several."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def rank() -> int:
    """Return this process's number, from 0."""
    return distributed.get_rank() if together() else 0


def world() -> int:
    """Return the number of processes."""
    return distributed.get_world_size() if together() else 1


def summed(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the processes' tensors, which have one shape. Changes ``tensor``. Gradients do not pass."""
    if together():
        with _waiting():
            distributed.all_reduce(tensor)
    return tensor


def largest(tensor: torch.Tensor) -> torch.Tensor:
    """Return the element-wise maximum of the processes' tensors. Changes ``tensor``. Gradients do not pass."""
    if together():
        with _waiting():
            distributed.all_reduce(tensor, op=distributed.ReduceOp.MAX)
    return tensor


def gathered(value: Any) -> list[Any]:
    """Return the processes' values in order. They are pickled."""
    if not together():
        return [value]
    values: list[Any] = [None] * world()
    with _waiting():
        distributed.all_gather_object(values, value)
    return values


def of_the_first(value: T) -> T:
    """Return the first process's value, which is pickled. The others' values are ignored."""
    if not together():
        return value
    values = [value]
    with _waiting():
        distributed.broadcast_object_list(values)
    return values[0]


def numbers(*values: int, device: torch.device) -> list[list[int]]:
    """Return a few whole numbers of each process, in order."""
    if not together():
        return [list(values)]
    mine = torch.tensor(values, dtype=torch.int64, device=device)
    every = [torch.empty_like(mine) for _ in range(world())]
    with _waiting():
        distributed.all_gather(every, mine)
    return torch.stack(every).tolist()


class Sum(torch.autograd.Function):
    """The sum of the processes' tensors. Its gradient is the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        """Sum tensors of one shape."""
        return summed(tensor.clone())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """Sum the gradients, because each process's loss depends on each process's tensor."""
        return summed(gradients[0].clone())
