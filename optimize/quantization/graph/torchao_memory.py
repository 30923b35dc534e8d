"""Frees the memory that torch.ao keeps of the networks that it converted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn
from torch.ao.quantization.fx import utils

from optimize.memory import collect


@contextlib.contextmanager
def forgotten(network: nn.Module) -> Iterator[None]:
    """Free the copies that torch.ao makes of a network in the block, at its end.

    torch.ao (2.13 and 2.14; older versions had no cache) keeps each network that it prepared or converted for as long
    as the process lives. The cache is that of `assert_and_get_unique_device`. It holds three float copies for each
    variant.

    Args:
        network: the network that torch.ao gets.
    """
    size = sum(parameter.nbytes for parameter in network.parameters())
    try:
        yield
    finally:
        if clear := getattr(utils.assert_and_get_unique_device, "cache_clear", None):
            clear()
        collect(size)
