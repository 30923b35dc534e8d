"""CSVs of pictures and their labels, COCO's classes, and the digits that occur in scenes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from optimize.data.class_order import with_order
from optimize.data.formats import scenes
from optimize.data.formats.base import default_data, open_data
from optimize.data.formats.csv_file import read_csv
from optimize.data.records import ImageData, Split
from optimize.data.targets import ClassMaps, Vectors
from serve.runtime.errors import UserError


def write(file: Path, number: int = 0) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((6, 8, 3), number, np.uint8)).save(file)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Twelve pictures in a folder beside the CSV."""
    for number in range(12):
        write(tmp_path / "birds" / "images" / f"{number}.png", number)
    return tmp_path / "birds"


def csv(root: Path, *lines: str, name: str = "birds.csv") -> str:
    (root / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return f"csvlabels:{root / name}"


def vectors(split: Split) -> list[list[int]]:
    assert isinstance(split.targets, Vectors)
    found: list[list[int]] = split.targets.values.tolist()
    return found


def names(split: Split) -> list[str]:
    return [source.name for source in split.sources if isinstance(source, Path)]


def by_name(data: ImageData) -> dict[str, list[int]]:
    return {
        name: row for split in (data.train, data.val) for name, row in zip(names(split), vectors(split), strict=True)
    }


def test_one_column_has_all_labels_and_another_the_part(root: Path) -> None:
    rows = (f"{number}.png,{'red big' if number % 2 else 'big'},{number >= 8}" for number in range(12))
    data = open_data(csv(root, "fname,labels,is_valid", *rows))
    assert (data.name, data.task, data.classes) == ("birds", "multilabel", ("big", "red"))
    assert names(data.train) == [f"{number}.png" for number in range(8)]
    assert vectors(data.val) == [[1, 0], [1, 1], [1, 0], [1, 1]]
    assert data.notes == ("the labels in column labels are separated by spaces",)
    assert data.native_size == (6, 8)


@pytest.mark.parametrize(("sign", "separator"), [("|", ","), (";", "\t"), (",", ";"), (" ", ",")])
def test_labels_may_be_separated_by_any_usual_sign_and_missing(root: Path, sign: str, separator: str) -> None:
    cells = [sign.join(["No Finding"[: 2 if sign == " " else 10], "Edema"][: number % 3]) for number in range(12)]
    rows = (f"{number}{separator}{cell}" for number, cell in enumerate(cells))
    data = open_data(csv(root, f"Image Index{separator}Finding Labels", *rows), accept_gaps=True)
    assert data.classes == ("Edema", "No" if sign == " " else "No Finding")
    assert (len(data.train), len(data.val)) == (10, 2)
    assert by_name(data)["0.png"] == [0, 0]
    assert by_name(data)["1.png"] == [0, 1]
    assert by_name(data)["2.png"] == [1, 1]


def test_a_column_for_each_class_has_ones_and_zeros_in_the_files_of_two_folders(root: Path) -> None:
    for part, count in (("train", 4), ("valid", 2)):
        for number in range(count):
            write(root / part / f"{part}{number}.png", number)
        rows = (f"{part}{number}.png, {int(number % 2 == 0)}, 1" for number in range(count))
        csv(root, "filename, wet, cold", *rows, name=f"{part}/_classes.csv")
    data = open_data(f"csvlabels:{root}")
    assert data.classes == ("wet", "cold")
    assert vectors(data.train) == [[1, 1], [0, 1], [1, 1], [0, 1]]
    assert names(data.val) == ["valid0.png", "valid1.png"]


def test_a_file_of_three_parts_measures_with_those_to_validate(root: Path) -> None:
    rows = [f"{number}.png,a,{part}" for number, part in enumerate(["train", "Training", "test", "valid", "dev"])]
    data = open_data(csv(root, "image,labels,split", *rows))
    assert (names(data.train), names(data.val)) == (["0.png", "1.png"], ["3.png", "4.png"])
    assert data.notes == ("the pictures of val are used for measuring; not used: the 1 of test",)


def test_columns_that_number_the_rows_are_not_used_and_a_part_may_be_the_other_one(root: Path) -> None:
    rows = [f"{number},{number + 7},{number}.png,{number % 2},{number < 8}" for number in range(12)]
    data = open_data(csv(root, ",id,image,red,is_train", *rows))
    assert (data.classes, len(data.train), len(data.val)) == (("red",), 8, 4)
    assert data.notes == ("not used: the columns without a name, id",)
    with pytest.raises(UserError, match="names only columns that number or divide the pictures"):
        open_data(csv(root, "id,image,split", "0,0.png,val"))


def test_a_file_without_its_pictures_is_not_read_to_its_end(root: Path) -> None:
    with pytest.raises(UserError) as caught:
        open_data(csv(root, "image,labels", *(f"gone{number},a" for number in range(5000))))
    assert str(caught.value).splitlines()[-1] == "and at least 90 more"


def test_groups_are_held_out_together(root: Path) -> None:
    rows = (f"{number}.png,{'ab'[number % 2]},patient {number // 3}" for number in range(12))
    data = open_data(csv(root, "image,tags,group", *rows))
    assert data.train.groups is not None
    assert data.val.groups is not None
    assert not {*data.train.groups.tolist()} & {*data.val.groups.tolist()}
    assert len(data.val) == 3


def test_every_fault_is_a_line_with_its_number_and_ten_are_named_at_once(root: Path) -> None:
    lines = ["image,labels,split", "0.png,a,train", "gone.png,a,train", "1.png,a", "2.png,b,tomorrow", ",a,val"]
    with pytest.raises(UserError) as caught:
        open_data(csv(root, *lines, "../birds/3.png,a,val", "x" * 300 + ",a,val"))
    file = root / "birds.csv"
    assert str(caught.value).splitlines() == [
        f"{file}:3: there is no gone.png in {root} or in its images/",
        f"{file}:4: has 2 columns, and the first line names 3",
        f"{file}:5: split is 'tomorrow'; it must be train or val",
        f"{file}:6: names no picture",
        f"{file}:7: ../birds/3.png must be a path below {root}",
        f"{file}:8: there is no {'x' * 300} in {root} or in its images/",
    ]
    with pytest.raises(UserError) as caught:
        open_data(csv(root, "image,a,b", *(f"{number}.png,1,{number + 2}" for number in range(12))))
    found = str(caught.value).splitlines()
    assert found[0] == f"{file}:2: column b has '2'; it must be 1 if the picture has that label, else 0"
    assert (len(found), found[-1]) == (11, "and 2 more")
    with pytest.raises(UserError, match=r"birds.csv:4: 0.png is in line 2 of birds.csv already"):
        open_data(csv(root, "image,labels", "0.png,a", "1.png,a", "0.png,b"))


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["image"], r":1: names 1 columns; it needs one of the pictures' names, and others"),
        (["image,,a"], r":1: has no name for column 2"),
        ([",image", "0,0.png"], r":1: names only columns that number"),
        (["image,a,a"], r":1: names the column 'a' twice"),
        (["image,labels"], "names no picture; write one in each line"),
        (["image,labels", "0.png,"], "has no labels"),
        (["image,labels", '0.png,"a'], r":2: is no CSV \(unexpected end of data\)"),
        (["image,labels,split", "0.png,a,val", "1.png,b,val"], "has no pictures to train with"),
        (["image,labels,split", "0.png,a,val", "1.png,b,train"], "none of the 1 training images has the label a"),
    ],
)
def test_a_file_that_says_too_little_is_refused_with_what_is_needed(root: Path, lines: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        open_data(csv(root, *lines))


def test_files_that_are_not_there_or_no_text_are_refused(root: Path) -> None:
    with pytest.raises(UserError, match=r"there is no such file or folder; write csvlabels:FILE"):
        open_data(f"csvlabels:{root}/none.csv")
    with pytest.raises(UserError, match=r"has no CSV; it needs train.csv and val.csv"):
        open_data(f"csvlabels:{root}")
    (root / "bad.csv").write_bytes(b"image,labels\n\xff\xfe,a\n")
    with pytest.raises(UserError, match=r"bad.csv: cannot be read: it is not UTF-8 text"):
        open_data(f"csvlabels:{root}/bad.csv")
    csv(root, "image,a", "0.png,1", name="train.csv")
    csv(root, "image,b", "1.png,1", name="val.csv")
    with pytest.raises(UserError, match=r"val.csv: has the columns b, and train.csv a"):
        open_data(f"csvlabels:{root}")


@given(
    st.text(max_size=200)
    | st.lists(st.lists(st.text(max_size=5), max_size=4), max_size=6).map(
        lambda rows: "\n".join(",".join(row) for row in rows)
    )
)
def test_any_text_is_read_or_refused_in_lines_that_name_the_file(text: str) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "any.csv"
        file.write_text(text, encoding="utf-8", errors="replace")
        try:
            read_csv(str(file), "csvlabels:FILE")
        except UserError as error:
            said = str(error)
        else:
            said = f"{file} has no pictures to find"
        assert said.startswith(str(file))


def coco(root: Path, part: str, **changes: Any) -> None:
    """Three pictures of a part: one with both classes, one with a cat, and one with none."""
    document = {
        "images": [{"id": 7 + place, "file_name": f"{part}{place}.png"} for place in range(3)],
        "categories": [{"id": 9, "name": "dog"}, {"id": 4, "name": "cat"}],
        "annotations": [
            {"image_id": image, "category_id": category} for image, category in ((7, 9), (7, 4), (7, 4), (8, 4))
        ],
    }
    (root / "annotations").mkdir(parents=True, exist_ok=True)
    (root / f"annotations/instances_{part}2017.json").write_text(json.dumps(document | changes))
    for place in range(3):
        write(root / f"{part}2017" / f"{part}{place}.png", place)


def test_coco_has_the_classes_that_occur_in_a_picture(tmp_path: Path) -> None:
    for part in ("train", "val"):
        coco(tmp_path, part)
    data = open_data(f"cocolabels:{tmp_path}")
    assert (data.task, data.classes) == ("multilabel", ("cat", "dog"))
    assert vectors(data.train) == vectors(data.val) == [[1, 1], [1, 0], [0, 0]]
    assert names(data.val) == ["val0.png", "val1.png", "val2.png"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"images": None}, "has no list of images"),
        ({"categories": []}, "has no categories"),
        ({"annotations": [{"image_id": 7, "category_id": 1}]}, r"annotations\[0\]: there is no category 1"),
        ({"annotations": [{"image_id": "7", "category_id": 4}]}, r"image_id must be a whole number, found '7'"),
        ({"categories": [{"id": 4, "name": "a"}, {"id": 9, "name": "a"}]}, r"categories\[1\]: id 9 or name 'a' is in"),
        ({"images": [{"id": 7, "file_name": "gone.png"}], "annotations": []}, "there is no gone.png in"),
    ],
)
def test_a_faulty_annotation_is_named_by_its_place(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    coco(tmp_path, "train")
    coco(tmp_path, "val", **changes)
    with pytest.raises(UserError, match=said):
        open_data(f"cocolabels:{tmp_path}")


def test_coco_without_annotations_is_refused_with_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"instances_train\*.json: is missing; cocolabels:DIR needs one for train"):
        open_data(f"cocolabels:{tmp_path}")


def test_scenes_have_the_digits_that_occur_in_their_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenes, "SCENES", (20, 10))
    scenes._scenes.cache_clear()
    data, masks = open_data("scenelabels"), open_data("scenes")
    scenes._scenes.cache_clear()
    assert default_data("multilabel") == "scenelabels"
    assert (data.task, data.classes, data.native_size) == ("multilabel", tuple("0123456789"), (96, 96))
    assert isinstance(masks.val.targets, ClassMaps)
    for row, found in enumerate(vectors(data.val)):
        assert {place for place, has in enumerate(found) if has} == {*masks.val.targets.values(row).ravel() - 1} - {255}


def test_a_label_keeps_its_column_in_another_order_of_the_classes(root: Path) -> None:
    data = open_data(
        csv(root, "image,labels,split", *(f"{n}.png,{'abc'[n % 3]},{['train', 'val'][n > 5]}" for n in range(12)))
    )
    moved = with_order(data, data.classes, ("c", "a", "b"))
    assert moved.classes == ("c", "a", "b")
    before, after = (torch.tensor(vectors(each.val)) for each in (data, moved))
    assert torch.equal(after, before[:, [2, 0, 1]])
    assert moved.val.fingerprint != data.val.fingerprint
