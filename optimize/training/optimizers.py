"""SGD or AdamW over a module's parameters, the learning rate of each step, and a moving average of the weights.

The learning rate is a function of the step alone, so that a resumed run need not store it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from optimize.training.config import TrainingConfig

#: The peak rate divided by the first, and the first rate divided by the last.
_RISE, _FALL = 25.0, 1e4


def make_optimizer(module: nn.Module, config: TrainingConfig) -> torch.optim.Optimizer:
    """Return the optimizer of ``module``'s parameters: SGD with Nesterov momentum, or AdamW (arXiv:1711.05101)."""
    groups = _groups(module, config.weight_decay)
    if config.optimizer == "adamw":
        # By default torch (2.14) on a CPU passes over the weights once for each of a dozen operations.
        fused = all(each.device.type == "cpu" and each.is_floating_point() for each in module.parameters())
        return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.momentum, 0.999), fused=fused or None)
    return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum, nesterov=config.momentum > 0)


def clip(optimizer: torch.optim.Optimizer, longest: float | None) -> None:
    """Scale the gradients of all parameters so that their L2 norm is at most ``longest``. None: do nothing.

    A gradient that is not finite stays, and makes the loss not finite, which is refused in one line.
    """
    if longest is not None:
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], longest)


def _groups(module: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Return the groups: weights with decay, vectors (norms, biases) without."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in trained if parameter.ndim > 1], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim <= 1], "weight_decay": 0.0},
    ]


def peak_rate(config: TrainingConfig) -> float:
    """Return the highest rate: ``learning_rate``, scaled to the batch size if it is meant for another.

    Linearly for SGD (Goyal et al. 2017, arXiv:1706.02677), by the square root for AdamW (Malladi et al. 2022,
    arXiv:2205.10287).
    """
    if config.rate_for is None:
        return config.learning_rate
    ratio = config.batch_size / config.rate_for
    return config.learning_rate * (math.sqrt(ratio) if config.optimizer == "adamw" else ratio)


def rate(step: int, steps: int, peak: float, warm_up: float) -> float:
    """Return the rate of ``step`` (from 0) of ``steps``: a cosine up to ``peak`` and one down to almost nothing.

    It is what torch's OneCycleLR (2.14) gives for ``steps + 1``: one cycle (Smith & Topin 2017, arXiv:1708.07120). No
    step is wasted on its end.
    """
    top = warm_up * (steps + 1) - 1
    if top == 0:  # a rise of exactly one step, whose length OneCycleLR would divide by
        top = -1
    if step <= top:
        return _cosine(peak / _RISE, peak, step / top)
    return _cosine(peak, peak / _RISE / _FALL, (step - top) / (steps - top))


def _cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) / 2.0 * (math.cos(math.pi * share) + 1)


class Average:
    """The average of a module's parameters over its steps.

    Buffers are not averaged but taken from the present module. A norm's statistics are averages already, and the mean
    of an observer's flag would be neither on nor off.

    Args:
        module: the module, which remains in training.
        decay: share of the past that each step keeps.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self._decay = decay
        self._parameters = dict(module.named_parameters())
        self._averages = {name: each.detach().clone() for name, each in self._parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the parameters after ``step`` (from 0) to the average. The first steps count as in a mean of ten.

        TensorFlow's ExponentialMovingAverage does the same with ``num_updates``. The random start is soon forgotten.
        """
        decay = min(self._decay, (1 + step) / (10 + step))
        for name, average in self._averages.items():
            average.lerp_(self._parameters[name], 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the module the averages within the block, and its own weights again afterwards."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def state(self) -> dict[str, torch.Tensor]:
        """Return the averages, for a checkpoint."""
        return dict(self._averages)

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load the averages of a checkpoint."""
        for name, average in self._averages.items():
            average.copy_(state[name])

    def _exchange(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.data, self._averages[name] = self._averages[name], parameter.data
