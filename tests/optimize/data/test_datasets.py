"""Folders written by the test itself, scikit-learn's digits, and torchvision's file formats written by hand."""

from __future__ import annotations

import gzip
import os
import shutil
import struct
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from sklearn.datasets import load_digits

from optimize.data import fingerprint, folder_listing
from optimize.data import folder_index as kept
from optimize.data.formats.base import open_data
from optimize.data.formats.torchvision import SETS, open_torchvision
from optimize.data.records import Split
from optimize.data.splits import subset
from optimize.data.targets import Labels
from serve.runtime.errors import UserError
from serve.runtime.images import image_preprocessing
from tests.narrow import encoded, file
from tests.optimize.workbench import noting


def write_image(path: Path, value: int = 0, size: tuple[int, int] = (8, 6)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value % 256, 10, 20)).save(path)
    return path


@pytest.fixture
def folder(tmp_path):
    """Two classes of ten images each, without a split."""
    for label in ("cat", "dog"):
        for index in range(10):
            write_image(tmp_path / "pets" / label / f"{index}.png", index)
    return tmp_path / "pets"


def names(split: Split) -> set[str]:
    return {"/".join(file(source).parts[-2:]) for source in split.sources}


def test_digits_are_scikit_learns_images_each_once_with_its_label():
    data = open_data("digits")
    bunch = load_digits()
    expected = Counter(
        (np.rint(image * 255 / 16).astype(np.uint8).tobytes(), int(label))
        for image, label in zip(bunch.images, bunch.target, strict=True)
    )
    actual = Counter(
        (image_preprocessing.decode(encoded(source), 1).numpy().tobytes(), label)
        for split in (data.train, data.val)
        for source, label in zip(split.sources, split.labels.tolist(), strict=True)
    )
    assert actual == expected
    assert data.classes == tuple("0123456789")
    assert data.native_size == (8, 8)
    assert data.augment == "shift"
    assert data.fingerprint_kind == "content"


def test_digits_are_split_80_to_20_in_every_class():
    data = open_data("digits")
    total = np.bincount(load_digits().target)
    assert torch.bincount(data.val.labels).tolist() == [round(count / 5) for count in total]


def test_the_split_depends_on_the_seed_alone():
    first, again, other = open_data("digits"), open_data("digits"), open_data("digits", seed=1)
    assert first.val.sources == again.val.sources
    assert first.fingerprint == again.fingerprint
    assert first.val.sources != other.val.sources
    assert first.fingerprint != other.fingerprint


@pytest.mark.parametrize("seed", [-1, 1 << 32, 1 << 64])
def test_a_seed_that_no_generator_takes_is_refused_before_anything_is_opened(seed: int) -> None:
    with pytest.raises(UserError, match=f"^seed must be from 0 to 4294967295, got {seed}$"):
        open_data("imagefolder:nowhere", seed=seed)


def test_a_folder_of_classes_is_split_without_overlap(folder):
    data = open_data(f"imagefolder:{folder}")
    assert (data.name, data.classes, data.native_size, data.augment) == ("pets", ("cat", "dog"), (6, 8), "shift")
    assert not names(data.train) & names(data.val)
    assert len(names(data.train) | names(data.val)) == 20
    assert torch.bincount(data.val.labels).tolist() == [2, 2]
    for source, label in zip(data.val.sources, data.val.labels.tolist(), strict=True):
        assert file(source).parent.name == data.classes[label]


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(new=st.text(alphabet="abcdefgh0123456789", min_size=2, max_size=8), seed=st.integers(0, 5))
def test_a_new_file_moves_at_most_one_other_of_its_class(folder, new, seed):
    before = open_data(f"imagefolder:{folder}", seed=seed)
    added = write_image(folder / "cat" / f"new-{new}.png")
    after = open_data(f"imagefolder:{folder}", seed=seed)
    added.unlink()
    assert {n for n in names(before.val) if n.startswith("dog")} == {n for n in names(after.val) if n.startswith("dog")}
    moved = (names(before.val) ^ names(after.val)) - {f"cat/{added.name}"}
    assert len(moved) <= 1


def test_the_split_and_the_fingerprint_do_not_depend_on_where_the_folder_lies(folder, tmp_path):
    before = open_data(f"imagefolder:{folder}")
    moved = tmp_path / "elsewhere" / "pets"
    shutil.copytree(folder, moved)
    after = open_data(f"imagefolder:{moved}")
    assert names(before.val) == names(after.val)
    assert before.fingerprint == after.fingerprint


