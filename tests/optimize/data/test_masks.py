"""Pictures with masks: a folder of one's own, and torchvision's data sets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from optimize.data.formats.base import open_data
from optimize.data.formats.torchvision import open_torchvision
from optimize.data.loading import loader
from optimize.data.records import ImageData, Split
from optimize.data.sources import Selected
from serve.runtime.card.card import Preprocessing
from serve.runtime.errors import UserError

SAME_SIZE = Preprocessing((6, 8), (6, 8))


def write(file: Path, values: np.ndarray) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values).save(file)


def write_pair(picture: Path, mask: Path, number: int, values: np.ndarray | None = None) -> None:
    """A picture of one colour, and a mask of the classes 0, 1, 2 and of 255."""
    write(picture, np.full((6, 8, 3), number, np.uint8))
    write(mask, np.arange(48, dtype=np.uint8).reshape(6, 8) % 3 if values is None else values)


def write_classes(root: Path, *names: str) -> None:
    (root / "classes.txt").write_text("\n".join(names) + "\n", encoding="utf-8")


@pytest.fixture
def root(tmp_path):
    """Six training and three validation pictures of two streets, in three classes."""
    root = tmp_path / "town"
    for part, count in (("train", 6), ("val", 3)):
        for number in range(count):
            name = f"{part}{number % 2}_{number}"
            write_pair(root / f"images/{part}/a/{name}.png", root / f"masks/{part}/a/{name}.png", number)
    write_classes(root, "road", "house", "sky")
    return root


def names(split: Split) -> list[str]:
    return [source.stem for source in split.sources if isinstance(source, Path)]


def write_all(root: Path, values: np.ndarray) -> None:
    for file in sorted((root / "masks").rglob("*.png")):
        write(file, values)


def opened(root: Path, *, accept_gaps: bool = False) -> ImageData:
    return open_data(f"masks:{root}", accept_gaps=accept_gaps)


def targets(data: ImageData) -> torch.Tensor:
    return torch.cat([found for _, found in loader(data.train, SAME_SIZE, batch_size=8, device=torch.device("cpu"))])


def test_pictures_and_masks_of_one_name_belong_together(root):
    first = np.full((6, 8), 2, np.uint8)
    write(root / "masks/train/a/train0_0.png", first)
    data = opened(root)
    assert (data.name, data.task, data.classes) == ("town", "segmentation", ("road", "house", "sky"))
    assert (len(data.train), len(data.val), data.native_size) == (6, 3, (6, 8))
    assert data.train.groups is data.val.groups is None
    assert names(data.train) == sorted(f"train{n % 2}_{n}" for n in range(6))
    other = torch.arange(48).reshape(6, 8) % 3
    assert torch.equal(targets(data), torch.stack([torch.from_numpy(first), *[other.byte()] * 5]))
    assert data.notes == data.gaps == ()


def test_the_names_of_cityscapes_are_known(tmp_path):
    for part in ("train", "val"):
        for city in ("ulm", "bonn"):
            name = f"{part}/{city}/{city}_000000_000019"
            mask = tmp_path / f"gtFine/{name}_gtFine_labelTrainIds.png"
            write_pair(tmp_path / f"leftImg8bit/{name}_leftImg8bit.png", mask, 1)
            write(tmp_path / f"gtFine/{name}_gtFine_color.png", np.zeros((6, 8, 3), np.uint8))
    write_classes(tmp_path, "road", "house", "sky")
    (tmp_path / "groups.txt").write_text("^([^/]+)/", encoding="utf-8")
    data = opened(tmp_path)
    assert (len(data.train), len(data.val)) == (2, 2)
    assert data.train.groups is not None
    assert len(set(data.train.groups.tolist())) == 2
    assert data.notes == ("2 of 2 groups are in both train/ and val/ (bonn, ulm)",)
    assert targets(data).shape == (2, 6, 8)


def test_a_rule_groups_pictures_by_their_names(root):
    (root / "groups.txt").write_text("^a/[^_]+\n", encoding="utf-8")
    data = opened(root)
    assert data.train.groups is not None
    assert data.val.groups is not None
    streets = [name.partition("_")[0] for name in (*names(data.train), *names(data.val))]
    numbers = [*data.train.groups.tolist(), *data.val.groups.tolist()]
    assert len(set(zip(streets, numbers, strict=True))) == len(set(streets)) == len(set(numbers)) == 4


def test_without_parts_a_fifth_is_split_off_and_groups_stay_whole(tmp_path):
    for number in range(20):
        name = f"street{number // 4}_{number}.png"
        write_pair(tmp_path / "images" / name, tmp_path / "masks" / name, number)
    write_classes(tmp_path, "road", "house", "sky")
    assert (len(opened(tmp_path).train), len(opened(tmp_path).val)) == (16, 4)
    (tmp_path / "groups.txt").write_text("street[0-9]+", encoding="utf-8")
    data = opened(tmp_path)
    assert (len(data.train), len(data.val)) == (16, 4)
    assert len({name.partition("_")[0] for name in names(data.val)}) == 1
    assert data.val.sources == open_data(f"masks:{tmp_path}").val.sources


def test_palette_masks_and_deep_ones_are_indices(root):
    palette = Image.fromarray(np.full((6, 8), 1, np.uint8)).copy()
    palette.putpalette([0, 0, 0, 200, 10, 10])
    palette.save(root / "masks/train/a/train0_0.png")
    write(root / "masks/train/a/train1_1.png", np.full((6, 8), 2, np.uint16))
    found = targets(opened(root))
    assert found[[0, 3]].flatten(1).unique(dim=1).tolist() == [[1], [2]]


def test_numbers_that_are_no_class_are_said_except_255(root):
    write(root / "masks/train/a/train0_0.png", np.array([[0, 1, 2, 3, 4, 5, 11, 255]] * 6, np.uint8))
    data = opened(root)
    assert data.notes == ("training masks: pixels of 3-5, 11 do not count, because these are no classes",)
    assert targets(data)[0, 0].tolist() == [0, 1, 2, 255, 255, 255, 255, 255]


def test_masks_of_black_and_white_are_found_out(root):
    write_classes(root, "ground", "road")
    write_all(root, np.array([[0, 255] * 4] * 6, np.uint8))
    with pytest.raises(
        UserError, match="none of 6 training masks has the class 1 road; they have 0, 255; none of 3 val"
    ):
        opened(root)
    assert len(opened(root, accept_gaps=True).notes) == 2


def test_pictures_without_a_mask_are_a_gap_and_masks_without_a_picture_are_left_out(root):
    (root / "masks/train/a/train0_2.png").unlink()
    (root / "images/val/a/val0_2.png").unlink()
    with pytest.raises(UserError, match=r"images/train: 1 of 6 pictures have no mask \(a/train0_2\)"):
        opened(root)
    data = opened(root, accept_gaps=True)
    assert (len(data.train), len(data.val)) == (5, 2)
    assert data.notes[1] == f"left out: 1 masks without a picture in {root}/masks/val (a/val0_2)"


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda root: (root / "classes.txt").unlink(), r"town/classes\.txt: is missing; write the name of each class"),
        (lambda root: write_classes(root, "road"), r"classes\.txt: has only one class \(road\)"),
        (lambda root: write_classes(root, *map(str, range(32_768))), "has 32768 classes, and masks can have 32767"),
        (lambda root: write_classes(root, "a", "b", "a"), r"classes\.txt: names a twice"),
        (lambda root: (root / "groups.txt").write_text("(a"), r"groups\.txt: '\(a' is not a regular expression"),
        (lambda root: (root / "groups.txt").write_text("\n"), r"groups\.txt: is empty; write a regular expression"),
        (
            lambda root: (root / "groups.txt").write_text("(x)?"),
            r"groups\.txt: '\(x\)\?' finds nothing in 'a/train0_0'",
        ),
        (lambda root: (root / "groups.txt").write_text("^x"), r"groups\.txt: '\^x' finds nothing in 'a/train0_0'"),
        (lambda root: (root / "masks").rename(root / "labels"), "masks/train: the folder cannot be read"),
        (lambda root: (root / "images").rename(root / "pictures"), r"town: has no images/; masks:DIR needs"),
        (lambda root: (root / "images/val").rename(root / "val"), "has images/train/ but no images/val/; add it"),
        (
            lambda root: [file.rename(file.with_name(f"m_{file.name}")) for file in (root / "masks").rglob("*.png")],
            r"images/train: no picture has a mask; the mask of train0_0\.png is .*/masks/train/a/train0_0\.png",
        ),
        (
            lambda root: write_all(root, np.zeros((6, 8, 3), np.uint8)),
            r"images/train/a/train0_0\.png: its mask .*masks/train/a/train0_0\.png: is of colours \(RGB\); a mask is",
        ),
    ],
)
def test_a_mistake_in_the_folder_is_one_line(root, spoil, said):
    spoil(root)
    with pytest.raises(UserError, match=said) as caught:
        opened(root, accept_gaps=True)
    assert "\n" not in str(caught.value)


def test_there_must_be_a_folder(tmp_path):
    with pytest.raises(UserError, match="there is no such folder"):
        opened(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is not a folder"):
        opened(tmp_path / "file")


def test_a_mask_of_another_size_is_named_when_it_is_read(root):
    write(root / "masks/train/a/train0_4.png", np.full((5, 8), 2, np.uint8))
    with pytest.raises(
        UserError, match=r"a/train0_4\.png: its mask .*train0_4\.png has 8x5 pixels, the picture has 8x6"
    ):
        targets(opened(root))


def test_a_large_split_is_judged_by_a_sample(root, monkeypatch):
    monkeypatch.setattr("optimize.data.formats.masks.LOOKED_AT", 2)
    for number in range(1, 5):
        write(root / f"masks/train/a/train{number % 2}_{number}.png", np.array([[9] * 8] * 6, np.uint8))
    for number in (0, 5):
        write(root / f"masks/train/a/train{number % 2}_{number}.png", np.zeros((6, 8), np.uint8))
    assert opened(root).notes == ("none of 2 of 6 training masks has the classes 1 house, 2 sky; they have 0",)


def test_voc_is_read_from_torchvisions_files(tmp_path):
    base = tmp_path / "VOCdevkit/VOC2012"
    for part, name in (("train", "2007_000032"), ("val", "2007_000033")):
        mask = Image.fromarray(np.array([[0, 1, 20, 255, 0, 0, 0, 0]] * 6, np.uint8)).copy()
        mask.putpalette([value for index in range(256) for value in (index, 0, 0)])
        (base / "SegmentationClass").mkdir(parents=True, exist_ok=True)
        mask.save(base / f"SegmentationClass/{name}.png")
        write(base / f"JPEGImages/{name}.jpg", np.zeros((6, 8, 3), np.uint8))
        (base / "ImageSets/Segmentation").mkdir(parents=True, exist_ok=True)
        (base / f"ImageSets/Segmentation/{part}.txt").write_text(f"{name}\n")
    data = open_torchvision("vocsegmentation", tmp_path)
    assert (data.task, len(data.classes), data.classes[20], data.augment) == (
        "segmentation",
        21,
        "tvmonitor",
        "shift+flip",
    )
    assert data.val.sources == (base / "JPEGImages/2007_000033.jpg",)
    assert targets(data)[0, 0].tolist() == [0, 1, 20, 255, 0, 0, 0, 0]


def test_pets_are_pet_or_background_and_their_border_does_not_count(tmp_path):
    base = tmp_path / "oxford-iiit-pet"
    for part, name in (("trainval", "Abyssinian_1"), ("test", "beagle_2")):
        write(base / f"annotations/trimaps/{name}.png", np.array([[1, 2, 3, 2, 2, 2, 2, 2]] * 6, np.uint8))
        write(base / f"images/{name}.jpg", np.zeros((6, 8, 3), np.uint8))
        (base / f"annotations/{part}.txt").write_text(f"{name} 1 1 1\n")
    data = open_torchvision("oxfordiiitpet", tmp_path)
    assert (data.task, data.classes, len(data.val)) == ("segmentation", ("background", "pet"), 1)
    assert targets(data)[0, 0].tolist() == [1, 0, 255, 0, 0, 0, 0, 0]


def test_paths_are_kept_as_arrays(root):
    data = opened(root)
    assert isinstance(data.train.sources, Selected)
