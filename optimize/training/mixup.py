"""mixup (Zhang et al. 2018, arXiv:1710.09412): mixes pairs of images, and their labels, in random proportions."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from optimize.data.random_draws import Draws

# Not torchvision's v2.MixUp (0.29). It draws one proportion for all of a batch, from the process's generator. It also
# mixes across the whole batch, although each of several processes has only a part.

_DRAW = 9


def mixed(
    inputs: torch.Tensor, labels: torch.Tensor, classes: int, alpha: float, draws: Draws
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mix the images of a batch in pairs, each with its neighbour: the order is already random.

    Neighbours are mixed, so that a process with a part of the batch mixes the same pairs as one with all of it.

    Args:
        inputs: ``float32 (N, C, H, W)``.
        labels: ``int64 (N,)``.
        classes: the number of classes.
        alpha: both parameters of the Beta distribution of a pair's proportion.
        draws: the random numbers of these images. A pair takes its first one's.

    Returns:
        The mixed images, and each label's share, ``float32 (N, classes)``. An odd last image stays unchanged.
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