SPLITS = [
    *[
        ("train", name)
        for name in ("test", "valid", "validation", "dev", "eval", "holdout", "hold-out", "testing", "tst")
    ],
    *[("Training", "Testing"), ("TRAIN", "VAL"), ("trn", "tst"), ("train2017", "val2017"), ("seg_train", "seg_test")],
    *[("training_set", "test_set"), ("TrainSet", "TestSet"), ("Train images", "Validation images")],
]


@pytest.mark.parametrize(("train_name", "val_name"), SPLITS)
def test_folders_of_splits_are_known_by_their_usual_names(tmp_path, train_name, val_name):
    for label in "ab":
        write_image(tmp_path / train_name / label / "1.png")
        write_image(tmp_path / val_name / label / "2.png")
    data = open_data(f"imagefolder:{tmp_path}")
    assert data.classes == ("a", "b")
    assert {file(source).name for source in data.train.sources} == {"1.png"}
    assert {file(source).name for source in data.val.sources} == {"2.png"}


def test_of_several_folders_to_measure_with_one_is_taken_and_the_others_are_said(tmp_path):
    for part in ("train", "test", "valid", "extra"):
        for label in "ab":
            write_image(tmp_path / part / label / f"{part}.png")
    data = open_data(f"imagefolder:{tmp_path}")
    assert {file(source).name for source in data.val.sources} == {"valid.png"}
    assert data.notes == ("valid/ is used for measuring; not used: extra/, test/",)


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        (("art/cat", "art/dog", "photo/cat", "photo/dog"), r"art/, photo/ all contain the same folders \(cat/, dog/\)"),
        (("a/cat", "a/dog", "a/eel", "b/cat", "b/dog"), "all contain the same folders"),
        (("cat/train", "cat/val", "dog/train", "dog/val"), "splits must contain the classes, as in train/CLASS/"),
        (("test/a", "test/b", "val/a", "val/b"), "has test/, val/ but no train/"),
        (("train/a", "train/b", "training/a", "training/b", "val/a"), "has train/, training/; only one folder can be"),
        (("cat/x", "dog/x", "val/x"), "val/ has the name of a split and contains folders"),
    ],
)
def test_folders_that_may_be_splits_are_refused_in_one_line(tmp_path, folders, message):
    for name in folders:
        for number in range(3):
            write_image(tmp_path / name / f"{number}.png")
    with pytest.raises(UserError, match=message) as caught:
        open_data(f"imagefolder:{tmp_path}")
    assert "\n" not in str(caught.value)


def test_one_folder_of_the_same_name_in_each_class_is_none_of_splits(tmp_path):
    for label in "ab":
        for number in range(3):
            write_image(tmp_path / label / "images" / f"{number}.png")
    assert open_data(f"imagefolder:{tmp_path}").classes == ("a", "b")


GAPS: dict[str, tuple[list[str], str, tuple[list[int], list[int]]]] = {
    "no validation images": (["train/a/1", "train/b/1", "val/a/2"], "b only in train/", ([0, 1], [0])),
    "no class to train": (
        ["train/a/1", "train/c/1", "val/a/2", "val/b/2", "val/c/2"],
        "b only in val/",
        ([0, 1], [0, 1]),
    ),
    "an empty class": (["a/1", "a/2", "b/", "c/1", "c/2"], "class folder 'b' holds no images", ([0, 2], [0, 2])),
    "empty in val": (["train/a/1", "train/b/1", "val/a/2", "val/b/"], "class folder 'b' holds no", ([0, 1], [0])),
    "one image": (["a/1", "b/1", "b/2"], "class 'a' has one image", ([0, 1], [1])),
    "the same folders": (["a/x/1", "a/y/1", "b/x/1", "b/y/1"], "all contain the same folders", ([0, 1], [0, 1])),
}


