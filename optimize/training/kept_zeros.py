"""Keeps weights at zero through a training if they are zero at its start, so that pruned weights stay pruned."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import is_parametrized

from optimize.errors import PassError


class Zeros:
    """The present zeros among the weights of a module's convolutions and linear layers.

    A weight of zero without a gradient stays zero with SGD with momentum and decay, and with Adam. So does its average.

    Args:
        module: on the device of its training. Modules that torch.ao prepares for training are such layers too.
    """

    def __init__(self, module: nn.Module) -> None:
        self._weights: dict[str, torch.Tensor] = {
            name: layer.weight
            for name, layer in module.named_modules()
            if isinstance(layer, _ConvNd | nn.Linear) and not is_parametrized(layer)
        }
        self._zeros = {name: weight.detach() == 0 for name, weight in self._weights.items()}

    def drop_gradients(self) -> None:
        """Remove their gradients, after a backward pass and before the step."""
        for name, weight in self._weights.items():
            if weight.grad is not None:
                # Not a product: FP16 gradients may be infinite, and zero times infinity is NaN.
                weight.grad.masked_fill_(self._zeros[name], 0.0)

    def check(self) -> None:
        """Check that all are still zero.

        Raises:
            PassError: something else has changed one.
        """
        for name, weight in self._weights.items():
            if bool(weight.detach()[self._zeros[name]].any()):
                raise PassError(f"weights of {name} that were pruned have been trained")
