"""Random changes that keep an image's label true."""

from __future__ import annotations

import torch

from optimize.data.records import Augmentation


def augment(batch: torch.Tensor, kind: Augmentation, generator: torch.Generator) -> torch.Tensor:
    """Shift each image of a ``uint8`` ``(N, C, H, W)`` batch at random, and mirror half of them.

    Shifts are whole pixels, up to an eighth of each side. What comes in from outside is black for
    ``shift`` (glyphs on a ground) and the image's own reflection for ``shift+flip`` (photographs).

    Returns:
        A new batch of the same shape, dtype and device; ``batch`` itself for ``none``.
    """
    if kind == "none":
        return batch
    count, _, height, width = batch.shape
    flips = kind == "shift+flip"

    def positions(side: int, flip: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """For each image, which of its rows (or columns) goes where, and whether it lies inside."""
        reach = side // 8
        shift = torch.randint(-reach, reach + 1, (count, 1), generator=generator, device=generator.device)
        place = torch.arange(side, device=generator.device) + shift
        if flip:
            mirrored = torch.rand((count, 1), generator=generator, device=generator.device) < 0.5
            place = torch.where(mirrored, place.flip(1), place)
        inside = (place >= 0) & (place < side)
        reflected = (side - 1 - (side - 1 - place.abs()).abs()).clamp(0, side - 1)
        return reflected.to(batch.device), inside.to(batch.device)

    rows, row_inside = positions(height, False)
    columns, column_inside = positions(width, flips)
    images_ = torch.arange(count, device=batch.device)[:, None, None]
    moved = batch.permute(0, 2, 3, 1)[images_, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
    if not flips:
        moved = moved * (row_inside[:, :, None] & column_inside[:, None, :])[:, None]
    return moved.contiguous()
