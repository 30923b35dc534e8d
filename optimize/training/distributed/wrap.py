"""Prepares a module for training in several processes: gradients, norms and ranges cover all images."""

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
    """The callable for training a module: the module itself, or a wrapper that averages gradients over processes."""

    module: nn.Module

    @contextmanager
    def unsynchronised(self, wanted: bool, copies: int) -> Iterator[None]:
        """Run a piece of a step. If ``wanted``, its gradients are summed later, with the last piece's.

        Args:
            wanted: whether another piece follows.
            copies: the number of processes that have each of its images.
        """
        if not isinstance(self.module, DistributedDataParallel):
            yield
            return
        count_each_once(self.module, copies)
        with self.module.no_sync() if wanted else contextlib.nullcontext():
            yield


def joined(module: nn.Module, device: torch.device, student: Callable[[nn.Module], nn.Module]) -> Joined:
    """Prepare ``module`` in place for training in a group. Without a group it is unchanged.

    Args:
        module: the network.
        device: its device.
        student: wraps the network for the call, with the network's own layers; see `Objective`.
    """
    if not group.together():
        return Joined(student(module))
    synchronise(module, device)
    share_ranges(module)
    # Buffers are not copied from the first process: norms' statistics and ranges already cover all images. Some
    # networks have parameters that an output in training mode does not depend on.
    together = DistributedDataParallel(
        student(module),
        device_ids=[device] if device.type == "cuda" else None,
        broadcast_buffers=False,
        find_unused_parameters=True,
    )
    together.register_comm_hook(None, lambda _, bucket: _summed(bucket))  # no annotations: torch (2.14) reads them
    return Joined(together)


def _summed(bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Start summing the gradients of a ``GradBucket`` while the backward continues, as torch does without a hook.

    After the last bucket only waiting is left.
    """
    if bucket.is_last():
        group.waiting_begins()
    return allreduce_hook(None, bucket)  # type: ignore[arg-type]  # None is the group of all