@pytest.mark.parametrize("kind", GAPS)
def test_a_gap_is_refused_and_accepted_by_a_flag_which_leaves_the_classes_in_their_places(tmp_path, kind):
    files, message, (train, val) = GAPS[kind]
    for name in files:
        (tmp_path / name).mkdir(parents=True) if name.endswith("/") else write_image(tmp_path / f"{name}.png")
    with pytest.raises(UserError, match=f"{message}.*if you want that, add --accept-gaps"):
        open_data(f"imagefolder:{tmp_path}")
    data = open_data(f"imagefolder:{tmp_path}", accept_gaps=True)
    assert [note for note in data.notes if message in note]
    assert data.train.labels.tolist() == train
    assert data.val.labels.tolist() == val
    assert data.classes == (("a", "c") if kind == "no class to train" else ("a", "b", "c")[: len(data.classes)])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *[(f"x.{suffix}", "JPEG") for suffix in ("jfif", "jpe", "JPEG", "jif", "jpg_large", "dat", "txt")],
        *[("x", "PNG"), ("x.dib", "BMP"), ("x.tif", "TIFF"), ("x.gif", "GIF"), ("x.jpg", "WEBP"), ("x.bak", "WEBP")],
        *[("x", "GIF"), ("x.raw", "BMP"), ("x.0001", "TIFF"), ("photo of 3. May", "JPEG")],
    ],
)
def test_every_file_that_can_be_decoded_is_an_image_whatever_it_is_called(tmp_path, name, kind):
    for label in "ab":
        for folder in ("train", "val"):
            (tmp_path / folder / label).mkdir(parents=True)
            Image.new("RGB", (4, 4), (9, 8, 7)).save(tmp_path / folder / label / name, kind)
    data = open_data(f"imagefolder:{tmp_path}")
    assert len(data.train) == len(data.val) == 2
    assert data.notes == ()


def test_files_that_are_left_out_are_counted_and_named_also_from_an_index(folder, large, monkeypatch):
    monkeypatch.setattr(kept, "_SETTLED_NS", 0)
    for name in ("cat/notes.txt", "cat/BMW models", "dog/labels.csv", "dog/more.csv", "loose.png"):
        (folder / name).write_bytes(b"BM, and other text")
    first, again = (open_data(f"imagefolder:{folder}") for _ in range(2))
    (note,) = first.notes
    assert note.startswith("left out: 5 files that are not images, or are in no class folder (2 .csv, ")
    assert all(name in note for name in ("cat/notes.txt", "cat/BMW models", "dog/labels.csv", "loose.png"))
    assert again.notes == first.notes
    assert list((large / "indexes").iterdir())


@pytest.mark.parametrize("val_name", ["val", "test", "valid", "validation"])
def test_train_and_val_folders_are_taken_as_they_are(tmp_path, val_name):
    for label in "ab":
        write_image(tmp_path / "train" / label / "deeper" / "1.JPG")
        write_image(tmp_path / val_name / label / "2.webp")
        write_image(tmp_path / "train" / label / ".hidden.png")
        (tmp_path / "train" / label / "notes.txt").write_text("not an image")
    (tmp_path / "train" / ".cache").mkdir()
    data = open_data(f"imagefolder:{tmp_path}")
    assert [file(source).name for source in data.train.sources] == ["1.JPG", "1.JPG"]
    assert [file(source).name for source in data.val.sources] == ["2.webp", "2.webp"]
    assert data.train.labels.tolist() == [0, 1]


def test_a_class_may_be_called_train(tmp_path):
    for label in ("bus", "car", "train"):
        for index in range(3):
            write_image(tmp_path / label / f"{index}.png")
    assert open_data(f"imagefolder:{tmp_path}").classes == ("bus", "car", "train")


def test_classes_that_differ_between_train_and_val_are_named(tmp_path):
    for part, label in (("train", "a"), ("train", "b"), ("val", "a"), ("val", "c")):
        write_image(tmp_path / part / label / "1.png")
    with pytest.raises(UserError, match=r"b only in train/; c only in val/"):
        open_data(f"imagefolder:{tmp_path}")


def test_train_without_val_says_what_to_do(tmp_path):
    write_image(tmp_path / "train" / "a" / "1.png")
    with pytest.raises(UserError, match=r"none of val/.*imagefolder:.*/train to have it split"):
        open_data(f"imagefolder:{tmp_path}")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "holds no images.*no folders"),
        (["loose.png"], "holds no images"),
        (["a/readme.txt", "b/readme.txt"], "holds no images.*2 folders"),
        (["a/1.png", "a/2.png"], r"only one class \(a\)"),
        (["a/1.png", "b/readme.txt"], "class folder 'b' holds no images"),
        (["a/1.png", "b/1.png", "b/2.png"], "class 'a' has one image"),
    ],
)
def test_folders_that_are_no_data_set_are_told_in_one_line(tmp_path, files, message):
    for name in files:
        if name.endswith(".png"):
            write_image(tmp_path / name)
        else:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).touch()
    with pytest.raises(UserError, match=message) as caught:
        open_data(f"imagefolder:{tmp_path}")
    assert "\n" not in str(caught.value)


