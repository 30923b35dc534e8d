"""What torch.ao leaves behind of the networks that it was given, and how it goes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn
from torch.ao.quantization.fx import utils

from optimize.memory import collect


@contextlib.contextmanager
def forgotten(network: nn.Module) -> Iterator[None]:
    """Let the copies go, at the end, that torch.ao makes of a network in here.

    torch.ao (2.13 and 2.14; years ago there was no cache) keeps each network that it has prepared or converted for as
    long as the process lives, in that of `assert_and_get_unique_device`: three float copies for each variant.

    Args:
        network: what is given to it.
    """
    size = sum(parameter.nbytes for parameter in network.parameters())
    try:
        yield
    finally:
        if clear := getattr(utils.assert_and_get_unique_device, "cache_clear", None):
            clear()
        collect(size)
