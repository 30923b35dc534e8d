"""Random changes that keep an image's target true."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from optimize.data.augmentation_choice import Augmentation
from optimize.data.random_draws import Draws
from optimize.data.targets import ignored
from serve.runtime.images.lean_torchvision import InterpolationMode, torchvision
from serve.runtime.images.lean_torchvision import functional as transforms

v2 = torchvision.transforms.v2

#: The draw for a transform's own random numbers. `augment` has those below, `mixed` the next.
_DRAW = 8


def change(
    images: torch.Tensor,
    targets: torch.Tensor,
    kind: Augmentation,
    draws: Draws,
    *,
    crop_scale: float | None,
    trivial: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply `augment` and `transform` to a batch, and to class maps whatever moves pixels.

    Draws depend only on the image, so that a map moves as its image does. What comes from outside it does not count.

    Args:
        images: ``uint8 (N, C, H, W)``.
        targets: class maps ``(N, H, W)``. Other targets stay as they are.
        kind: see `augment`.
        draws: the random numbers of these images.
        crop_scale: see `transform`.
        trivial: see `transform`. If there are maps, only operations that change colours are applied.
    """
    maps = targets.ndim == 3
    images = augment(images, kind, draws)
    images = transform(images, draws, crop_scale=crop_scale, trivial=trivial, colours_only=maps)
    if maps:
        moved = augment(targets[:, None], kind, draws, fill=ignored(targets.dtype))
        targets = transform(moved, draws, crop_scale=crop_scale, trivial=False, nearest=True)[:, 0]
    return images, targets


def augment(batch: torch.Tensor, kind: Augmentation, draws: Draws, fill: int = 0) -> torch.Tensor:
    """Shift each image of a ``uint8`` ``(N, C, H, W)`` batch at random, and mirror half of them for ``shift+flip``.

    Shifts are whole pixels, up to an eighth of each side. The uncovered border is black for ``shift`` (glyphs on a
    ground), and the image's own reflection for ``shift+flip`` (photographs). torchvision's own random transforms are
    not used. They change all images of a batch alike, and take their random numbers from the process's generator, so
    that a run could not be repeated.

    Args:
        batch: the images.
        kind: the kind of changes.
        draws: the random numbers of these images. The change of one image does not depend on the others.
        fill: the value of the border that ``shift`` uncovers, if it is not black.

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
    parts = (transforms.pad(part, [reach_x, reach_y], fill, padding_mode=mode) for part in torch.split(batch, together))
    padded = itertools.chain.from_iterable(parts)
    for image, target, top, left, mirror in zip(padded, moved, tops, lefts, mirrored, strict=True):
        window = transforms.crop(image, top, left, height, width)
        target.copy_(transforms.horizontal_flip(window) if mirror else window)
    return moved


def transform(
    batch: torch.Tensor,
    draws: Draws,
    *,
    crop_scale: float | None,
    trivial: bool,
    colours_only: bool = False,
    nearest: bool = False,
) -> torch.Tensor:
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
        colours_only: apply one of its operations that move no pixel instead.
        nearest: scale crops by nearest neighbour, as for maps. They are the same crops.
    """
    steps: list[Callable[[torch.Tensor], torch.Tensor]] = []
    if crop_scale is not None:
        mode = InterpolationMode.NEAREST_EXACT if nearest else InterpolationMode.BILINEAR
        # It comes first, so that it draws the same numbers for an image and its map.
        steps.append(v2.RandomResizedCrop(list(batch.shape[-2:]), (crop_scale, 1.0), interpolation=mode))
    if trivial:
        steps.append(_one_colour_operation() if colours_only else v2.TrivialAugmentWide())
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


def _one_colour_operation() -> Callable[[torch.Tensor], torch.Tensor]:
    """Return TrivialAugmentWide's operations on colours. torchvision's own class (0.29) refuses masks."""
    most = 0.99
    operations = [
        v2.Identity(),
        v2.ColorJitter(brightness=most),
        v2.ColorJitter(contrast=most),
        v2.ColorJitter(saturation=most),
        v2.RandomAdjustSharpness(1 - most, p=1.0),
        v2.RandomAdjustSharpness(1 + most, p=1.0),
        v2.RandomPosterize(4, p=1.0),
        v2.RandomSolarize(128, p=1.0),
        v2.RandomAutocontrast(p=1.0),
        v2.RandomEqualize(p=1.0),
    ]
    chosen: Callable[[torch.Tensor], torch.Tensor] = v2.RandomChoice(operations)
    return chosen
