"""mixup (Zhang et al. 2018, arXiv:1710.09412): pairs of images, and their labels, in random proportions."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from optimize.data.random_draws import Draws

# Not torchvision's v2.MixUp (0.29): it draws one proportion for all of a batch, from the process's generator, and mixes
# across the whole batch, of which one of several processes has a part.

_DRAW = 9


def mixed(
    inputs: torch.Tensor, labels: torch.Tensor, classes: int, alpha: float, draws: Draws
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mix the images of a batch in pairs, each with the one beside it: the order is random already.

    Neighbours and not any two of the batch, so that a process that has a part of it mixes as one that has it all.

    Args:
        inputs: ``float32 (N, C, H, W)``.
        labels: ``int64 (N,)``.
        classes: how many there are.
        alpha: both parameters of the Beta distribution that a pair's proportion is drawn from.
        draws: the random numbers of these images; a pair takes its first one's.

    Returns:
        The mixed images, and each label's share, ``float32 (N, classes)``; an odd last image stays as it is.
    """
    pairs = len(labels) // 2
    words = draws.words(_DRAW)[: 2 * pairs : 2].tolist()
    shares = [np.random.default_rng(word).beta(alpha, alpha) for word in words]
    own = torch.ones(len(labels), dtype=inputs.dtype)
    own[: 2 * pairs] = torch.tensor(shares, dtype=inputs.dtype).repeat_interleave(2)
    other = torch.arange(len(labels))
    other[: 2 * pairs] = (torch.arange(2 * pairs) // 2) * 2 + 1 - torch.arange(2 * pairs) % 2
    own, other = own.to(inputs.device), other.to(inputs.device)
    targets = nn.functional.one_hot(labels, classes).to(inputs.dtype)
    image = own.view(-1, *[1] * (inputs.dim() - 1))
    return (
        image * inputs + (1 - image) * inputs[other],
        own[:, None] * targets + (1 - own[:, None]) * targets[other],
    )
