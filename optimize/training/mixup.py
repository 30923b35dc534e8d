"""mixup (Zhang et al. 2018, arXiv:1710.09412): mixes pairs of images, and their targets, in random proportions."""

from __future__ import annotations

import numpy as np
import torch

from optimize.data.random_draws import Draws

# Not torchvision's v2.MixUp (0.29). It draws one proportion for all of a batch, from the process's generator. It also
# mixes across the whole batch, although each of several processes has only a part.

_DRAW = 9


def mixed(inputs: torch.Tensor, shares: torch.Tensor, alpha: float, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
    """Mix the images of a batch in pairs, each with its neighbour: the order is already random.

    Neighbours are mixed, so that a process with a part of the batch mixes the same pairs as one with all of it.

    Args:
        inputs: ``float32 (N, C, H, W)``.
        shares: the share of each class in the targets, ``float32 (N, classes, …)``; see `Task.shares`.
        alpha: both parameters of the Beta distribution of a pair's proportion.
        draws: the random numbers of these images. A pair takes its first one's.

    Returns:
        The mixed images and shares. An odd last image stays unchanged.
    """
    pairs = len(inputs) // 2
    words = draws.words(_DRAW)[: 2 * pairs : 2].tolist()
    parts = [np.random.default_rng(word).beta(alpha, alpha) for word in words]
    own = torch.ones(len(inputs), dtype=inputs.dtype)
    own[: 2 * pairs] = torch.tensor(parts, dtype=inputs.dtype).repeat_interleave(2)
    other = torch.arange(len(inputs))
    other[: 2 * pairs] = (torch.arange(2 * pairs) // 2) * 2 + 1 - torch.arange(2 * pairs) % 2
    own, other = own.to(inputs.device), other.to(inputs.device)

    def of_pairs(each: torch.Tensor) -> torch.Tensor:
        part = own.view(-1, *[1] * (each.dim() - 1))
        return part * each + (1 - part) * each[other]

    return of_pairs(inputs), of_pairs(shares)
