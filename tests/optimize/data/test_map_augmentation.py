"""Random changes of images whose targets are class maps."""

from __future__ import annotations

import pytest
import torch

from optimize.data.augment import augment, change, transform
from optimize.data.augmentation_choice import Augmentation
from optimize.data.random_draws import Draws

ROWS = torch.arange(40)


def coded(classes: int = 200, dtype: torch.dtype = torch.uint8) -> tuple[torch.Tensor, torch.Tensor]:
    """Images whose first channel is the class of each pixel, and the classes."""
    maps = torch.randint(1, classes, (40, 16, 24), generator=torch.Generator().manual_seed(0))
    return torch.stack([maps, maps // 2, 255 - maps], 1).to(torch.uint8), maps.to(dtype)


def discs(count: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    """White discs on black, as images and as maps."""
    y, x = torch.meshgrid(torch.arange(64), torch.arange(64), indexing="ij")
    maps = torch.stack([((y - 20 - n % 24) ** 2 + (x - 20 - n % 17) ** 2 < 225) for n in range(count)]).to(torch.uint8)
    return (255 * maps)[:, None].expand(-1, 3, -1, -1).contiguous(), maps


@pytest.mark.parametrize(("dtype", "ignored"), [(torch.uint8, 255), (torch.int16, 32767)])
def test_a_map_is_shifted_with_its_image_and_the_uncovered_border_does_not_count(dtype, ignored):
    images, maps = coded(dtype=dtype)
    found, moved = change(images, maps, "shift", Draws(3, 1, ROWS), crop_scale=None, trivial=False)
    assert moved.dtype == dtype
    assert torch.equal(found, augment(images, "shift", Draws(3, 1, ROWS))), "images change as without maps"
    outside = found[:, 2] == 0  # in a picture it is 56 or more
    assert 0.01 < outside.float().mean() < 0.3
    assert torch.equal(moved[~outside].long(), found[:, 0][~outside].long())
    assert (moved[outside] == ignored).all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_a_map_is_mirrored_and_reflected_with_its_image(dtype):
    images, maps = coded(dtype=dtype)
    found, moved = change(images, maps, "shift+flip", Draws(3, 1, ROWS), crop_scale=None, trivial=False)
    assert torch.equal(moved, found[:, 0].to(dtype))
    assert not torch.equal(moved, maps)


def test_a_map_is_cropped_with_its_image_without_new_classes():
    images, maps = discs()
    draws = Draws(5, 2, ROWS)
    found, moved = change(images, maps, "none", draws, crop_scale=0.25, trivial=False)
    assert torch.equal(found, transform(images, draws, crop_scale=0.25, trivial=False))
    assert moved.unique().tolist() == [0, 1]
    same = ((found[:, 0] >= 128) == (moved == 1)).float().mean((1, 2))
    assert same.mean() > 0.995  # a map that lay half a pixel beside its image would agree less
    assert (moved != maps).float().mean() > 0.1
    wide = change(images, maps.to(torch.int16), "none", draws, crop_scale=0.25, trivial=False)[1]
    assert torch.equal(wide, moved.to(torch.int16))


def test_operations_on_colours_leave_every_pixel_at_its_place():
    images, maps = discs(200)
    images = 40 + images // 2
    rows = torch.arange(200)
    found, moved = change(images, maps, "none", Draws(1, 0, rows), crop_scale=None, trivial=True)
    assert torch.equal(moved, maps)
    # Sharpness alone looks at the neighbours, so the rim is left out.
    inner = torch.nn.functional.max_pool2d(maps.float(), 3, 1, 1) == -torch.nn.functional.max_pool2d(
        -maps.float(), 3, 1, 1
    )
    for image, one, sure in zip(found, maps, inner, strict=True):
        for value in (0, 1):
            assert len(image[:, (one == value) & sure].unique()) == 1
    assert len({tuple(image.flatten().tolist()) for image in found}) > 20


def test_a_map_changes_alike_in_any_batch():
    images, maps = discs()
    kinds: tuple[tuple[Augmentation, float | None], ...] = (("shift+flip", None), ("shift", 0.5))
    for kind, scale in kinds:
        whole = change(images, maps, kind, Draws(7, 3, ROWS), crop_scale=scale, trivial=True)
        some = torch.tensor([30, 2])
        part = change(images[some], maps[some], kind, Draws(7, 3, ROWS[some]), crop_scale=scale, trivial=True)
        assert all(torch.equal(one, every[some]) for one, every in zip(part, whole, strict=True))
        other = change(images, maps, kind, Draws(7, 4, ROWS), crop_scale=scale, trivial=True)
        assert not torch.equal(other[1], whole[1])


def test_labels_stay_as_they_are():
    images, _ = coded()
    labels = torch.arange(40)
    found, same = change(images, labels, "shift+flip", Draws(3, 1, ROWS), crop_scale=0.5, trivial=True)
    assert same is labels
    expected = transform(
        augment(images, "shift+flip", Draws(3, 1, ROWS)), Draws(3, 1, ROWS), crop_scale=0.5, trivial=True
    )
    assert torch.equal(found, expected)
