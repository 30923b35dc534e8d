"""Class maps of a program: the same from each form of data, and a line that says what is wrong with others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, TensorDataset

from optimize.data.from_python import image_data
from optimize.data.loading import loader
from optimize.data.program_items import Data
from optimize.data.records import ImageData
from optimize.data.targets import ClassMaps
from serve.runtime.card.card import Preprocessing
from serve.runtime.errors import UserError
from tests.optimize.workbench import CPU

RNG = np.random.default_rng(0)
IMAGES = torch.from_numpy(RNG.integers(0, 256, (20, 3, 10, 12), dtype=np.uint8))
MASKS = torch.from_numpy(RNG.integers(0, 3, (20, 10, 12), dtype=np.uint8))
WHOLE = Preprocessing((10, 12), (10, 12), (0.5,) * 3, (0.25,) * 3)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


class Pictures(Dataset[Any]):
    """PIL images with masks of palette indices, as torchvision's VOCSegmentation gives them."""

    classes = ("ground", "cat", "dog")

    def __len__(self) -> int:
        return len(IMAGES)

    def __getitem__(self, row: int) -> tuple[Image.Image, Image.Image]:
        mask = Image.fromarray(MASKS[row].numpy())
        mask.putpalette([0, 0, 0, 255, 0, 0, 0, 255, 0])
        return Image.fromarray(IMAGES[row].permute(1, 2, 0).numpy()), mask


FORMS: dict[str, Data] = {
    "tensors": (IMAGES, MASKS),
    "arrays": (IMAGES.permute(0, 2, 3, 1).numpy(), MASKS.numpy().astype(np.int64)),
    "masks with a channel": (IMAGES, MASKS[:, None].int()),
    "pictures": Pictures(),
    "tensor dataset": TensorDataset(IMAGES, MASKS.long()),
    "shuffled loader": DataLoader(TensorDataset(IMAGES, MASKS), batch_size=6, shuffle=True),
    "batches of pairs": DataLoader(TensorDataset(IMAGES, MASKS), batch_size=2, collate_fn=list),
    "names": [{"pixel_values": image, "mask": mask} for image, mask in zip(IMAGES, MASKS, strict=True)],
}


def maps(data: ImageData, part: str = "val") -> torch.Tensor:
    split = getattr(data, part)
    return torch.cat([targets for _, targets in loader(split, WHOLE, batch_size=7, device=CPU)])


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_maps(form: str) -> None:
    found = image_data((IMAGES[:2], MASKS[:2]), FORMS[form], classes=Pictures.classes)
    assert (found.task, found.classes) == ("segmentation", Pictures.classes)
    assert torch.equal(maps(found), MASKS)
    pictures = torch.cat([images for images, _ in loader(found.val, WHOLE, batch_size=7, device=CPU)])
    assert torch.equal(pictures, IMAGES)
    tensors = image_data((IMAGES[:2], MASKS[:2]), (IMAGES, MASKS), classes=Pictures.classes)
    assert found.val.fingerprint == tensors.val.fingerprint


def test_names_and_their_number_come_from_the_data_or_the_highest_value() -> None:
    assert image_data(Pictures()).classes == ("ground", "cat", "dog")
    assert image_data((IMAGES, MASKS)).classes == ("0", "1", "2")
    split = image_data((IMAGES, MASKS))
    assert (len(split.train), len(split.val)) == (16, 4)


def test_255_and_negative_values_do_not_count() -> None:
    masks = MASKS.long()
    masks[:, 0] = 255
    masks[:, 1] = -1
    masks[:, 2] = -100
    found = image_data((IMAGES, masks), (IMAGES, masks))
    assert found.classes == ("0", "1", "2")
    read = maps(found)
    assert read.dtype == torch.uint8
    assert (read[:, :3] == 255).all()
    assert torch.equal(read[:, 3:].long(), masks[:, 3:])


def test_more_classes_than_a_byte_holds_keep_their_numbers() -> None:
    masks = torch.randint(0, 300, (20, 10, 12))
    masks[0, 0, 0], masks[0, 0, 1], masks[0, 0, 2] = 299, 255, -1
    found = image_data((IMAGES, masks), (IMAGES, masks))
    assert len(found.classes) == 300
    read = maps(found)
    assert (int(read[0, 0, 1]), int(read[0, 0, 2])) == (255, 32767)
    masks[0, 0, 2] = 32767
    assert torch.equal(read.long(), masks)


def test_prepared_images_have_maps_of_their_size() -> None:
    floats = (IMAGES.float() / 255 - 0.5) / 0.25
    found = image_data((floats, MASKS), (floats, MASKS), preprocessing=WHOLE)
    assert isinstance(found.val.targets, ClassMaps)
    assert torch.equal(maps(found), MASKS)


@pytest.mark.parametrize(
    ("train", "options", "message"),
    [
        ((IMAGES, MASKS[:, :9]), {}, r"train\[0\]: its class map has 12x9 pixels, the image has 12x10"),
        ((IMAGES, MASKS.float()), {}, r"train\[0\]: its class map is ndarray of float32.* whole numbers as classes"),
        ((IMAGES, IMAGES), {}, r"its class map is ndarray of uint8, shape \(3, 10, 12\); it must have .* \(H, W\)"),
        ((IMAGES, MASKS.int() + 40_000), {}, r"has the value 4000[0-2]; the highest class is 32766"),
        ((IMAGES, MASKS), {"classes": ["a", "b"]}, r"has 2 names, and train\[0\] has class 2; give a name for each"),
        ((IMAGES, MASKS * 0), {}, r"only one class \(0\)"),
        ([(IMAGES[0], MASKS[0]), (IMAGES[1], 1)], {}, r"train\[1\]: its target is 1, and those .* are class maps"),
        ([(IMAGES[0], 1), (IMAGES[1], MASKS[1])], {}, r"train\[1\]: its target is Tensor .* are classes"),
        ((IMAGES, MASKS), {"val": (IMAGES, torch.arange(20) % 3)}, "train and val must both"),
    ],
)
def test_what_cannot_be_taken_is_refused_in_one_line(train: Data, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        image_data(train, **options)
    assert "\n" not in str(caught.value)
