"""Gradients that the exporter's tracing would prepare for, though nothing is trained."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def nothing_learned(module: nn.Module) -> Iterator[None]:
    """Have no parameter ask for a gradient within the block.

    Of a mask that is learned (biases of places, as MaxViT's) torch's kernel for attention would have to give one,
    and another kernel computes it, whose answer has other strides. The exporter (torch 2.14) traces that one, looks at
    the first afterwards, where images come as pixels, and fails on the view behind it.
    """
    learned = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in learned:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in learned:
            parameter.requires_grad_(True)
