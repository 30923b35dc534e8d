"""Turns gradients off during an export. The exporter's tracing would prepare for them, though nothing is trained."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def nothing_learned(module: nn.Module) -> Iterator[None]:
    """Set ``requires_grad`` of all parameters to False within the block.

    If a mask is learned (position biases, as MaxViT's), torch's kernel for attention would have to compute its
    gradient. Another kernel runs instead, whose output has other strides. The exporter (torch 2.14) traces that kernel,
    but later inspects the first one if images come as pixels. It then fails on the view behind it.
    """
    learned = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in learned:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in learned:
            parameter.requires_grad_(True)
