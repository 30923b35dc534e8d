"""Straight-through gradients (Bengio et al. 2013, arXiv:1308.3432): rounding that a gradient passes as if it were not.

And those of learned steps (Esser et al. 2020, arXiv:1902.08153).

As functions of autograd and not as ``x + (y - x).detach()``, whose sum rounds: what comes out lies on the grid exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


class _Instead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def instead(given: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """``value``, whose gradient goes to ``given`` as it is; both of one shape."""
    found: torch.Tensor = _Instead.apply(given, value)
    return found


def rounded(given: torch.Tensor) -> torch.Tensor:
    """The nearest integers (ties to even), with the gradient of ``given`` itself."""
    return instead(given, given.detach().round())


@dataclass(frozen=True)
class Integers:
    """The integers of a learned step: from ``low`` to ``high``, of which ``zero`` stands for 0.0."""

    low: int
    high: int
    zero: int = 0


class _Stepped(torch.autograd.Function):
    """See `stepped`.

    torch's kernels (``torch.ao.quantization._learnable_fake_quantize``'s; private in 2.11 to 2.14) compute both
    gradients at once, and see which values lie outside after rounding: half a step further out than the paper, which
    clips before it rounds. What lies in between is moved by a step for them.
    """

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, step: torch.Tensor, integers: Integers, factor: float) -> torch.Tensor:
        ctx.save_for_backward(given, step)
        ctx.integers, ctx.factor = integers, factor
        zero = torch.full_like(step, integers.zero)
        own, ends = (given, step, zero), (integers.low, integers.high, factor)
        found: torch.Tensor
        if len(step) == 1:
            found = torch._fake_quantize_learnable_per_tensor_affine(*own, *ends)
        else:
            found = torch._fake_quantize_learnable_per_channel_affine(*own, 0, *ends)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        given, step = ctx.saved_tensors
        integers: Integers = ctx.integers
        each = step.view(-1, *(1,) * (given.ndim - 1)) if len(step) > 1 else step
        moved = given + (given >= (integers.high - integers.zero) * each) * each
        if integers.zero > integers.low:  # or nothing is negative
            moved -= (given <= (integers.low - integers.zero) * each) * each
        zero = torch.full_like(step, integers.zero)
        own, ends = (gradients[0], moved, step, zero), (integers.low, integers.high, ctx.factor)
        if len(step) == 1:
            found = torch.ops.aten._fake_quantize_learnable_per_tensor_affine_backward(*own, *ends)
        else:
            found = torch.ops.aten._fake_quantize_learnable_per_channel_affine_backward(*own, 0, *ends)
        return found[0], found[1], None, None


def stepped(given: torch.Tensor, step: torch.Tensor, integers: Integers, factor: float) -> torch.Tensor:
    """Round to whole numbers of a learned step (equations 1 to 3 of the paper).

    The gradient of a value passes inside the grid; that of the step is ``round(v/s) - v/s`` inside and the grid's end
    outside, times ``factor``.

    Args:
        given: float32; of weights output channels come first.
        step: positive; ``(1,)``, or ``(C,)`` for each row of ``given``.
        integers: the grid.
        factor: ``g`` of the paper's section 2.2.
    """
    found: torch.Tensor = _Stepped.apply(given, step, integers, factor)
    return found
