"""SGD or AdamW over a module's parameters, the learning rate of each step, and a moving average of the weights.

The learning rate is a function of the step alone, so that a run that goes on needs no memory of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from optimize.training.config import TrainingConfig

#: The first rate is so much lower than the peak, and the last so much lower than the first.
_RISE, _FALL = 25.0, 1e4


def make_optimizer(module: nn.Module, config: TrainingConfig) -> torch.optim.Optimizer:
    """The optimizer of ``module``'s parameters: SGD with Nesterov momentum, or AdamW (arXiv:1711.05101)."""
    groups = _groups(module, config.weight_decay)
    if config.optimizer == "adamw":
        # On a CPU torch (2.14) passes over the weights once for each of a dozen operations if it is not told otherwise.
        fused = all(each.device.type == "cpu" and each.is_floating_point() for each in module.parameters())
        return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.momentum, 0.999), fused=fused or None)
    return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum, nesterov=config.momentum > 0)


def clip(optimizer: torch.optim.Optimizer, longest: float | None) -> None:
    """Scale the gradients of all parameters together, so that their L2 norm is at most ``longest``; None: leave them.

    One that is not finite is left to spoil the loss, which is then refused in one line.
    """
    if longest is not None:
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], longest)


def _groups(module: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Weights with decay; vectors (norms, biases) without."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in trained if parameter.ndim > 1], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim <= 1], "weight_decay": 0.0},
    ]


def peak_rate(config: TrainingConfig) -> float:
    """The highest rate: ``learning_rate``, scaled to the batch size where it is meant for another.

    Linearly for SGD (Goyal et al. 2017, arXiv:1706.02677), by the square root for AdamW (Malladi et al. 2022,
    arXiv:2205.10287).
    """
    if config.rate_for is None:
        return config.learning_rate
    ratio = config.batch_size / config.rate_for
    return config.learning_rate * (math.sqrt(ratio) if config.optimizer == "adamw" else ratio)


def rate(step: int, steps: int, peak: float, warm_up: float) -> float:
    """The rate of ``step``, from 0, of ``steps``: a cosine up to ``peak`` and one down to almost nothing.

    What torch's OneCycleLR (2.14) gives for ``steps + 1``: one cycle (Smith & Topin 2017, arXiv:1708.07120) whose end
    no step is wasted on.
    """
    top = warm_up * (steps + 1) - 1
    if top == 0:  # a rise of exactly one step, whose length OneCycleLR divides by
        top = -1
    if step <= top:
        return _cosine(peak / _RISE, peak, step / top)
    return _cosine(peak, peak / _RISE / _FALL, (step - top) / (steps - top))


def _cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) / 2.0 * (math.cos(math.pi * share) + 1)


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
