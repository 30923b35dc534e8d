"""An exponential moving average of the weights: what is judged and kept where the settings ask for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn


class Average:
    """The average of a module's parameters over its steps.

    Buffers are not averaged, and so are those of the module as it is: a norm's statistics are averages already, and
    the mean of an observer's flag would be neither on nor off.

    Args:
        module: whose parameters; it goes on being trained.
        decay: share of the past that each step keeps.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self._decay = decay
        self._parameters = dict(module.named_parameters())
        self._averages = {name: each.detach().clone() for name, each in self._parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take the parameters after ``step``, from 0, into the average: the first steps count as in a mean of ten.

        As TensorFlow's ExponentialMovingAverage does with ``num_updates``: the random start is soon forgotten.
        """
        decay = min(self._decay, (1 + step) / (10 + step))
        for name, average in self._averages.items():
            average.lerp_(self._parameters[name], 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Let the module have the averages, and its own weights again afterwards."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def state(self) -> dict[str, torch.Tensor]:
        """The averages, for a checkpoint."""
        return dict(self._averages)

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take the averages of a checkpoint."""
        for name, average in self._averages.items():
            average.copy_(state[name])

    def _exchange(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.data, self._averages[name] = self._averages[name], parameter.data
