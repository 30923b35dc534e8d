"""The learning rate as a function of the step alone, so that a run that goes on needs no memory of it."""

from __future__ import annotations

import math

from optimize.training.config import TrainingConfig

#: The first rate is so much lower than the peak, and the last so much lower than the first.
_RISE, _FALL = 25.0, 1e4


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
