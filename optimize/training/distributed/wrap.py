"""A module made ready to be trained by several processes: gradients, norms and ranges become those of all images."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from optimize.training.distributed import group
from optimize.training.distributed.batch_norms import count_each_once, synchronise
from optimize.training.distributed.fake_quantize import share_ranges


@dataclass(frozen=True)
class Joined:
    """What is called to train a module: itself, or what averages its gradients over processes."""

    module: nn.Module

    @contextmanager
    def unsynchronised(self, wanted: bool, copies: int) -> Iterator[None]:
        """Run a piece of a step; where ``wanted``, its gradients wait for the last piece's.

        Args:
            wanted: whether another piece follows.
            copies: in how many processes each of its images is.
        """
        if not isinstance(self.module, DistributedDataParallel):
            yield
            return
        count_each_once(self.module, copies)
        with self.module.no_sync() if wanted else contextlib.nullcontext():
            yield


def joined(module: nn.Module, device: torch.device, student: Callable[[nn.Module], nn.Module]) -> Joined:
    """``module``, changed in place, as one of a group trains it; as it is where there is no group.

    Args:
        module: the network.
        device: that it is on.
        student: what is called in its place, of its own layers; see `Objective`.
    """
    if not group.together():
        return Joined(student(module))
    synchronise(module, device)
    share_ranges(module)
    # Buffers are not the first's: norms' statistics and ranges are made of all images already. Some networks have
    # parameters that an output in training mode does not depend on.
    together = DistributedDataParallel(
        student(module),
        device_ids=[device] if device.type == "cuda" else None,
        broadcast_buffers=False,
        find_unused_parameters=True,
    )
    together.register_comm_hook(None, lambda _, bucket: _summed(bucket))  # no annotations: torch (2.14) reads them
    return Joined(together)


def _summed(bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Begin on the sum of a ``GradBucket``'s gradients, as torch does without a hook, while the backward goes on.

    From the last one on there is nothing to do but to wait for it.
    """
    if bucket.is_last():
        group.waiting_begins()
    return allreduce_hook(None, bucket)  # type: ignore[arg-type]  # None is the group of all
