"""Points, boxes and class maps go to the network's input and back as the image itself is resized and cropped."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.runtime.card.card import Interpolation, Letterbox, Preprocessing
from serve.runtime.images.image_preprocessing import fit
from serve.runtime.images.placement import Placement

UNSEEN = 255


def prepared(
    resize: int | tuple[int, int] | Letterbox, crop: tuple[int, int], how: Interpolation = "bilinear"
) -> Preprocessing:
    return Preprocessing(resize, crop, (0.5,), (0.5,), how)


SIDES = st.tuples(st.integers(1, 60), st.integers(1, 60))
SIZES = st.one_of(
    st.tuples(st.integers(1, 200), st.integers(1, 200)),
    st.tuples(st.integers(1, 3), st.integers(1, 2000)),
    st.tuples(st.integers(1, 2000), st.integers(1, 3)),
)
WAYS = st.builds(
    prepared,
    st.one_of(st.integers(1, 60), SIDES, st.just("letterbox")),
    SIDES,
    st.sampled_from(["nearest", "bilinear", "bicubic"]),
)


def by_hand(size: tuple[int, int], wanted: Preprocessing) -> list[tuple[Fraction, int]]:
    """Factor and offset of rows and columns, by torchvision's own rules, or by those of YOLO's letterbox."""
    shorter, found = min(size), []
    gain = min(Fraction(kept, side) for kept, side in zip(wanted.crop, size, strict=True))
    for axis, side in enumerate(size):
        kept = wanted.crop[axis]
        if wanted.resize == "letterbox":
            scaled = max(1, round(side * gain))
            offset = -round((kept - scaled) / 2 - 0.1)
        else:
            if isinstance(wanted.resize, int):
                scaled = wanted.resize if side == shorter else int(wanted.resize * side / shorter)
            else:
                scaled = wanted.resize[axis]
            offset = round((scaled - kept) / 2.0) if scaled >= kept else -math.floor((kept - scaled) / 2)
        found.append((Fraction(scaled, side), offset))
    return found


@given(SIZES, WAYS, st.lists(st.floats(0, 1), min_size=4, max_size=4))
def test_boxes_go_to_the_network_and_back(size: tuple[int, int], wanted: Preprocessing, shares: list[float]) -> None:
    placement = Placement.of(*size, wanted)
    box = [share * size[1 - number % 2] for number, share in enumerate(shares)]
    there = placement.to_network(torch.tensor([box], dtype=torch.float64))
    rows, columns = by_hand(size, wanted)
    for number, (value, found) in enumerate(zip(box, there[0].tolist(), strict=True)):
        factor, offset = (columns, rows)[number % 2]
        assert found == pytest.approx(value * float(factor) - offset, abs=1e-6)
    assert torch.allclose(placement.to_picture(there)[0], torch.tensor(box, dtype=torch.float64), atol=1e-6)
    assert placement.to_picture(there[:0]).shape == (0, 4)


@given(SIZES, WAYS)
def test_every_pixel_of_the_picture_gets_the_class_at_its_centre(size: tuple[int, int], wanted: Preprocessing) -> None:
    placement = Placement.of(*size, wanted)
    height, width = wanted.crop
    classes = torch.arange(height * width).view(height, width)
    found = placement.map_to_picture(classes, -1)
    assert (found.dtype, tuple(found.shape)) == (classes.dtype, size)
    rows, columns = (
        [math.floor((place + Fraction(1, 2)) * factor) - offset for place in range(side)]
        for side, (factor, offset) in zip(size, by_hand(size, wanted), strict=True)
    )
    seen = [
        (y, x)
        for y, row in enumerate(rows)
        for x, column in enumerate(columns)
        if 0 <= row < height and 0 <= column < width
    ]
    expected = torch.full(size, -1)
    for y, x in seen:
        expected[y, x] = rows[y] * width + columns[x]
    assert torch.equal(found, expected)


@given(SIZES, WAYS)
@settings(max_examples=60)
def test_a_mask_is_placed_at_each_pixels_centre_and_bars_are_ignored(
    size: tuple[int, int], wanted: Preprocessing
) -> None:
    placement = Placement.of(*size, wanted)
    mask = torch.arange(size[0] * size[1]).view(size)
    found = placement.mask_to_network(mask, -1)
    rows, columns = (
        [math.floor((place + offset + Fraction(1, 2)) / factor) for place in range(kept)]
        for kept, (factor, offset) in zip(wanted.crop, by_hand(size, wanted), strict=True)
    )
    expected = [[y * size[1] + x if 0 <= y < size[0] and 0 <= x < size[1] else -1 for x in columns] for y in rows]
    assert found.tolist() == expected
    shown = torch.zeros_like(found, dtype=torch.bool)
    shown[placement.inside] = True
    assert torch.equal(shown, found >= 0)


@given(SIZES, WAYS, st.floats(0, 1), st.floats(0, 1))
@settings(max_examples=150)
def test_the_edges_of_an_image_and_of_its_mask_are_within_a_pixel_of_each_other(
    size: tuple[int, int], wanted: Preprocessing, down: float, right: float
) -> None:
    edges = round(down * size[0]), round(right * size[1])
    image = torch.zeros((1, *size), dtype=torch.uint8)
    image[:, edges[0] :, edges[1] :] = 255
    mask = Placement.of(*size, wanted).mask_to_network(image[0] // 255, UNSEEN)
    rows, columns = (
        torch.arange(kept) + 0.5 - float(edge * factor - offset)
        for edge, kept, (factor, offset) in zip(edges, wanted.crop, by_hand(size, wanted), strict=True)
    )
    white = (rows > 0)[:, None] & (columns > 0)
    places = (rows.abs() > 1)[:, None] & (columns.abs() > 1) & (mask != UNSEEN)
    assert torch.equal(mask[places] == 1, white[places])
    assert torch.equal(fit(image, wanted)[0][places] > 127, white[places])


def test_what_the_crop_cuts_off_is_named() -> None:
    placement = Placement.of(480, 640, prepared(60, (60, 60)))
    assert placement.seen == (80.0, 0.0, 560.0, 480.0)
    found = placement.map_to_picture(torch.zeros((60, 60), dtype=torch.uint8), UNSEEN)
    assert (found[:, 80:560] == 0).all()
    assert (found[:, :80] == UNSEEN).all()
    assert (found[:, 560:] == UNSEEN).all()


def test_bars_are_no_part_of_the_picture() -> None:
    placement = Placement.of(30, 60, prepared("letterbox", (20, 20)))
    assert placement.inside == (slice(5, 15), slice(0, 20))
    assert placement.seen == (0.0, 0.0, 60.0, 30.0)
    classes = torch.full((20, 20), 7)
    classes[5:15] = 3
    assert (placement.map_to_picture(classes, -1) == 3).all()


def test_maps_of_a_batch_and_of_any_integers_are_placed_together() -> None:
    placement = Placement.of(50, 40, prepared((8, 6), (8, 6)))
    for dtype in (torch.uint8, torch.int16, torch.int64):
        maps = torch.arange(96, dtype=dtype).view(2, 8, 6)
        found = placement.map_to_picture(maps, 0)
        assert (found.dtype, found.shape) == (dtype, (2, 50, 40))
        assert torch.equal(found[1], placement.map_to_picture(maps[1], 0))
        assert torch.equal(placement.mask_to_network(found, 0), maps)


def test_a_map_of_another_size_is_refused() -> None:
    placement = Placement.of(50, 40, prepared((8, 6), (8, 6)))
    with pytest.raises(ValueError, match="8x6 is needed"):
        placement.map_to_picture(torch.zeros(6, 8), 0)
    with pytest.raises(ValueError, match="50x40 is needed"):
        placement.mask_to_network(torch.zeros(40, 50), 0)


def test_a_map_of_the_longest_picture_has_its_size() -> None:
    placement = Placement.of(1, 3_000_000, prepared(65536, (8, 8)))
    found = placement.map_to_picture(torch.ones((8, 8), dtype=torch.uint8), UNSEEN)
    assert tuple(found.shape) == (1, 3_000_000)
    assert (found != 1).all(), "the crop is a part of one pixel, beside its centre"