def test_missing_folder_file_and_empty_reference_are_told_apart(tmp_path):
    (tmp_path / "file").touch()
    for reference, message in (
        (f"imagefolder:{tmp_path}/no", "no such folder"),
        (f"imagefolder:{tmp_path}/file", "not a folder"),
        ("imagefolder:", "imagefolder:DIR"),
    ):
        with pytest.raises(UserError, match=message):
            open_data(reference)


def test_a_folder_that_cannot_be_listed_is_a_user_error(folder, monkeypatch):
    # The tests may run as root, for whom no folder is unreadable; so the system's answer is played.
    listed = os.scandir

    def refuse(path):
        if os.fsdecode(path).endswith("dog"):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UserError, match=r"dog.*cannot be read \(Permission denied\)"):
        open_data(f"imagefolder:{folder}")


@pytest.mark.parametrize(("kind", "said"), [("pipe", "a pipe"), ("link to a device", "a device")])
def test_what_would_never_end_where_it_is_read_is_refused_by_its_name(folder, kind, said):
    path = folder / "cat" / "endless.png"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(UserError, match=rf"cat/endless\.png: is {said}; a folder of images must contain files only"):
        open_data(f"imagefolder:{folder}")


def test_a_folder_in_which_no_image_can_be_read_is_refused_and_the_first_ten_are_named(folder):
    for path in folder.rglob("*.png"):
        path.write_bytes(b"not a picture")
    with pytest.raises(UserError, match=r"cat/\d\.png: not an image.*; and 6 more") as caught:
        open_data(f"imagefolder:{folder}")
    assert str(caught.value).count(".png") == 10
    assert "\n" not in str(caught.value)


def test_images_of_different_sizes_have_no_native_size(folder):
    write_image(folder / "cat" / "0.png", size=(9, 9))
    for index in range(10):
        write_image(folder / "dog" / f"{index}.png", size=(20, 20))
    assert open_data(f"imagefolder:{folder}").native_size is None


