"""Random changes that keep an image's label true."""

from __future__ import annotations

import itertools

import torch

from optimize.data.augmentation_choice import Augmentation
from optimize.data.random_draws import Draws
from serve.runtime.images.lean_torchvision import functional as transforms


def augment(batch: torch.Tensor, kind: Augmentation, draws: Draws) -> torch.Tensor:
    """Shift each image of a ``uint8`` ``(N, C, H, W)`` batch at random, and mirror half of them for ``shift+flip``.

    Shifts are whole pixels, up to an eighth of each side. The uncovered border is black for ``shift`` (glyphs on a
    ground), and the image's own reflection for ``shift+flip`` (photographs). torchvision's own random transforms are
    not used. They change all images of a batch alike, and take their random numbers from the process's generator, so
    that a run could not be repeated.

    Args:
        batch: the images.
        kind: the kind of changes.
        draws: the random numbers of these images. The change of one image does not depend on the others.

    Returns:
        A new batch of the same shape, dtype and device. For ``none`` it is ``batch`` itself.
    """
    if kind == "none":
        return batch
    count, _, height, width = batch.shape
    reach_y, reach_x = height // 8, width // 8
    tops, lefts = draws.below(2 * reach_y + 1, 0), draws.below(2 * reach_x + 1, 1)
    mirrored = (draws.uniform(2) < 0.5).tolist() if kind == "shift+flip" else [False] * count
    mode = "reflect" if kind == "shift+flip" else "constant"
    moved = torch.empty_like(batch)
    # On a CPU, padding a whole batch of photographs takes five times as long, because it leaves the caches. On a GPU,
    # each call costs as much for one image as for all.
    together = count if batch.is_cuda else 1
    parts = (transforms.pad(part, [reach_x, reach_y], padding_mode=mode) for part in torch.split(batch, together))
    padded = itertools.chain.from_iterable(parts)
    for image, target, top, left, mirror in zip(padded, moved, tops, lefts, mirrored, strict=True):
        window = transforms.crop(image, top, left, height, width)
        target.copy_(transforms.horizontal_flip(window) if mirror else window)
    return moved
