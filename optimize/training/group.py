"""The processes that train together, as one of them sees them; a process that trains alone is a group of one."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed


def together() -> bool:
    """Whether this process is one of several."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def rank() -> int:
    """This process's number, from 0."""
    return distributed.get_rank() if together() else 0


def world() -> int:
    """How many processes there are."""
    return distributed.get_world_size() if together() else 1


def summed(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of the processes' tensors, which have one shape; ``tensor`` itself is changed. No gradient passes."""
    if together():
        distributed.all_reduce(tensor)
    return tensor


def gathered(value: Any) -> list[Any]:
    """The processes' values, which are pickled, in order."""
    if not together():
        return [value]
    values: list[Any] = [None] * world()
    distributed.all_gather_object(values, value)
    return values


def numbers(*values: int, device: torch.device) -> list[list[int]]:
    """A few whole numbers of each process, in order."""
    if not together():
        return [list(values)]
    mine = torch.tensor(values, dtype=torch.int64, device=device)
    every = [torch.empty_like(mine) for _ in range(world())]
    distributed.all_gather(every, mine)
    return torch.stack(every).tolist()


class Sum(torch.autograd.Function):
    """The sum of the processes' tensors; what flows back is the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        """Of tensors of one shape."""
        return summed(tensor.clone())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """Each process's loss depends on each process's tensor."""
        return summed(gradients[0].clone())
