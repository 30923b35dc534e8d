"""Straight-through gradients (Bengio et al. 2013, arXiv:1308.3432): rounding that passes gradients on unchanged.

Also the gradients of learned steps (Esser et al. 2020, arXiv:1902.08153). They are autograd functions. ``x + (y -
x).detach()`` would round in its sum, while these results are exactly on the grid.
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
    """Return ``value``, whose gradient goes to ``given`` unchanged. Both have the same shape."""
    found: torch.Tensor = _Instead.apply(given, value)
    return found


def rounded(given: torch.Tensor) -> torch.Tensor:
    """Return the nearest integers (ties to even), with the gradient of ``given``."""
    return instead(given, given.detach().round())


@dataclass(frozen=True)
class Integers:
    """The integers of a learned step, from ``low`` to ``high``, with the zero point ``zero``."""

    low: int
    high: int
    zero: int = 0


class _Stepped(torch.autograd.Function):
    """See `stepped`.

    It computes in whole passes over the tensor. Torch's kernels (``torch.ao.quantization._learnable_fake_quantize``'s;
    private in 2.11 to 2.14) go value by value, which takes two to three times as long on a CPU.
    """

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, step: torch.Tensor, integers: Integers, factor: float) -> torch.Tensor:
        each = step.view(-1, *(1,) * (given.ndim - 1)) if len(step) > 1 else step
        steps = given * (1 / each)  # as torch's int8 kernels do: a tie falls to the same side
        low, high = integers.low - integers.zero, integers.high - integers.zero
        whole = steps.round().clamp_(low, high)
        found = (whole * each).to(given.dtype)
        # Without negative values, 0 is no end of the grid.
        ctx.ends = (float(low) if low < 0 else -0.5, float(high))
        ctx.save_for_backward(steps, whole.sub_(_inside(steps, steps, ctx.ends)))
        ctx.factor, ctx.shape = factor, step.shape
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        steps, slope = ctx.saved_tensors
        gradient = gradients[0].float()
        of_step = gradient * slope
        of_step = of_step.flatten(1).sum(1) if ctx.shape.numel() > 1 else of_step.sum().view(ctx.shape)
        passed = _inside(gradient, steps, ctx.ends)
        return passed.to(gradients[0].dtype), of_step.mul_(ctx.factor), None, None


def _inside(given: torch.Tensor, steps: torch.Tensor, ends: tuple[float, float]) -> torch.Tensor:
    """Return ``given`` where ``steps`` are between the ends, and 0 elsewhere, in one pass."""
    found: torch.Tensor = torch.ops.aten.hardtanh_backward(given, steps, *ends)
    return found


def stepped(given: torch.Tensor, step: torch.Tensor, integers: Integers, factor: float) -> torch.Tensor:
    """Round to multiples of a learned step (equations 1 to 3 of the paper).

    The gradient of a value passes inside the grid. The gradient of the step is ``round(v/s) - v/s`` inside and the
    grid's end outside, times ``factor``.

    Args:
        given: float32 or narrower. The result has its dtype, and is computed in float32. Weights have output channels
            first.
        step: positive, float32. ``(1,)``, or ``(C,)`` for each row of ``given``.
        integers: the grid.
        factor: ``g`` of the paper's section 2.2.
    """
    found: torch.Tensor = _Stepped.apply(given, step, integers, factor)
    return found
