"""AdaRound: learns layer by layer whether each weight is rounded up or down.

Source: Nagel et al. 2020, Up or Down? Adaptive Rounding for Post-Training Quantization (arXiv:2004.10568), section 3.3.
The soft choice is a rectified sigmoid, ``clip(sigmoid(V) (zeta - gamma) + gamma, 0, 1)`` with zeta = 1.1 and gamma =
-0.1. A regulariser ``1 - |2 h - 1|**beta`` of weight 0.01 pushes it to 0 or 1 while beta falls from 20 to 2. It starts
after a fifth of the steps. The error is that of the layer on the outputs of the quantized layers before it (their
equation 25, without the activation function).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

_ZETA, _GAMMA = 1.1, -0.1
_REGULARISER = 0.01
_BETA = (20.0, 2.0)
_FREE = 0.2
_RATE = 0.02
_BATCH = 32


@dataclass(frozen=True)
class Rounding:
    """The grid of rounded weights, and how to learn the rounding.

    Attributes:
        scale: in a shape that broadcasts with the weight.
        low: the least integer.
        high: the largest integer.
        steps: number of Adam steps.
        seed: for the order of images.
        known: whether the scale is fixed. Otherwise it is found from the largest weights.
    """

    scale: torch.Tensor
    low: int
    high: int
    steps: int = 500
    seed: int = 0
    known: bool = False


@dataclass(frozen=True)
class Learned:
    """A weight on its grid, and the mean squared error of the layer's output with it and with nearest rounding."""

    weight: torch.Tensor
    error: float
    nearest_error: float


@torch.enable_grad()
def learn_rounding(
    layer: nn.Module, given: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], rounding: Rounding
) -> Learned:
    """Choose for each weight one of the two integers around it. If that is no better, round all to the nearest.

    Args:
        layer: a convolution or linear layer in float.
        given: its inputs by batch, from the quantized layers before it.
        expected: the float layer's outputs on the float network's inputs.
        rounding: grid, steps and seed.
    """
    weight: torch.Tensor = layer.weight.detach()  # type: ignore[operator]
    exact = weight / rounding.scale
    down = exact.floor()
    nearest = exact.round().clamp(rounding.low, rounding.high)
    # The largest weight of a range is its end. With another integer, another range would be found.
    fixed = (nearest.abs() >= rounding.high) & (not rounding.known)
    fixed |= exact == down  # on the grid already, such as pruned zeros: only one integer is around it
    images, targets = torch.cat(list(given)), torch.cat(list(expected))
    share = (exact - down - _GAMMA) / (_ZETA - _GAMMA)
    choice = torch.log(share / (1 - share)).requires_grad_()
    optimizer = torch.optim.Adam([choice], lr=_RATE)
    generator = torch.Generator().manual_seed(rounding.seed)
    for step in range(rounding.steps):
        rows = torch.randint(len(images), (min(_BATCH, len(images)),), generator=generator).to(images.device)
        soft = _soft(choice)
        integers = torch.where(fixed, nearest, (down + soft).clamp(rounding.low, rounding.high))
        found = _output(layer, images[rows], integers * rounding.scale)
        difference = found - targets[rows]
        # A sum over channels, and a mean over images and places.
        loss = difference.square().sum() / (difference.numel() / len(weight))
        if step >= _FREE * rounding.steps:
            passed = (step / rounding.steps - _FREE) / (1 - _FREE)
            beta = _BETA[1] + (_BETA[0] - _BETA[1]) * (1 - passed)
            loss = loss + _REGULARISER * (1 - (2 * soft - 1).abs().pow(beta))[~fixed].sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    with torch.no_grad():
        chosen = (down + (_soft(choice) >= 0.5)).clamp(rounding.low, rounding.high)
        learned = torch.where(fixed, nearest, chosen) * rounding.scale
        errors = [_error(layer, given, expected, tried) for tried in (learned, nearest * rounding.scale)]
    if errors[0] > errors[1]:
        return Learned(nearest * rounding.scale, errors[1], errors[1])
    return Learned(learned, errors[0], errors[1])


def _soft(choice: torch.Tensor) -> torch.Tensor:
    return (choice.sigmoid() * (_ZETA - _GAMMA) + _GAMMA).clamp(0, 1)


def _output(layer: nn.Module, given: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if isinstance(layer, nn.Linear):
        return functional.linear(given, weight, layer.bias)
    computed: torch.Tensor = layer._conv_forward(given, weight, layer.bias)  # type: ignore[operator]
    return computed


def _error(
    layer: nn.Module, given: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], weight: torch.Tensor
) -> float:
    """Return the mean squared error of the outputs over all batches."""
    total = sum(
        float((_output(layer, batch, weight) - target).double().square().sum())
        for batch, target in zip(given, expected, strict=True)
    )
    return total / sum(target.numel() for target in expected)
