"""Applies torchvision's random transforms to training images, each with its own random numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from optimize.data.random_draws import Draws
from serve.runtime.images.lean_torchvision import torchvision

v2 = torchvision.transforms.v2

#: The draw for a transform's own random numbers. `augment` has those below, `mixed` the next.
_DRAW = 8


def transform(batch: torch.Tensor, draws: Draws, *, crop_scale: float | None, trivial: bool) -> torch.Tensor:
    """Crop and change each image of a ``uint8 (N, C, H, W)`` batch at random. Shape and dtype stay.

    torchvision's transforms change all images of a batch alike and draw from the process's generator. So the generator
    is set for each image and restored afterwards.

    Args:
        batch: images on any device.
        draws: the random numbers of these images.
        crop_scale: the least share of an image's area that a crop has. The crop is then scaled to the image's size, as
            in RandomResizedCrop (Szegedy et al. 2015, arXiv:1409.4842). None: no crop.
        trivial: apply one operation of random strength to each image: TrivialAugmentWide (Müller & Hutter 2021,
            arXiv:2103.10158).
    """
    steps: list[Callable[[torch.Tensor], torch.Tensor]] = []
    if crop_scale is not None:
        steps.append(v2.RandomResizedCrop(list(batch.shape[-2:]), scale=(crop_scale, 1.0), antialias=True))
    if trivial:
        steps.append(v2.TrivialAugmentWide())
    if not steps:
        return batch
    changed = torch.empty_like(batch)
    before = torch.get_rng_state()
    try:
        for image, target, word in zip(batch, changed, draws.words(_DRAW).tolist(), strict=True):
            torch.default_generator.manual_seed(word % (1 << 63))
            for step in steps:
                image = step(image)  # noqa: PLW2901 - one after the other
            target.copy_(image)
    finally:
        torch.set_rng_state(before)
    return changed
