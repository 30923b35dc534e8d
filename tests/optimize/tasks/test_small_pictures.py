"""Pictures of a report have few pixels and few bytes, and rare findings stay visible in them."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from optimize.small_pictures import BYTES, SIDE, coloured, photograph

GREYS = [level for level in range(256) for _ in range(3)]


@pytest.mark.parametrize("shape", [(3, 700, 40), (1, 5, 900), (4, 8, 8), (3, 1, 1)])
def test_a_photograph_keeps_its_proportions_and_has_a_bounded_size(shape: tuple[int, int, int]) -> None:
    noise = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    shown = Image.open(io.BytesIO(photograph(noise)))
    assert max(shown.size) == min(SIDE, max(shape[1:]))
    assert shown.mode == ("RGB" if shape[0] == 3 else "L")


def test_noise_of_any_size_has_a_bounded_file() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (3, 900, 1000), np.uint8)
    assert len(photograph(noise)) <= BYTES
    assert len(coloured(noise[0], GREYS)) <= BYTES
    assert len(coloured(noise[0], GREYS, above=0)) <= BYTES


def test_a_map_keeps_its_numbers_and_a_scaled_one_its_rare_findings() -> None:
    values = np.zeros((1000, 700), np.uint8)
    values[501, 333] = 3
    values[500, 333] = 2
    shown = Image.open(io.BytesIO(coloured(values, GREYS, above=0)))
    assert shown.size == (175, 250)
    assert np.argwhere(np.asarray(shown)).tolist() == [[125, 83]]
    assert np.asarray(shown)[125, 83] == 3
    assert np.asarray(shown.convert("RGBA"))[0, 0, 3] == 0
    small = np.arange(12, dtype=np.uint8).reshape(3, 4)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(coloured(small, GREYS)))), small)
    assert "transparency" not in Image.open(io.BytesIO(coloured(small, GREYS))).info
