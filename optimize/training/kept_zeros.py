"""Weights that are zero when a training begins, and stay zero through it: what a pruning has taken stays taken."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import is_parametrized

from optimize.errors import PassError


class Zeros:
    """The zeros among the weights of a module's convolutions and linear layers, as they are now.

    A weight of zero that gets no gradient stays zero by SGD with momentum and decay, and by Adam; so does its average.

    Args:
        module: on the device that it is trained on. What torch.ao prepares for training are such layers, too.
    """

    def __init__(self, module: nn.Module) -> None:
        self._weights: dict[str, torch.Tensor] = {
            name: layer.weight
            for name, layer in module.named_modules()
            if isinstance(layer, _ConvNd | nn.Linear) and not is_parametrized(layer)
        }
        self._zeros = {name: weight.detach() == 0 for name, weight in self._weights.items()}

    def drop_gradients(self) -> None:
        """Take away their gradients, after a backward pass and before the step."""
        for name, weight in self._weights.items():
            if weight.grad is not None:
                # Not a product: FP16's gradients may be infinite, and zero times that is NaN.
                weight.grad.masked_fill_(self._zeros[name], 0.0)

    def check(self) -> None:
        """See that all are zero still.

        Raises:
            PassError: something else has moved one.
        """
        for name, weight in self._weights.items():
            if bool(weight.detach()[self._zeros[name]].any()):
                raise PassError(f"weights of {name} that were pruned have been trained")
