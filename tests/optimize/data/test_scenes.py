"""The scenes of handwritten digits."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from optimize.data.formats import scenes
from optimize.data.formats.base import open_data
from optimize.data.formats.digits import split_digits
from optimize.data.records import ImageData, Split
from optimize.data.targets import ClassMaps
from tests.narrow import encoded


@pytest.fixture(scope="module")
def data():
    return made()


def made(seed: int = 0) -> ImageData:
    """Few scenes, so that a test is fast."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scenes, "SCENES", (60, 30))
        scenes._scenes.cache_clear()
        found = open_data("scenes", seed=seed)
        scenes._scenes.cache_clear()
    return found


def masks(split: Split) -> np.ndarray:
    assert isinstance(split.targets, ClassMaps)
    return np.stack([split.targets.values(row) for row in range(len(split))])


def pixels(split: Split) -> np.ndarray:
    return np.stack([np.asarray(Image.open(io.BytesIO(encoded(source)))) for source in split.sources])


def test_scenes_have_several_digits_and_much_ground(data):
    assert (data.task, data.classes) == ("segmentation", ("background", *"0123456789"))
    assert (len(data.train), len(data.val)) == (60, 30)
    for split in (data.train, data.val):
        found = masks(split)
        assert pixels(split).shape == (len(split), 96, 96, 3)
        assert found.shape == (len(split), 96, 96)
        assert np.unique(found).tolist() == list(range(11))
        assert 0.6 < (found == 0).mean() < 0.9
        assert np.mean([len(np.unique(mask)) - 1 for mask in found]) > 2.5


def test_a_digit_is_brighter_than_the_ground(data):
    for picture, mask in zip(pixels(data.train), masks(data.train), strict=True):
        assert picture[mask > 0].mean() > picture[mask == 0].mean() + 40


def test_a_seed_gives_the_same_scenes_and_another_gives_others(data):
    again, other = made(), made(1)
    assert again.fingerprint == data.fingerprint
    assert len({data.train.fingerprint, data.val.fingerprint, other.train.fingerprint, other.val.fingerprint}) == 4


def test_digits_to_measure_with_are_in_no_scene_to_train_with(monkeypatch):
    drawn: list[Split] = []
    split = scenes._split

    def noted(digits: Split, count: int, seed: tuple[int, int]) -> Split:
        drawn.append(digits)
        return split(digits, 1, seed)

    monkeypatch.setattr(scenes, "_split", noted)
    made()
    train, val = drawn
    assert not {*train.sources} & {*val.sources}
    assert [len(train), len(val)] == [len(each) for each in split_digits(0)]