def test_the_fingerprint_follows_content_names_and_labels(folder):
    def fingerprint() -> str:
        return open_data(f"imagefolder:{folder}").fingerprint

    seen = [fingerprint()]
    os.utime(folder / "cat" / "1.png", (1, 1))
    assert fingerprint() == seen[0]  # times do not count
    write_image(folder / "cat" / "1.png", 77)
    seen.append(fingerprint())
    (folder / "cat" / "1.png").rename(folder / "cat" / "one.png")
    seen.append(fingerprint())
    (folder / "cat" / "one.png").rename(folder / "dog" / "one.png")
    seen.append(fingerprint())
    assert len(set(seen)) == len(seen)


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """A user's cache folder that is the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "optimize-and-serve"


@pytest.fixture
def large(monkeypatch, own_cache):
    """Everything counts as too large to be hashed whole, and only two images of it are."""
    monkeypatch.setattr(fingerprint, "CONTENT_LIMIT", 100)
    monkeypatch.setattr(fingerprint, "SAMPLE", 2)
    return own_cache


def test_a_copy_of_large_data_keeps_its_fingerprint_whatever_its_times(folder, tmp_path, large):
    before = open_data(f"imagefolder:{folder}")
    shutil.copytree(folder, tmp_path / "elsewhere" / "pets", copy_function=shutil.copyfile)
    for path in folder.rglob("*.png"):
        os.utime(path, (1, 1))
    again, copied = (open_data(f"imagefolder:{place}") for place in (folder, tmp_path / "elsewhere" / "pets"))
    assert {data.fingerprint_kind for data in (before, again, copied)} == {"sample"}
    assert len({data.fingerprint for data in (before, again, copied)}) == 1
    assert {(data.train.fingerprint, data.val.fingerprint) for data in (again, copied)} == {
        (before.train.fingerprint, before.val.fingerprint)
    }


def test_the_fingerprint_of_large_data_follows_names_labels_sizes_and_the_sampled_bytes(folder, large):
    def fingerprint_of() -> str:
        return open_data(f"imagefolder:{folder}").fingerprint

    seen = [fingerprint_of()]
    data = open_data(f"imagefolder:{folder}")
    first = file(data.train.sources[0])  # the first and the last image are the sample of two
    first.write_bytes(first.read_bytes()[:-1] + b"x")
    seen.append(fingerprint_of())
    middle = file(data.train.sources[8])
    middle.write_bytes(middle.read_bytes() + b"longer")
    seen.append(fingerprint_of())
    middle.rename(middle.with_name("other.png"))
    seen.append(fingerprint_of())
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("size", ["small", "large"])
def test_new_validation_images_leave_the_training_fingerprint_as_it_was(tmp_path, size, request):
    if size == "large":
        request.getfixturevalue("large")
    for part, count in (("train", 4), ("val", 2)):
        for label in "ab":
            for index in range(count):
                write_image(tmp_path / "set" / part / label / f"{index}.png", index)
    before = open_data(f"imagefolder:{tmp_path / 'set'}")
    write_image(tmp_path / "set" / "val" / "b" / "new.png", 99)
    after = open_data(f"imagefolder:{tmp_path / 'set'}")
    assert before.train.fingerprint == after.train.fingerprint
    assert before.val.fingerprint != after.val.fingerprint
    assert before.fingerprint != after.fingerprint


def test_a_part_of_a_split_has_a_fingerprint_of_its_own_that_follows_the_whole():
    def split(first: bytes) -> Split:
        sources = tuple(bytes([n]) for n in range(39))
        return Split((first, *sources), Labels(torch.arange(40) % 2), fingerprint.Fingerprint(first.hex(), "content"))

    parts = [subset(split(b"a"), 10, seed) for seed in (0, 0, 1)] + [subset(split(b"b"), 10), subset(split(b"a"), 12)]
    assert parts[0].fingerprint == parts[1].fingerprint
    assert len({part.fingerprint for part in parts[1:]}) == 4


# --- the index of a large folder ---------------------------------------------------------------------------------


@pytest.fixture
def indexed(folder, large, monkeypatch):
    """A folder with an index; ``listings`` counts how often it was listed anew."""
    monkeypatch.setattr(kept, "_SETTLED_NS", 0)
    listings: list[Path] = []
    monkeypatch.setattr(
        folder_listing, "list_classes", noting(listings, folder_listing.list_classes, lambda root, *_, told: root)
    )
    open_data(f"imagefolder:{folder}")
    assert len(list((large / "indexes").iterdir())) == len(listings) == 1
    return folder, listings


def test_an_indexed_folder_is_not_listed_again_and_is_the_same(indexed):
    folder, listings = indexed
    first = open_data(f"imagefolder:{folder}")
    assert len(listings) == 1
    shutil.rmtree(os.environ["XDG_CACHE_HOME"])
    fresh = open_data(f"imagefolder:{folder}")
    assert len(listings) == 2
    for one, two in ((first.train, fresh.train), (first.val, fresh.val)):
        assert one.sources == two.sources
        assert one.labels.tolist() == two.labels.tolist()
        assert one.fingerprint == two.fingerprint
    assert (first.classes, first.native_size) == (fresh.classes, fresh.native_size)


def added(folder: Path) -> None:
    write_image(folder / "cat" / "new.png")


def removed(folder: Path) -> None:
    (folder / "dog" / "3.png").unlink()


def renamed(folder: Path) -> None:
    (folder / "dog" / "3.png").rename(folder / "dog" / "three.png")


def overwritten(folder: Path) -> None:
    write_image(folder / "dog" / "3.png", 200, (80, 60))


def classed(folder: Path) -> None:
    write_image(folder / "emu" / "1.png")
    write_image(folder / "emu" / "2.png")


@pytest.mark.parametrize("change", [added, removed, renamed, overwritten, classed])
def test_an_index_is_not_believed_after(change, indexed):
    folder, listings = indexed
    before = open_data(f"imagefolder:{folder}")
    change(folder)
    after = open_data(f"imagefolder:{folder}")
    assert len(listings) == 2
    assert before.fingerprint != after.fingerprint


def test_a_damaged_index_is_made_again(indexed, large):
    folder, listings = indexed
    (file,) = (large / "indexes").iterdir()
    file.write_bytes(file.read_bytes()[:200])
    open_data(f"imagefolder:{folder}")
    assert len(listings) == 2
    open_data(f"imagefolder:{folder}")
    assert len(listings) == 2


def test_no_index_is_kept_of_a_folder_that_has_just_changed_nor_of_a_small_one(folder, large, monkeypatch):
    open_data(f"imagefolder:{folder}")
    assert not (large / "indexes").exists()
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(large.parent))
    monkeypatch.setattr(kept, "_SETTLED_NS", 0)
    open_data(f"imagefolder:{folder}")
    assert not (large / "indexes").exists()


def test_a_folder_that_links_to_one_it_lies_in_is_listed_once(folder):
    (folder / "cat" / "loop").symlink_to(folder)
    assert len(names(open_data(f"imagefolder:{folder}").train)) == 16


def test_labels_of_another_length_or_type_are_refused():
    with pytest.raises(ValueError, match=r"equally many, got \[1, 2\]"):
        Split((b"", b""), Labels(torch.zeros(1, dtype=torch.int64)))
    with pytest.raises(ValueError, match="int64"):
        Labels(torch.zeros(1, dtype=torch.int32))


@pytest.mark.parametrize(
    ("wrong", "right"), [("digit", "digits"), ("cifar-1O", "cifar10"), ("imagefoldr", "imagefolder"), ("mnst", "mnist")]
)
def test_a_wrong_name_is_told_the_nearest(wrong, right):
    with pytest.raises(UserError, match=rf"did you mean.*{right}"):
        open_data(wrong)


def test_a_folder_given_without_its_kind_is_told_how(tmp_path):
    with pytest.raises(UserError, match=f"did you mean imagefolder:{tmp_path}"):
        open_data(str(tmp_path))


def test_every_listed_torchvision_data_set_exists_there():
    from torchvision import datasets as theirs

    for entry in SETS.values():
        assert hasattr(theirs, entry.cls)


def test_a_data_set_that_keeps_pixels_in_memory_is_read_from_torchvisions_files(tmp_path):
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    generator = np.random.default_rng(0)
    expected = {}
    for part, count in (("train", 30), ("t10k", 20)):
        pixels = generator.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = np.arange(count, dtype=np.uint8) % 10
        (raw / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 2051, count, 28, 28) + pixels.tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, count) + labels.tobytes())
        for kind in ("images-idx3", "labels-idx1"):
            file = raw / f"{part}-{kind}-ubyte"
            file.with_suffix(".gz").write_bytes(gzip.compress(file.read_bytes()))
        expected[part] = pixels
    data = open_torchvision("fashionmnist", tmp_path)
    assert data.classes[9] == "Ankle boot"
    assert data.native_size == (28, 28)
    for split, part in ((data.train, "train"), (data.val, "t10k")):
        assert split.labels.tolist() == [index % 10 for index in range(len(split))]
        decoded = torch.cat([image_preprocessing.decode(encoded(source), 1) for source in split.sources])
        assert torch.equal(decoded, torch.from_numpy(expected[part]))


def test_a_data_set_of_files_is_read_by_path_without_decoding(tmp_path):
    for part in ("train", "val"):
        for wnid in ("n01440764", "n03888257"):
            write_image(tmp_path / "imagenette2" / part / wnid / "1.JPEG")
    data = open_torchvision("imagenette", tmp_path)
    assert data.classes == ("tench", "parachute")
    assert data.val.sources == tuple(
        tmp_path / "imagenette2" / "val" / wnid / "1.JPEG" for wnid in ("n01440764", "n03888257")
    )


def test_without_a_network_the_message_says_where_the_files_would_have_to_be(tmp_path, monkeypatch):
    import torchvision.datasets.utils as downloads

    def offline(*_: object, **__: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(downloads.urllib.request, "urlopen", offline)
    with pytest.raises(UserError, match=f"no route to host.*{tmp_path}/cifar-10-python.tar.gz") as caught:
        open_torchvision("cifar10", tmp_path)
    assert "\n" not in str(caught.value)


class Told:
    """A listener that notes how far it was told that something is."""

    def __init__(self) -> None:
        self.shares: list[float] = []

    def started(self, name: str) -> None:
        """Nothing."""

    def progressed(self, fraction: float, message: str) -> None:
        self.shares.append(fraction)

    def ended(self, name: str, seconds: float, *, cached: bool, skipped: str | None) -> None:
        """Nothing."""

    def said(self, message: str) -> None:
        """Nothing."""


def test_opening_a_folder_says_how_far_it_is_class_by_class(tmp_path: Path) -> None:
    for part in ("train", "val"):
        for name in ("a", "b", "c", "d"):
            (tmp_path / part / name).mkdir(parents=True)
            write_image(tmp_path / part / name / "one.png")
    told = Told()
    open_data(f"imagefolder:{tmp_path}", listener=told)
    assert told.shares == sorted(told.shares)
    assert len(set(told.shares)) >= 8
    assert told.shares[0] >= 0
    assert told.shares[-1] < 1
